#pragma once

#include "longspan/kernels/attend_selected/cpu/bf16/forward.h"

namespace longspan {
namespace {

/// Heads of a key head, in whole steps of a depth.
inline int64_t slot_pair_heads(const SelectedAttentionArgs& args) {
  return (heads_per_key_head(args) + kDepthStep - 1) / kDepthStep * kDepthStep;
}

/// What a query leaves for keys, one B: pairs of heads of q, and below them
/// those of dout. Heads that are not alive are 0.
struct QueryPairs {
  uint32_t *q, *dout;  // [heads / 2, channels]
  int64_t stride, bytes;

  QueryPairs(const SelectedAttentionArgs& args, void* memory)
      : stride(row_length<uint32_t>(args.head_dim)) {
    Carver carver(memory);
    const int64_t pairs = slot_pair_heads(args) / 2;
    q = carver.take<uint32_t>(2 * pairs * stride);
    dout = q + pairs * stride;
    bytes = carver.bytes();
  }
};

struct SelectedGradient {
  uint32_t *q, *dout;  // B: [channels / 2, heads]
  float* dq;           // [heads, head_dim]
};

/// Rows that are added to keys at once.
constexpr int kRowsAtOnce = 64;

struct SelectedPairsBackwardScratch {
  GatheredKeys keys;
  float *scores, *dp;
  uint32_t* ds;      // [keys / 2, heads]
  uint16_t* turned;  // A: [heads, keys]
  float* sums;       // [keys, head_dim], what keys are to get
  Carver states;     // of the panels
  int64_t sum_stride, panel_bytes, bytes;

  SelectedPairsBackwardScratch(const SelectedAttentionArgs& args, void* scratch)
      : states(scratch) {
    sum_stride = row_length<float>(args.head_dim);
    // Queries and keys never share a call.
    Carver for_keys = states;
    sums = for_keys.take<float>(kRowsAtOnce * sum_stride);
    keys = GatheredKeys(args, args.head_dim, states);
    scores = states.take<float>(kKeysAtOnce * kScoreStride);
    dp = states.take<float>(kKeysAtOnce * kScoreStride);
    ds = states.take<uint32_t>(kKeysAtOnce / 2 * kPanel);
    turned = states.take<uint16_t>(kPanel * kKeyStride);
    Carver counted = states;
    take_state(args, counted);
    panel_bytes = counted.bytes() - states.bytes();
    bytes = states.bytes() + head_panels(args) * panel_bytes;
    bytes = bytes < for_keys.bytes() ? for_keys.bytes() : bytes;
  }

  SelectedGradient panel(const SelectedAttentionArgs& args, int index) const {
    Carver carver = states;
    carver.take<char>(index * panel_bytes);
    return take_state(args, carver);
  }

 private:
  SelectedGradient take_state(const SelectedAttentionArgs& args,
                              Carver& carver) const {
    SelectedGradient state;
    state.q = carver.take<uint32_t>(rounded_up(args.head_dim, kDepthStep) / 2 *
                                    kPanel);
    state.dout = carver.take<uint32_t>(rounded_up(args.value_dim, kDepthStep) /
                                       2 * kPanel);
    state.dq = carver.take<float>(kPanel * sum_stride);
    return state;
  }
};

/// What differentiating a panel's scores needs to know about its heads, in
/// units of log 2.
struct PairFacts : HeadFacts<float> {
  float delta[kBlock] = {};  // times the scale
  float factor, scale;

  PairFacts(const SelectedBackwardArgs& args, const SelectedKeys& list,
            const HeadPanel& panel)
      : HeadFacts<float>(args.lse, list, panel),
        factor(static_cast<float>(args.scale * ScoreScale::kLog2E)),
        scale(static_cast<float>(args.scale)) {
    for (float& value : lse) value *= static_cast<float>(ScoreScale::kLog2E);
    for (int h = 0; h < panel.count; ++h) {
      delta[h] = scale * *place_in<const float>(args.delta, list.row,
                                                list.query, panel.first + h);
    }
  }
};

/// P and dS of one key and one vector of heads, 0 by choice where a head is not
/// alive.
struct HeadChange {
  Floats p = {}, ds = {};

