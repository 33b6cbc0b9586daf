#pragma once

#include "longspan/kernels/common/cpu/bf16/transpose.h"
#include "longspan/kernels/common/cpu/simd/pack.h"

/// Brings bfloat16 rows of callers into the layouts of a product's operands.
///
/// A lies in rows, its depth contiguous. B lies in pairs: word (p, n) holds the
/// elements of depth 2 p and 2 p + 1 of column n, so a row of words is a vector
/// of columns. Both are 0 from the end of their depth up to a multiple of 32.
namespace longspan {
namespace {

/// n, rounded up to whole steps.
inline int rounded_up(int n, int step) {
  return (n + step - 1) / step * step;
}

/// Every operand's depth is padded to this, every other side to half of it.
constexpr int kDepthStep = 32, kSideStep = 16;

/// Copies `rows` rows of n elements; they are 0 up to a multiple of 32, and so
/// are the rows up to `all_rows`. Returns whether all are finite.
inline bool copy_rows(const uint16_t* from, int64_t from_stride, int rows,
                      int all_rows, int n, uint16_t* to, int64_t to_stride) {
  const int whole = rounded_up(n, kDepthStep);
  uint16_t top = 0;
  for (int row = 0; row < rows; ++row) {
    for (int i = 0; i < n; ++i) to[i] = from[i];
    for (int i = n; i < whole; ++i) to[i] = 0;
    for (int i = 0; i < whole; ++i) {
      const uint16_t size = to[i] & 0x7fff;
      top = size > top ? size : top;
    }
    from += from_stride;
    to += to_stride;
  }
  for (int row = rows; row < all_rows; ++row) {
    for (int i = 0; i < whole; ++i) to[i] = 0;
    to += to_stride;
  }
  return top < 0x7f80;
}

/// From `rows` copied rows, whole steps of 16, to B with one column for each:
/// to[p][row] is the pair of channels 2 p and 2 p + 1.
inline void pairs_of_channels(const uint16_t* from, int64_t from_stride,
                              int rows, int n, uint32_t* to,
                              int64_t to_stride) {
  const int words = rounded_up(n, kDepthStep) / 2;
  for (int row = 0; row < rows; row += 16) {
    for (int p = 0; p < words; p += 16) {
      transpose_block(from + row * from_stride + 2 * p, from_stride * 2,
                      to + p * to_stride + row, to_stride * 4);
    }
  }
}

/// From `rows` copied rows, whole steps of 32, to B with one column for each
/// channel: to[p][channel] is the pair of rows 2 p and 2 p + 1.
inline void pairs_of_rows(const uint16_t* from, int64_t from_stride, int rows,
                          int n, uint32_t* to, int64_t to_stride) {
  const int whole = rounded_up(n, kSideStep);
  for (int p = 0; p < rows / 2; ++p) {
    const uint16_t* even = from + 2 * p * from_stride;
    const uint16_t* odd = even + from_stride;
    for (int i = 0; i < whole; ++i) {
      to[p * to_stride + i] = even[i] | static_cast<uint32_t>(odd[i]) << 16;
    }
  }
}

/// From `rows` copied rows, whole steps of 32, to A with a row for each
/// channel: to[channel][row].
inline void rows_of_channels(const uint16_t* from, int64_t from_stride,
                             int rows, int n, uint16_t* to, int64_t to_stride) {
  for (int row = 0; row < rows; row += 32) {
    for (int channel = 0; channel < n; channel += 16) {
      transpose_row_pairs(from + row * from_stride + channel, from_stride,
                          to + channel * to_stride + row, to_stride * 2);
    }
  }
}

/// Asks for part `part` of `parts` of some rows, to be at hand a little later:
/// rows of a caller often lie a page apart, where the CPU does not look ahead.
template <class T>
inline void prefetch_rows(const T* from, int64_t stride, int rows, int n,
                          int part, int parts) {
  constexpr int kLine = 64 / sizeof(T);
  for (int row = rows * part / parts; row < rows * (part + 1) / parts; ++row) {
    for (int i = 0; i < n; i += kLine) {
      __builtin_prefetch(from + row * stride + i, 0, 2);
    }
  }
}

/// Elements of one (row, first token, head) of an array of bfloat16.
inline const uint16_t* bf16_place(const TokenArray<const void*>& array,
                                  int64_t row, int64_t token, int64_t head) {
  return place_in<const uint16_t>(array, row, token, head);
}

}  // namespace
}  // namespace longspan
