#pragma once

#include <algorithm>
#include <cstdint>

#include "longspan/core/token_range.h"
#include "longspan/kernels/common/element.h"

/// What the runners of selection share: control flow only.
namespace longspan {

/// The address of (row, token), or of (row, token, head), for elements of some
/// size.
inline const char* place_of(const TokenArray<const void*>& array, int64_t row,
                            int64_t token, int64_t bytes, int64_t head = 0) {
  return static_cast<const char*>(array.data) +
         (row * array.row_stride + token * array.token_stride +
          head * array.head_stride) *
             bytes;
}
inline char* place_of(const TokenArray<void*>& array, int64_t row,
                      int64_t token, int64_t bytes, int64_t head = 0) {
  return static_cast<char*>(array.data) +
         (row * array.row_stride + token * array.token_stride +
          head * array.head_stride) *
             bytes;
}
template <class Integer>
Integer* place_of(const TokenArray<Integer*>& array, int64_t row,
                  int64_t token) {
  return array.data + row * array.row_stride + token * array.token_stride;
}

/// [start, end) inside of [0, keys); [0, 0) where nothing is.
inline TokenRange window_of(int32_t start, int32_t end, int64_t keys) {
  const int64_t begin = std::clamp<int64_t>(start, 0, keys);
  const int64_t stop = std::clamp<int64_t>(end, 0, keys);
  return begin < stop ? TokenRange{begin, stop} : TokenRange{0, 0};
}

}  // namespace longspan
