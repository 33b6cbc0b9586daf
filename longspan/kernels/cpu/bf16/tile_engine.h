#pragma once

#include "longspan/kernels/cpu/bf16/product.h"

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
    const uint16_t* a = m.a + row * m.a_stride;
    const uint32_t* b = m.b + column;
    float* c = m.c + row * m.c_stride + column;
    const int64_t a_bytes = m.a_stride * 2, b_bytes = m.b_stride * 4;
    const int64_t c_bytes = m.c_stride * 4;
    each_of_c<kRows, kColumns>([&](auto i, auto j) {
      if constexpr (begin == Begin::zero) {
        Tiles::template zero<kC + 2 * i + j>();
      } else {
        Tiles::template load<kC + 2 * i + j>(c + 16 * i * m.c_stride + 16 * j,
                                             c_bytes);
      }
    });
    for (int depth = 0; depth < m.depth; depth += kDepth) {
      each_of<kColumns>(
          [&](auto j) { Tiles::template load<kB + j>(b + 16 * j, b_bytes); });
      each_of<kRows>([&](auto i) {
        Tiles::template load<kA + i>(a + 16 * i * m.a_stride, a_bytes);
        each_of<kColumns>([&](auto j) {
          Tiles::template dot<kC + 2 * i + j, kA + i, kB + j>();
        });
      });
      a += kDepth;
      b += kDepth / 2 * m.b_stride;
    }
    each_of_c<kRows, kColumns>([&](auto i, auto j) {
      Tiles::template store<kC + 2 * i + j>(c + 16 * i * m.c_stride + 16 * j,
                                            c_bytes);
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
