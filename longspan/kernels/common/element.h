#pragma once

#include <cstdint>

namespace longspan {

/// What tensors of a layer are made of. Everything that is summed is float, or
/// double for float64: the accumulation type.
enum class ElementType { float32, bfloat16, float16, float64 };

/// An array [row, token, head, channel] in memory of the caller. Strides count
/// elements; channels are contiguous.
template <class Pointer>
struct TokenArray {
  Pointer data = nullptr;
  int64_t row_stride = 0, token_stride = 0, head_stride = 0;
};

}  // namespace longspan
