#pragma once

#include "longspan/kernels/common/cpu/simd/vectors.h"

/// The one product behind all six of attention: C = A B or C += A B.
namespace longspan {
namespace {

/// How A lies in memory: element (i, p) at i * stride + p, or, transposed, at
/// i + p * stride.
enum class Layout { rows, transposed };

/// Part of a product's depth.
struct Depth {
  int begin, end;
};

/// Matrices of a product. Rows of B and C hold whole vectors.
template <class T>
struct Product {
  const T* a;
  int64_t a_stride;
  const T* b;  // [depth, columns]
  int64_t b_stride;
  T* c;  // [rows, columns]
  int64_t c_stride;
  int rows, depth, columns;  // depth 1 or more
  /// Where the rows of each tile are not 0; all of the depth where this is
  /// null.
  const Depth* depths = nullptr;
};

enum class Start { zero, add };

/// One tile of C, which lives in registers: for each p in order, a column of A
/// times a row of B. Every element is one chain of additions over p, however
/// the tiles lie; what C held before is added last.
template <Layout layout, Start start, int kRows, int kVectors, class T>
[[gnu::always_inline]] inline void multiply_tile(const T* a, int64_t a_stride,
                                                 const T* b, int64_t b_stride,
                                                 T* c, int64_t c_stride,
                                                 int depth) {
  Vector<T> sum[kRows][kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      sum[i][j] = Vector<T>{};
      if (start == Start::add) {
        __builtin_prefetch(c + i * c_stride + j * kLanes<T>, 1);
      }
    }
  }
  const int64_t row = layout == Layout::rows ? a_stride : 1;
  const int64_t step = layout == Layout::rows ? 1 : a_stride;
  // At least once: a way around the loop would move all sums through memory.
  do {
    Vector<T> from_b[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) from_b[j] = load(b + j * kLanes<T>);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const Vector<T> from_a = all_lanes(a[i * row]);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        sum[i][j] = multiply_add(from_a, from_b[j], sum[i][j]);
      }
    }
    a += step;
    b += b_stride;
  } while (--depth > 0);
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      T* at = c + i * c_stride + j * kLanes<T>;
      store(at, start == Start::zero ? sum[i][j] : load(at) + sum[i][j]);
    }
  }
}

/// Rows from `row` on, as many as a tile has or as are left.
template <Layout layout, Start start, int kRows, int kVectors, class T>
void multiply_rows(const Product<T>& m, int row, int column) {
  if constexpr (kRows > 1) {
    if (m.rows - row < kRows) {
      multiply_rows<layout, start, kRows - 1, kVectors>(m, row, column);
      return;
    }
  }
  const Depth depth =
      m.depths == nullptr ? Depth{0, m.depth} : m.depths[row / kTileRows];
  const int64_t in_a = layout == Layout::rows ? row * m.a_stride + depth.begin
                                              : row + depth.begin * m.a_stride;
  multiply_tile<layout, start, kRows, kVectors>(
      m.a + in_a, m.a_stride, m.b + depth.begin * m.b_stride + column,
      m.b_stride, m.c + row * m.c_stride + column, m.c_stride,
      depth.end - depth.begin);
}

/// Columns from `column` on, as many as a tile has or as are left: this panel
/// of B stays in the cache while rows go by.
template <Layout layout, Start start, int kVectors, class T>
void multiply_panel(const Product<T>& m, int column) {
  if constexpr (kVectors > 1) {
    if (m.columns - column < kVectors * kLanes<T>) {
      multiply_panel<layout, start, kVectors - 1>(m, column);
      return;
    }
  }
  for (int row = 0; row < m.rows; row += kTileRows) {
    multiply_rows<layout, start, kTileRows, kVectors>(m, row, column);
  }
}

template <Layout layout, Start start, class T>
void multiply(const Product<T>& m) {
  constexpr int kPanel = kTileVectors * kLanes<T>;
  for (int column = 0; column < m.columns; column += kPanel) {
    multiply_panel<layout, start, kTileVectors>(m, column);
  }
}

}  // namespace
}  // namespace longspan
