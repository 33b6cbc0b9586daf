#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "longspan/attention/selected_exchange.h"
#include "longspan/attention/selected_run.h"

namespace longspan::selected {

/// One call on one rank: who exchanges what, and tensors in one form. Rows of a
/// batch come first; one row where none came.
class Call {
 public:
  /// Checks what the layout says about the tokens of q. `who` is the operator,
  /// `purpose` what messages of lost peers call it.
  Call(const char* who, const std::string& purpose, const at::Tensor& q,
       const OptionalTensor& layout, const std::string& group);

  const Traffic& traffic() const { return traffic_; }
  int64_t rows() const { return rows_; }

  /// [rows, ..].
  at::Tensor with_row(const at::Tensor& t) const {
    return has_rows_ ? t : t.unsqueeze(0);
  }
  /// As the caller has it; also where rows were laid end to end.
  at::Tensor as_given(const at::Tensor& t, at::IntArrayRef queries) const;

  /// Keys as they travel: [local tokens, rows, channels of all groups].
  at::Tensor tokens_first(const at::Tensor& keys) const;
  /// And back, in the type and shape of those that came.
  at::Tensor like_keys(const at::Tensor& tokens, const at::Tensor& keys) const;
  /// Fetched rows with the groups that `kv` has.
  at::Tensor grouped(const at::Tensor& rows, const at::Tensor& kv) const;

 private:
  Traffic traffic_;
  bool has_rows_;
  int64_t rows_;
};

/// Windows that came, as int32 [rows, queries]; those of the masks otherwise.
struct Windows {
  KeyWindows borders;
  bool came = false;
};
Windows windows_of(const Call& call, const char* who, const at::Tensor& q,
                   const OptionalTensor& start, const OptionalTensor& end,
                   int64_t keys);

/// Selection for this rank's queries, [rows, queries, slots], from all keys,
/// [rows, tokens, channels].
Selection select_here(const Call& call, const char* who, const at::Tensor& q,
                      const at::Tensor& all_keys, const at::Tensor& weights,
                      const Windows& windows, int64_t slots, bool scores,
                      bool balanced);

/// score_selected_backward with dk in the accumulation type.
Tensors3 exact_score_backward(const at::Tensor& dscores, const at::Tensor& q,
                              const at::Tensor& k, const at::Tensor& weights,
                              const at::Tensor& indices);

}  // namespace longspan::selected
