#pragma once

#include <ATen/core/Tensor.h>

#include <type_traits>

#include "longspan/kernels/select_keys/select_keys.h"

namespace longspan {

/// The tensors of a lightning indexer in one form, whatever axes they had.
struct IndexerInputs {
  at::Tensor q;        ///< [B, Tq, H, D]
  at::Tensor k;        ///< [B, Tk, D]
  at::Tensor weights;  ///< [B, Tq, H], accumulation type, contiguous

  /// Checked by check_indexer before.
  static IndexerInputs of(const at::Tensor& q, const at::Tensor& k,
                          const at::Tensor& weights);

  /// Fills in what kernels need of these tensors.
  void fill(KeyScoreArgs& args, int64_t slots) const;
};

/// A tensor [rows, tokens] or [rows, tokens, slots], which has no heads, as
/// kernels take it. It must outlive the array.
template <class Pointer>
TokenArray<Pointer> without_heads(const at::Tensor& t) {
  const auto array = [&](auto* data) {
    return TokenArray<Pointer>{static_cast<Pointer>(data), t.stride(0),
                               t.stride(1), 0};
  };
  if constexpr (std::is_const_v<std::remove_pointer_t<Pointer>>) {
    return array(t.const_data_ptr());
  } else {
    return array(t.mutable_data_ptr());
  }
}

/// Everything that shapes and types say; also for traced tensors.
void check_indexer(const char* who, const at::Tensor& q, const at::Tensor& k,
                   const at::Tensor& weights);

/// That there is a list for each query.
void check_listed(const char* who, const at::Tensor& q,
                  const at::Tensor& indices);

/// That there are slots, and windows for each of these queries. `queries` are
/// the sizes [Tq] or [B, Tq].
void check_slots(const char* who, const c10::SymInt& slots);
void check_window(const char* who, const char* name, const at::Tensor& window,
                  c10::SymIntArrayRef queries, at::Device device);

/// A border of windows as kernels take it: int32, cut to [0, keys], contiguous.
at::Tensor as_window(const at::Tensor& window, int64_t keys);

}  // namespace longspan
