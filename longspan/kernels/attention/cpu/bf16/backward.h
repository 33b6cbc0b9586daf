#pragma once

#include "longspan/kernels/attention/cpu/bf16/scores.h"
#include "longspan/kernels/attention/cpu/bf16/steps.h"

namespace longspan {
namespace {

/// What one panel brings along for all its keys.
struct PanelGradient {
  uint32_t *q_t, *dout_t;  // B: [channels / 2, queries]
  float* dq;               // [head_dim, queries]
  float *lse, *delta;      // [queries]; lse in units of log 2, delta scaled
  struct Facts {
    bool finite;        // q and dout
    bool some_dead;     // of the next
    bool dead[kPanel];  // lse infinite: saw no key
  }* facts;
};

struct PanelBackwardScratch {
  uint16_t *k, *v;     // A: [keys, channels] of the block at hand
  uint16_t* k_t;       // A: [head_dim, keys]
  uint32_t *q, *dout;  // B: [queries of all panels / 2, channels]
  uint16_t *p, *ds;    // A: [keys, queries of all panels]
  uint32_t* ds_pairs;  // B: [keys / 2, queries]
  float *scores, *dp;  // [keys, queries]
  float* product;      // [keys, channels] of dk or dv
  PanelGradient panel[kMostPanels];
  int64_t k_stride, v_stride;  // of rows of k and v
  int64_t q_stride, dout_stride, product_stride;
  int64_t p_stride;
  int64_t bytes, panel_bytes;

