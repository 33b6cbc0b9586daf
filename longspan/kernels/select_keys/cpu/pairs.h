#pragma once

#include "longspan/kernels/common/cpu/bf16/product.h"
#include "longspan/kernels/select_keys/cpu/backward.h"

namespace longspan {
namespace {

/// Operands of products of bfloat16 pairs, by one of their engines.
template <class Engine>
struct PairOperands {
  using Element = Bfloat16;
  using T = float;
  using A = uint16_t;
  using B = uint32_t;
  static constexpr int kColumns = 64;

  static void start() { Engine::start(); }
  static void finish() { Engine::finish(); }
  static int64_t row_stride(int channels) {
    return row_length<uint16_t>(channels);
  }
  static int64_t key_elements(int channels) {
    return int64_t{rounded_up(channels, kDepthStep)} / 2 * kScoredKeys;
  }

  static void pack_row(const Bfloat16* from, int channels, A* to) {
    for (int i = 0; i < channels; ++i) to[i] = from[i].bits;
    for (int i = channels; i < rounded_up(channels, kDepthStep); ++i) to[i] = 0;
  }
  static void turn(const A* rows, int count, int channels, B* to) {
    pairs_of_channels(rows, row_stride(channels), count, channels, to,
                      kScoredKeys);
  }
  static void multiply(const A* a, int rows, const B* b, int channels,
                       int columns, float* c) {
    Engine::template multiply<Begin::zero>({.a = a,
                                            .a_stride = row_stride(channels),
                                            .b = b,
                                            .b_stride = kScoredKeys,
                                            .c = c,
                                            .c_stride = kColumns,
                                            .rows = rows,
                                            .depth = channels,
                                            .columns = columns});
  }
};

}  // namespace
}  // namespace longspan
