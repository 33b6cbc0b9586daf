#pragma once

#include <immintrin.h>

#include "longspan/kernels/common/cpu/bf16/product.h"

namespace longspan {
namespace {

/// Products by vdpbf16ps: each lane adds the dot product of two pairs. A tile
/// of C, 6 rows of 4 vectors, lives in registers.
struct DotEngine {
  static constexpr int kDepth = 2;  // of one step
  static constexpr int kTileRows = 6, kTileVectors = 4;

  static void start() {}
  static void finish() {}

  template <Begin begin>
  static void multiply(const PairProduct& m) {
    for (int column = 0; column < m.columns; column += 16 * kTileVectors) {
      multiply_panel<begin, kTileVectors>(m, column);
    }
  }

 private:
  template <Begin begin, int kRows, int kVectors>
  [[gnu::always_inline]] static void multiply_tile(
      const uint16_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride,
      float* c, int64_t c_stride, int pairs) {
    __m512 sum[kRows][kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        sum[i][j] = begin == Begin::zero
                        ? _mm512_setzero_ps()
                        : _mm512_loadu_ps(c + i * c_stride + j * 16);
      }
    }
    for (int p = 0; p < pairs; ++p) {
      __m512bh from_b[kVectors];
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        from_b[j] = (__m512bh)_mm512_loadu_si512(b + j * 16);
      }
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
        int32_t pair;
        __builtin_memcpy(&pair, a + i * a_stride, sizeof pair);
        const __m512bh from_a = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) {
          sum[i][j] = _mm512_dpbf16_ps(sum[i][j], from_a, from_b[j]);
        }
      }
      a += 2;
      b += b_stride;
    }
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        _mm512_storeu_ps(c + i * c_stride + j * 16, sum[i][j]);
      }
    }
  }

  /// Rows from `row` on, as many as a tile has or as are left.
  template <Begin begin, int kRows, int kVectors>
  static void multiply_rows(const PairProduct& m, int row, int column) {
    if constexpr (kRows > 1) {
      if (m.rows - row < kRows) {
        multiply_rows<begin, kRows - 1, kVectors>(m, row, column);
        return;
      }
    }
    multiply_tile<begin, kRows, kVectors>(
        m.a + row * m.a_stride, m.a_stride, m.b + column, m.b_stride,
        m.c + row * m.c_stride + column, m.c_stride, (m.depth + 1) / 2);
  }

  /// Columns from `column` on, as many as a tile has or as are left.
  template <Begin begin, int kVectors>
  static void multiply_panel(const PairProduct& m, int column) {
    if constexpr (kVectors > 1) {
      if (m.columns - column < kVectors * 16) {
        multiply_panel<begin, kVectors - 1>(m, column);
        return;
      }
    }
    for (int row = 0; row < m.rows; row += kTileRows) {
      multiply_rows<begin, kTileRows, kVectors>(m, row, column);
    }
  }
};

}  // namespace
}  // namespace longspan
