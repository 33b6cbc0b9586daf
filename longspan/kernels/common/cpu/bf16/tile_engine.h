#pragma once

#include "longspan/kernels/common/cpu/bf16/product.h"

namespace longspan {
namespace {

/// Products by tiles of 16 rows of 64 bytes: of 16 x 32 elements of A, of 16
/// pairs x 16 columns of B, and of 16 x 16 floats of C. Two by two tiles of C
/// stay in `Tiles` while the depth goes by, each load then serves two products.
/// Rows go outside: most products have few columns, whose B stays in the first
/// cache while A passes once.
///
/// Rows of A and C have room up to whole steps of 16.
template <class Tiles>
struct TileEngine {
  static constexpr int kDepth = 32;  // of one step

  /// Tiles belong to a thread, between these two.
  static void start() { Tiles::configure(); }
  static void finish() { Tiles::release(); }

  template <Begin begin>
  static void multiply(const PairProduct& m) {
    const int rows = rounded_up(m.rows, 16);
    for (int row = 0; row < rows; row += 32) {
      const bool tall = rows - row > 16;
      for (int column = 0; column < m.columns; column += 32) {
        const bool wide = m.columns - column > 16;
        if (tall && wide) {
          multiply_block<begin, 2, 2>(m, row, column);
        } else if (tall) {
          multiply_block<begin, 2, 1>(m, row, column);
        } else if (wide) {
          multiply_block<begin, 1, 2>(m, row, column);
        } else {
          multiply_block<begin, 1, 1>(m, row, column);
        }
      }
    }
  }

 private:
  static constexpr int kC = 0, kA = 4, kB = 6;  // first tiles of each

  template <Begin begin, int kRows, int kColumns>
  static void multiply_block(const PairProduct& m, int row, int column) {
    // Copies: the compiler believes that a tile's load may change `m`.
    const int64_t a_stride = m.a_stride, b_stride = m.b_stride;
    const int64_t c_stride = m.c_stride;
    const uint16_t* a = m.a + row * a_stride;
    const uint32_t* b = m.b + column;
    float* c = m.c + row * c_stride + column;
    const int steps = (m.depth + kDepth - 1) / kDepth;
    each_of_c<kRows, kColumns>([&](auto i, auto j) {
      if constexpr (begin == Begin::zero) {
        Tiles::template zero<kC + 2 * i + j>();
      } else {
        Tiles::template load<kC + 2 * i + j>(c + 16 * i * c_stride + 16 * j,
                                             c_stride * 4);
      }
    });
    for (int step = 0; step < steps; ++step) {
      each_of<kColumns>([&](auto j) {
        Tiles::template load<kB + j>(b + 16 * j, b_stride * 4);
      });
      each_of<kRows>([&](auto i) {
        Tiles::template load<kA + i>(a + 16 * i * a_stride, a_stride * 2);
        each_of<kColumns>([&](auto j) {
          Tiles::template dot<kC + 2 * i + j, kA + i, kB + j>();
        });
      });
      a += kDepth;
      b += kDepth / 2 * b_stride;
    }
    each_of_c<kRows, kColumns>([&](auto i, auto j) {
      Tiles::template store<kC + 2 * i + j>(c + 16 * i * c_stride + 16 * j,
                                            c_stride * 4);
    });
  }

  /// A number that a template can be named with.
  template <int n>
  struct Constant {
    constexpr operator int() const { return n; }
  };

  template <int kCount, class Visit>
  [[gnu::always_inline]] static void each_of(const Visit& visit) {
    visit(Constant<0>{});
    if constexpr (kCount > 1) visit(Constant<1>{});
  }
  template <int kRows, int kColumns, class Visit>
  [[gnu::always_inline]] static void each_of_c(const Visit& visit) {
    each_of<kRows>(
        [&](auto i) { each_of<kColumns>([&](auto j) { visit(i, j); }); });
  }
};

}  // namespace
}  // namespace longspan
