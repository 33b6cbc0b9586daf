#pragma once

#include "longspan/kernels/attention/cpu/bf16/panels.h"
#include "longspan/kernels/common/cpu/bf16/product.h"
#include "longspan/kernels/common/cpu/simd/functions.h"

/// What both directions do with the scores of a panel. They lie transposed,
/// [keys, queries]: a softmax over keys works on whole vectors of queries, rows
/// of weights are ready to be an A, and pairs of rows to be a B.
namespace longspan {
namespace {

/// prefetch_rows for keys behind those at hand, which are likely to be next.
inline void prefetch_keys(const TokenArray<const void*>& array, int64_t row,
                          int64_t key_head, int64_t first, int64_t keys,
                          int channels, int part, int parts) {
  const int64_t left = keys - first;
  const int rows = static_cast<int>(left < kKeysAtOnce ? left : kKeysAtOnce);
  prefetch_rows(place_in<const uint16_t>(array, row, first, key_head),
                array.token_stride, rows, channels, part, parts);
}

/// The scratch row of a panel's scores, and of a block's keys.
constexpr int64_t kScoreStride = kPanel + 16;
constexpr int64_t kKeyStride = kKeysAtOnce + 32;

/// The part of a panel's scores that is worth computing, in whole steps.
struct Part {
  int key_begin, key_end;    // whole steps of the engine's depth
  int lane_begin, lane_end;  // whole steps of 16 or 32
};

template <class Engine>
inline Part part_of(const PanelKeys& seen, int lane_step) {
  return {seen.first / Engine::kDepth * Engine::kDepth,
          rounded_up(seen.last, Engine::kDepth),
          seen.first_query / lane_step * lane_step,
          rounded_up(seen.last_query, lane_step)};
}

/// Which keys the queries of one vector see.
struct Visible {
  Choice<float> low, high;
  bool all = true;  // all queries, all keys of the part

  Visible(const PanelKeys& seen, const Part& part, int lane) {
    __builtin_memcpy(&low, seen.low + lane, sizeof low);
    __builtin_memcpy(&high, seen.high + lane, sizeof high);
    const Choice<float> hidden = (low > part.key_begin) | (high < part.key_end);
    all = !any_of(hidden);
  }
  Choice<float> sees(int key) const { return (low <= key) & (high > key); }
};

/// How a product becomes a score, in units of log 2: exp2 of it is the weight.
struct ScoreScale {
  static constexpr double kLog2E = 1.4426950408889634;
  float factor;              // without a soft cap
  float into_cap, from_cap;  // with one
  bool capped;

  explicit ScoreScale(const AttentionArgs& args)
      : factor(static_cast<float>(args.scale * kLog2E)),
        into_cap(args.softcap == 0
                     ? 0
                     : static_cast<float>(args.scale / args.softcap)),
        from_cap(static_cast<float>(args.softcap * kLog2E)),
        capped(args.softcap != 0) {}

  Floats of(Floats product) const {
    if (!capped) return product * factor;
    return tanh_of(product * into_cap) * from_cap;
  }
};

/// scores = k q' of the part, of packed operands.
template <class Engine>
void multiply_part(const Part& part, const uint16_t* rows, int64_t row_stride,
                   const uint32_t* columns, int channels, float* scores) {
  Engine::template multiply<Begin::zero>(
      {.a = rows + part.key_begin * row_stride,
       .a_stride = row_stride,
       .b = columns + part.lane_begin,
       .b_stride = kPanel,
       .c = scores + part.key_begin * kScoreStride + part.lane_begin,
       .c_stride = kScoreStride,
       .rows = part.key_end - part.key_begin,
       .depth = channels,
       .columns = part.lane_end - part.lane_begin});
}

/// The element of a B in pairs.
inline float element_of_pairs(const uint32_t* pairs, int64_t stride, int depth,
                              int column) {
  const uint32_t word = pairs[depth / 2 * stride + column];
  return widened_bits(depth % 2 == 0 ? word & 0xffff : word >> 16);
}

/// sums[channel, query] += weight[key, query] * rows[key, channel] over visible
/// pairs. Takes the place of a product where `rows` has an infinity or a NaN,
/// which a hidden pair's weight of 0 would not keep out.
inline void add_visible_to_queries(const PanelKeys& seen,
                                   const uint32_t* weights,
                                   const uint16_t* rows, int64_t row_stride,
                                   int channels, float* sums) {
  for (int query = seen.first_query; query < seen.last_query; ++query) {
    for (int key = seen.low[query]; key < seen.high[query]; ++key) {
      const float weight = element_of_pairs(weights, kPanel, key, query);
      for (int i = 0; i < channels; ++i) {
        sums[i * kScoreStride + query] +=
            weight * widened_bits(rows[key * row_stride + i]);
      }
    }
  }
}

}  // namespace
}  // namespace longspan