  PanelBackwardScratch(const AttentionArgs& args, int panels, void* scratch) {
    k_stride = row_length<uint16_t>(args.head_dim);
    v_stride = row_length<uint16_t>(args.value_dim);
    q_stride = row_length<uint32_t>(args.head_dim);
    dout_stride = row_length<uint32_t>(args.value_dim);
    product_stride = q_stride > dout_stride ? q_stride : dout_stride;
    p_stride = row_length<uint16_t>(panels * kPanel);
    const int q_words = rounded_up(args.head_dim, kDepthStep) / 2;
    const int dout_words = rounded_up(args.value_dim, kDepthStep) / 2;
    const int dq_rows = rounded_up(args.head_dim, kSideStep);
    Carver carver(scratch);
    k = carver.take<uint16_t>(kKeysAtOnce * k_stride);
    v = carver.take<uint16_t>(kKeysAtOnce * v_stride);
    k_t = carver.take<uint16_t>(dq_rows * kKeyStride);
    scores = carver.take<float>(kKeysAtOnce * kScoreStride);
    dp = carver.take<float>(kKeysAtOnce * kScoreStride);
    ds_pairs = carver.take<uint32_t>(kKeysAtOnce / 2 * kPanel);
    product = carver.take<float>(kKeysAtOnce * product_stride);
    const int64_t before = carver.bytes();
    p = carver.take<uint16_t>(kKeysAtOnce * p_stride);
    ds = carver.take<uint16_t>(kKeysAtOnce * p_stride);
    q = carver.take<uint32_t>(panels * kPanel / 2 * q_stride);
    dout = carver.take<uint32_t>(panels * kPanel / 2 * dout_stride);
    for (int i = 0; i < panels; ++i) {
      panel[i].q_t = carver.take<uint32_t>(q_words * kPanel);
      panel[i].dout_t = carver.take<uint32_t>(dout_words * kPanel);
      panel[i].dq = carver.take<float>(dq_rows * kScoreStride);
      panel[i].lse = carver.take<float>(kPanel);
      panel[i].delta = carver.take<float>(kPanel);
      panel[i].facts = carver.take<PanelGradient::Facts>(1);
    }
    bytes = carver.bytes();
    panel_bytes = (bytes - before) / panels;
  }
};

/// The two layouts of one operand of the query side. Returns whether all of it
/// is finite.
inline bool pack_queries(const TokenArray<const void*>& array, int64_t row,
                         const Panel& panel, int channels, uint16_t* rows,
                         int64_t row_stride, uint32_t* transposed,
                         uint32_t* pairs, int64_t pair_stride) {
  const bool finite = copy_rows(bf16_place(array, row, panel.first, panel.head),
                                array.token_stride, panel.count, kPanel,
                                channels, rows, row_stride);
  pairs_of_channels(rows, row_stride, kPanel, channels, transposed, kPanel);
  pairs_of_rows(rows, row_stride, kPanel, channels, pairs, pair_stride);
  return finite;
}

template <class Engine>
void panel_backward_start(const AttentionBackwardArgs& args,
                          const PanelGroup& group, void* memory) {
  Engine::start();
  const PanelBackwardScratch scratch(args, group.count, memory);
  for (int i = 0; i < group.count; ++i) {
    const PanelGradient& gradient = scratch.panel[i];
    const Panel& panel = group.panel[i];
    const int64_t pair = i * kPanel / 2;
    auto& facts = *gradient.facts;
    // Rows pass through the places of k and v, which no block has taken yet.
    facts.finite = pack_queries(
        args.q, group.row, panel, args.head_dim, scratch.k, scratch.k_stride,
        gradient.q_t, scratch.q + pair * scratch.q_stride, scratch.q_stride);
    facts.finite &= pack_queries(args.dout, group.row, panel, args.value_dim,
                                 scratch.v, scratch.v_stride, gradient.dout_t,
                                 scratch.dout + pair * scratch.dout_stride,
                                 scratch.dout_stride);
    const int rows = rounded_up(args.head_dim, kSideStep);
    for (int64_t j = 0; j < rows * kScoreStride; ++j) gradient.dq[j] = 0;
    facts.some_dead = false;
    for (int query = 0; query < kPanel; ++query) {
      float lse = 0, delta = 0;
      if (query < panel.count) {
        const int64_t token = panel.first + query;
        lse = *place_in<const float>(args.lse, group.row, token, panel.head);
        delta =
            *place_in<const float>(args.delta, group.row, token, panel.head);
      }
      const bool dead = lse == kInfinity<float> || lse == -kInfinity<float>;
      facts.dead[query] = dead;
      facts.some_dead |= dead;
      gradient.lse[query] =
          dead ? 0 : lse * static_cast<float>(ScoreScale::kLog2E);
      gradient.delta[query] = delta * static_cast<float>(args.scale);
    }
  }
}

/// P and dS of two keys and one vector of queries.
struct Change {
  Floats p[2], ds[2];
};

/// P = 2^(score - lse), dS = scale * P * (dP - delta), times the slope of the
/// soft cap. Hidden pairs are set to 0, not multiplied by 0: their values may
/// be NaN.
inline Change change_of(const ScoreScale& scale, float factor,
                        const Visible& visible, Floats lse, Floats delta,
                        int key, const float* score, const float* dp) {
  Change change;
  const Floats zero = {};
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const Floats product = load(score + i * kScoreStride);
    Floats p, slope;
    if (scale.capped) {
      const Floats bent = tanh_of(product * scale.into_cap);
      p = exp2_of(bent * scale.from_cap - lse);
      slope = p * (1.0f - bent * bent);
    } else {
      p = exp2_of(product * scale.factor - lse);
      slope = p;
    }
    Floats ds = slope * (load(dp + i * kScoreStride) * factor - delta);
    if (!visible.all) {
      const Choice<float> sees = visible.sees(key + i);
      p = sees ? p : zero;
      ds = sees ? ds : zero;
    }
    change.p[i] = p;
    change.ds[i] = ds;
  }
  return change;
}

/// From the products of the part to P and dS in rows, 0 where the panel sees
/// nothing, and to dS in pairs of keys.
inline void differentiate(const AttentionArgs& args, const PanelKeys& seen,
                          const Part& part, int all_keys, int index,
                          const PanelBackwardScratch& scratch) {
  const ScoreScale scale(args);
  const auto factor = static_cast<float>(args.scale);
  const PanelGradient& gradient = scratch.panel[index];
  uint16_t* p = scratch.p + index * kPanel;
  uint16_t* ds = scratch.ds + index * kPanel;
  const auto clear = [&](int key_begin, int key_end, int begin, int end) {
    for (int key = key_begin; key < key_end; ++key) {
      for (int i = begin; i < end; ++i) {
        p[key * scratch.p_stride + i] = ds[key * scratch.p_stride + i] = 0;
      }
    }
  };
  clear(0, part.key_begin, 0, kPanel);
  clear(part.key_end, all_keys, 0, kPanel);
  if (part.lane_begin > 0) {
    clear(part.key_begin, part.key_end, 0, part.lane_begin);
  }
  if (part.lane_end < kPanel) {
    clear(part.key_begin, part.key_end, part.lane_end, kPanel);
  }
  for (int lane = part.lane_begin; lane < part.lane_end; lane += 2 * kWidth) {
    const Visible low(seen, part, lane), high(seen, part, lane + kWidth);
    const Floats low_lse = load(gradient.lse + lane);
    const Floats high_lse = load(gradient.lse + lane + kWidth);
    const Floats low_delta = load(gradient.delta + lane);
    const Floats high_delta = load(gradient.delta + lane + kWidth);
    for (int key = part.key_begin; key < part.key_end; key += 2) {
      const float* score = scratch.scores + key * kScoreStride + lane;
      const float* dp = scratch.dp + key * kScoreStride + lane;
      const Change a =
          change_of(scale, factor, low, low_lse, low_delta, key, score, dp);
      const Change b = change_of(scale, factor, high, high_lse, high_delta, key,
                                 score + kWidth, dp + kWidth);
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const int64_t at = (key + i) * scratch.p_stride + lane;
        store_rounded(p + at, a.p[i], b.p[i]);
        store_rounded(ds + at, a.ds[i], b.ds[i]);
      }
      uint32_t* pairs = scratch.ds_pairs + key / 2 * kPanel + lane;
      store_pairs(pairs, rounded_pairs(a.ds[0], a.ds[1]));
      store_pairs(pairs + kWidth, rounded_pairs(b.ds[0], b.ds[1]));
    }
  }
}

/// The panel without queries that saw nothing.
inline PanelKeys without_dead(const PanelKeys& seen, const bool* dead) {
  PanelKeys alive = seen;
  for (int query = 0; query < kPanel; ++query) {
    if (dead[query]) alive.low[query] = alive.high[query] = 0;
  }
  return alive;
}

}  // namespace
}  // namespace longspan
