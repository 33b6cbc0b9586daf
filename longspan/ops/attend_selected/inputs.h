#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "longspan/kernels/attend_selected/attend_selected.h"
#include "longspan/ops/attend_selected.h"

namespace longspan {

/// The tensors of selected attention in one form, whatever axes they had.
struct SelectedInputs {
  at::Tensor q;        ///< [B, Tq, H, D]
  at::Tensor kv;       ///< [B, Tk, G, D]
  at::Tensor indices;  ///< int32 [B, Tq, G, slots], slots contiguous
  at::Tensor sink;     ///< [H], accumulation type; undefined without
  double scale = 1;
  int64_t value_dim = 0;

  /// Checked by check_selected before.
  static SelectedInputs of(const at::Tensor& q, const at::Tensor& kv,
                           const at::Tensor& indices,
                           const std::optional<at::Tensor>& sink, double scale,
                           int64_t value_dim);

  /// Fills in what kernels need of these tensors.
  void fill(SelectedAttentionArgs& args) const;

  int64_t key_heads() const { return kv.size(2); }
  int64_t slots() const { return indices.size(3); }
};

/// Everything that shapes and types say; also for traced tensors.
void check_selected(const char* who, const at::Tensor& q, const at::Tensor& kv,
                    const at::Tensor& indices,
                    const std::optional<at::Tensor>& sink, double scale,
                    int64_t value_dim);

/// That an answer and its gradient fit the queries.
void check_answer(const char* who, const at::Tensor& q, int64_t value_dim,
                  const at::Tensor& out, const at::Tensor& lse,
                  const at::Tensor& dout);

/// That a tensor has these sizes, this type, and the device of q.
void check_like(const char* who, const char* name, const at::Tensor& t,
                c10::SymIntArrayRef sizes, at::ScalarType dtype,
                const at::Tensor& q);

/// Indices outside [0, keys) become -1, so that narrowing changes no key.
at::Tensor as_slots(const at::Tensor& indices, int64_t keys);

/// Checks that two tensors lie on one device; `who` is named in messages.
void check_same_device(const char* who, const char* name, const at::Tensor& t,
                       const at::Tensor& q);

}  // namespace longspan