  HeadChange() = default;
  HeadChange(const PairFacts& facts, int lane, const float* score,
             const float* dp) {
    const Choice<float> alive = load(facts.alive + lane) != 0;
    const Floats weight =
        exp2_of(load(score) * facts.factor - load(facts.lse + lane));
    const Floats change =
        weight * (load(dp) * facts.scale - load(facts.delta + lane));
    p = alive ? weight : Floats{};
    ds = alive ? change : Floats{};
  }
};

/// From scores and dP to the slots' rows, and to dS in pairs of keys, 0 for
/// keys that fill up the block.
inline void differentiate_heads(const PairFacts& facts, int count, int all_keys,
                                int heads, const float* scores, const float* dp,
                                uint16_t* ds_rows, uint16_t* p_rows,
                                int64_t row_stride, uint32_t* ds_pairs) {
  // Heads that fill up the last step are not alive.
  const int lanes = rounded_up(heads, kDepthStep);
  for (int lane = 0; lane < lanes; lane += 2 * kWidth) {
    for (int key = 0; key < all_keys; key += 2) {
      HeadChange change[2][2];  // [key, vector]
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        if (key + i >= count) continue;
        const int64_t at = (key + i) * kScoreStride + lane;
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
          change[i][j] =
              HeadChange(facts, lane + j * kWidth, scores + at + j * kWidth,
                         dp + at + j * kWidth);
        }
        const int64_t row = (key + i) * row_stride + lane;
        store_rounded(p_rows + row, change[i][0].p, change[i][1].p);
        store_rounded(ds_rows + row, change[i][0].ds, change[i][1].ds);
      }
      uint32_t* pairs = ds_pairs + key / 2 * kPanel + lane;
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        store_pairs(pairs + j * kWidth,
                    rounded_pairs(change[0][j].ds, change[1][j].ds));
      }
    }
  }
}

/// Packs a panel of the query's heads for both of their products: against the
/// keys, and for the keys.
inline void pack_panel(const SelectedBackwardArgs& args,
                       const SelectedKeys& list, const HeadPanel& panel,
                       const float* alive, const GatheredKeys& rows,
                       const SelectedGradient& state, uint32_t* q_pairs,
                       uint32_t* dout_pairs, int64_t pair_stride) {
  const auto pack = [&](const TokenArray<const void*>& array, int n,
                        uint32_t* columns, uint32_t* pairs) {
    // Rows pass through the place of keys, which no block has taken yet.
    pack_heads(array, list, panel, n, rows, columns);
    for (int h = 0; h < panel.count; ++h) {
      if (alive[h] != 0) continue;
      clear_row(rounded_up(n, kDepthStep), rows.rows + h * rows.row_stride);
    }
    pairs_of_rows(rows.rows, rows.row_stride,
                  rounded_up(panel.count, kDepthStep), n, pairs, pair_stride);
  };
  pack(args.q, args.head_dim, state.q, q_pairs);
  pack(args.dout, args.value_dim, state.dout, dout_pairs);
}

template <class Engine>
void selected_pairs_take_query(const SelectedBackwardArgs& args,
                               const SelectedKeys& list, void* query_side,
                               void* slot_rows, void* memory) {
  Engine::start();
  const SelectedPairsBackwardScratch s(args, memory);
  const QueryPairs side(args, query_side);
  const int64_t row_heads = slot_pair_heads(args);
  for (int p = 0; p < head_panels(args); ++p) {
    const HeadPanel panel = panel_of(args, list.key_head, p);
    const SelectedGradient state = s.panel(args, p);
    const int64_t at = static_cast<int64_t>(p) * kPanel / 2 * side.stride;
    pack_panel(args, list, panel, PairFacts(args, list, panel).alive, s.keys,
               state, side.q + at, side.dout + at, side.stride);
    for (int64_t i = 0; i < kPanel * s.sum_stride; ++i) state.dq[i] = 0;
  }
  auto* rows = static_cast<uint16_t*>(slot_rows);
  for (int64_t first = 0; first < list.count; first += kKeysAtOnce) {
    const int count = keys_in_block(list, first, kKeysAtOnce);
    const int all_keys = rounded_up(count, kDepthStep);
    gather_pairs(args, list, first, count, args.head_dim, s.keys);
    for (int p = 0; p < head_panels(args); ++p) {
      const HeadPanel panel = panel_of(args, list.key_head, p);
      const PairFacts facts(args, list, panel);
      const SelectedGradient state = s.panel(args, p);
      score_gathered<Engine>(args, list, first, all_keys, s.keys, state.q,
                             panel.count, s.scores);
      multiply_gathered<Engine>(s.keys, 0, all_keys, state.dout, args.value_dim,
                                panel.count, s.dp);
      uint16_t* ds_rows = rows + p * kPanel;
      differentiate_heads(facts, count, all_keys, panel.count, s.scores, s.dp,
                          ds_rows, ds_rows + row_heads, 2 * row_heads, s.ds);
      add_gathered<Engine>(s.keys, all_keys, s.ds, panel.count, args.head_dim,
                           s.turned, state.dq, s.sum_stride);
    }
    rows += count * 2 * row_heads;
  }
  for (int p = 0; p < head_panels(args); ++p) {
    const HeadPanel panel = panel_of(args, list.key_head, p);
    const HeadFacts<float> facts(args.lse, list, panel);
    const float* dq = s.panel(args, p).dq;
    for (int h = 0; h < panel.count; ++h) {
      auto* to =
          place_in<Bfloat16>(args.dq, list.row, list.query, panel.first + h);
      if (facts.alive[h] == 0) {
        clear_row(args.head_dim, to);
      } else {
        narrow_row(dq + h * s.sum_stride, args.head_dim, 1.0f, to);
      }
    }
  }
  Engine::finish();
}

