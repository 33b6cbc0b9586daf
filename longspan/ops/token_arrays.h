#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <type_traits>
#include <vector>

#include "longspan/core/detail/check.h"
#include "longspan/core/token_range.h"
#include "longspan/kernels/levels/levels.h"
#include "longspan/ops/checks.h"

namespace longspan {

/// As many channels as kernels take.
inline constexpr int64_t kMostChannels = 576;

/// The tensor itself where its last axis is contiguous, else a copy.
at::Tensor with_contiguous_channels(const at::Tensor& tensor);

/// A tensor whose rows of channels also start at multiples of 16 bytes, as
/// kernels on CUDA read them; the tensor itself where a copy would not help.
at::Tensor with_aligned_rows(const at::Tensor& tensor);

/// Ranges of the first axis, one after another; a view where there is only one.
at::Tensor join_ranges(const at::Tensor& tensor,
                       const std::vector<TokenRange>& ranges);

/// What kernels call a dtype; nothing where they have no such elements.
std::optional<ElementType> element_type(at::ScalarType dtype);

/// A tensor [rows, tokens, heads] or [rows, tokens, heads, channels] as kernels
/// take it. It must outlive the array.
template <class Pointer>
TokenArray<Pointer> array_of(const at::Tensor& tensor) {
  promise(tensor.numel() == 0 || tensor.dim() == 3 || tensor.size(3) <= 1 ||
              tensor.stride(3) == 1,
          "array_of: the channels of ", describe(tensor),
          " are not contiguous");
  const auto array = [&](auto* data) {
    return TokenArray<Pointer>{static_cast<Pointer>(data), tensor.stride(0),
                               tensor.stride(1), tensor.stride(2)};
  };
  if constexpr (std::is_const_v<std::remove_pointer_t<Pointer>>) {
    return array(tensor.const_data_ptr());
  } else {
    return array(tensor.mutable_data_ptr());
  }
}

}  // namespace longspan
