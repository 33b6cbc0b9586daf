#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <tuple>
#include <vector>

#include "longspan/attention/detail/selected_exchange.h"
#include "longspan/ops/select_keys.h"
#include "longspan/ops/tensors.h"

namespace longspan::selected {

/// The last arguments of every operator here: over which ranks it runs. Without
/// them there is one rank, which holds the whole stream in order.
struct Where {
  OptionalTensor layout = {};
  std::string fetch = "gathered";
  std::string group = "";

  template <class Self>
  static auto fields(Self& self) {
    return std::tie(self.layout, self.fetch, self.group);
  }

  static Where of(const AttentionLayout& layout, const Group& group,
                  Fetch fetch = Fetch::gathered);

  /// Whether there is no layout, and so one rank. `who` is named in messages.
  bool is_here(const char* who) const;
};

/// [Tq] or [B, Tq].
inline c10::SymIntArrayRef queries_of(const at::Tensor& q) {
  return q.sym_sizes().slice(0, static_cast<std::size_t>(q.dim() - 2));
}

/// With a layout every rank brings the keys of its own tokens.
void check_keys(const char* who, const char* name, const at::Tensor& k,
                const at::Tensor& q, const OptionalTensor& layout);

/// What shapes and types say of an indexer with windows, also when traced.
void check_select(const char* who, const at::Tensor& q, const at::Tensor& k,
                  const at::Tensor& weights, const OptionalTensor& start,
                  const OptionalTensor& end, const OptionalTensor& layout,
                  const c10::SymInt& slots);

/// Checks that a layout without values only occurs while tracing.
void check_meta(const char* who, const at::Tensor& q);

/// With the rows of a batch first, one row where q has none; and back.
inline at::Tensor with_row(const at::Tensor& q, const at::Tensor& t) {
  return q.dim() == 4 ? t : t.unsqueeze(0);
}
inline at::Tensor without_row(const at::Tensor& q, const at::Tensor& t) {
  return q.dim() == 4 ? t : t.squeeze(0);
}

/// One call on one rank of many: who exchanges what, and tensors in one form.
class Call {
 public:
  /// Checks what the layout says about the tokens of q. `who` is the operator,
  /// `purpose` what messages of lost peers call it.
  Call(const char* who, const std::string& purpose, const at::Tensor& q,
       const Where& where);

  const Traffic& traffic() const { return traffic_; }
  int64_t rows() const { return q_.dim() == 4 ? q_.size(0) : 1; }
  at::Tensor with_row(const at::Tensor& t) const {
    return selected::with_row(q_, t);
  }

  /// Rows of these kinds of keys for lists [rows, queries, .., slots].
  FetchedKeys fetched(const at::Tensor& lists) const {
    return {lists, fetch_, traffic_};
  }
  bool is_gathered() const {
    return fetch_ == Fetch::gathered || traffic_.group.size() == 1;
  }

  /// As the caller has it; also where rows were laid end to end.
  at::Tensor as_given(const at::Tensor& t) const;

  /// Keys as they travel: [local tokens, rows, channels of all groups].
  at::Tensor tokens_first(const at::Tensor& keys) const;
  /// Such keys back in the shape of the caller's.
  at::Tensor like_keys(const at::Tensor& tokens, const at::Tensor& keys) const;
  /// Fetched rows with the groups that `kv` has.
  at::Tensor grouped(const at::Tensor& rows, const at::Tensor& kv) const;

 private:
  at::Tensor q_;
  Traffic traffic_;
  Fetch fetch_;
};

/// Given windows, as int32 [rows, queries]; otherwise those of the masks, or
/// causal ones where there are no masks.
struct Windows {
  KeyWindows borders;
  bool came = false;
};
Windows windows_of(const Call& call, const char* who, const at::Tensor& q,
                   const OptionalTensor& start, const OptionalTensor& end,
                   int64_t keys);
KeyWindows causal_windows(const char* who, const at::Tensor& q, int64_t keys);

/// Selection for this rank's queries, [rows, queries, slots], from all keys,
/// [rows, tokens, channels].
Selection select_here(const Call& call, const char* who, const at::Tensor& q,
                      const at::Tensor& all_keys, const at::Tensor& weights,
                      const Windows& windows, int64_t slots, bool scores,
                      bool balanced);

}  // namespace longspan::selected