/// dkv[key] += dS q + P dout, over the heads of one query. Channels that are
/// values take both in one sum.
template <class Engine>
void selected_pairs_add_to_keys(const SelectedBackwardArgs& args,
                                const SelectedKeys& part,
                                const void* query_side, const void* slot_rows,
                                void* memory) {
  Engine::start();
  const SelectedPairsBackwardScratch s(args, memory);
  const QueryPairs side(args, const_cast<void*>(query_side));
  const auto row_heads = static_cast<int>(slot_pair_heads(args));
  const int values = rounded_up(args.value_dim, kSideStep);
  const int channels = rounded_up(args.head_dim, kSideStep);
  for (int64_t first = 0; first < part.count; first += kRowsAtOnce) {
    const int count = keys_in_block(part, first, kRowsAtOnce);
    const auto target = [&](int i) {
      return place_in<float>(args.dkv, part.row, part.keys[first + i],
                             part.key_head);
    };
    for (int i = 0; i < count; ++i) {
      const float* row = target(i);
      for (int c = 0; c < args.head_dim; c += 16) {
        __builtin_prefetch(row + c, 1, 2);
      }
    }
    PairProduct product{
        .a = static_cast<const uint16_t*>(slot_rows) + first * 2 * row_heads,
        .a_stride = 2 * row_heads,
        .b = side.q,
        .b_stride = side.stride,
        .c = s.sums,
        .c_stride = s.sum_stride,
        .rows = count,
        .depth = 2 * row_heads,
        .columns = values};
    Engine::template multiply<Begin::zero>(product);
    if (channels > values) {
      product.b += values;
      product.c += values;
      product.depth = row_heads;
      product.columns = channels - values;
      Engine::template multiply<Begin::zero>(product);
    }
    for (int i = 0; i < count; ++i) {
      float* to = target(i);
      const float* from = s.sums + i * s.sum_stride;
      for (int c = 0; c < args.head_dim; ++c) to[c] += from[c];
    }
  }
  Engine::finish();
}

inline int64_t selected_pairs_backward_bytes(
    const SelectedAttentionArgs& args) {
  return SelectedPairsBackwardScratch(args, nullptr).bytes;
}

inline int64_t selected_pairs_query_bytes(const SelectedAttentionArgs& args) {
  return QueryPairs(args, nullptr).bytes;
}

inline int64_t selected_pairs_slot_bytes(const SelectedAttentionArgs& args) {
  return 2 * slot_pair_heads(args) * static_cast<int64_t>(sizeof(uint16_t));
}

template <class Engine>
constexpr SelectedSteps selected_pair_steps() {
  return {
      .forward = {.scratch_bytes = selected_pairs_forward_bytes,
                  .run = selected_pairs_forward<Engine>},
      .weights = {.scratch_bytes = selected_pairs_forward_bytes,
                  .run = selected_pairs_weights<Engine>},
      .backward = {.scratch_bytes = selected_pairs_backward_bytes,
                   .query_bytes = selected_pairs_query_bytes,
                   .slot_bytes = selected_pairs_slot_bytes,
                   .take_query = selected_pairs_take_query<Engine>,
                   .add_to_keys = selected_pairs_add_to_keys<Engine>},
  };
}

}  // namespace
}  // namespace longspan
