#pragma once

#include "longspan/kernels/attention/cpu/bf16/scores.h"
#include "longspan/kernels/attention/cpu/bf16/steps.h"

namespace longspan {
namespace {

/// One panel's running softmax. Weights are 2^(score - top). `top` is raised
/// only by scores that exceed it by more than kSlack: sums are rescaled seldom,
/// and neither float nor bfloat16 minds weights of 256.
struct PanelState {
  static constexpr float kSlack = 8;
  uint32_t* q;     // B: [head_dim / 2, queries]
  float* out;      // [value_dim, queries], times `rounded`
  float* top;      // [queries]
  float* sum;      // of weights, for the lse
  float* rounded;  // of the rounded weights that values were multiplied with
};

struct PanelForwardScratch {
  uint16_t *k, *v;  // [keys, channels] of the block at hand
  uint16_t* v_t;    // A: [value_dim, keys]
  float* scores;
  uint32_t* weights;  // B: [keys / 2, queries]
  PanelState panel[kMostPanels];
  int64_t k_stride, v_stride, bytes, panel_bytes;

  PanelForwardScratch(const AttentionArgs& args, int panels, void* scratch) {
    k_stride = row_length<uint16_t>(args.head_dim);
    v_stride = row_length<uint16_t>(args.value_dim);
    const int q_words = rounded_up(args.head_dim, kDepthStep) / 2;
    const int out_rows = rounded_up(args.value_dim, kSideStep);
    Carver carver(scratch);
    k = carver.take<uint16_t>(kKeysAtOnce * k_stride);
    v = carver.take<uint16_t>(kKeysAtOnce * v_stride);
    v_t = carver.take<uint16_t>(out_rows * kKeyStride);
    scores = carver.take<float>(kKeysAtOnce * kScoreStride);
    weights = carver.take<uint32_t>(kKeysAtOnce / 2 * kPanel);
    const int64_t before = carver.bytes();
    for (int i = 0; i < panels; ++i) {
      panel[i].q = carver.take<uint32_t>(q_words * kPanel);
      panel[i].out = carver.take<float>(out_rows * kScoreStride);
      panel[i].top = carver.take<float>(kPanel);
      panel[i].sum = carver.take<float>(kPanel);
      panel[i].rounded = carver.take<float>(kPanel);
    }
    bytes = carver.bytes();
    panel_bytes = (bytes - before) / panels;
  }
};

template <class Engine>
void panel_forward_start(const AttentionForwardArgs& args,
                         const PanelGroup& group, void* memory) {
  Engine::start();
  const PanelForwardScratch scratch(args, group.count, memory);
  for (int i = 0; i < group.count; ++i) {
    const PanelState& state = scratch.panel[i];
    const Panel& panel = group.panel[i];
    // Rows pass through the place of k, which no block has taken yet.
    copy_rows(bf16_place(args.q, group.row, panel.first, panel.head),
              args.q.token_stride, panel.count, kPanel, args.head_dim,
              scratch.k, scratch.k_stride);
    pairs_of_channels(scratch.k, scratch.k_stride, kPanel, args.head_dim,
                      state.q, kPanel);
    const int rows = rounded_up(args.value_dim, kSideStep);
    for (int64_t j = 0; j < rows * kScoreStride; ++j) state.out[j] = 0;
    for (int query = 0; query < kPanel; ++query) {
      state.top[query] = -kInfinity<float>;
      state.sum[query] = state.rounded[query] = 0;
    }
  }
}

/// The largest score of each query of a vector. Leaves scores as they are where
/// all are visible and scaling keeps their order, else scaled, hidden ones
/// -inf; `factor` is what is left to scale by.
inline Floats find_top(const ScoreScale& scale, const Visible& visible,
                       const Part& part, int lane, float* scores,
                       float& factor) {
  Floats top = all_lanes(-kInfinity<float>);
  if (visible.all && !scale.capped && scale.factor > 0) {
    for (int key = part.key_begin; key < part.key_end; ++key) {
      top = larger(load(scores + key * kScoreStride + lane), top);
    }
    factor = scale.factor;
    return top * factor;
  }
  const Floats hidden = all_lanes(-kInfinity<float>);
  for (int key = part.key_begin; key < part.key_end; ++key) {
    float* at = scores + key * kScoreStride + lane;
    Floats s = scale.of(load(at));
    if (!visible.all) s = visible.sees(key) ? s : hidden;
    store(at, s);
    top = larger(s, top);
  }
  factor = 1;
  return top;
}

/// Scores become weights, rounded, in pairs of keys. A top of -inf counts as 0,
/// so that queries that saw nothing keep sums of 0.
inline void weigh(const AttentionArgs& args, const PanelKeys& seen,
                  const Part& part, const PanelForwardScratch& scratch,
                  const PanelState& state) {
  const ScoreScale scale(args);
  for (int lane = part.lane_begin; lane < part.lane_end; lane += kWidth) {
    const Visible visible(seen, part, lane);
    float factor;
    const Floats here =
        find_top(scale, visible, part, lane, scratch.scores, factor);
    const Floats old_top = load(state.top + lane);
    const Choice<float> grown = here > old_top + PanelState::kSlack;
    const Floats top = grown ? here : old_top;
    const Floats shift = top == -kInfinity<float> ? Floats{} : top;
    Floats sum = load(state.sum + lane), rounded = load(state.rounded + lane);
    if (any_of(grown)) {
      const Floats kept = grown ? exp2_of(old_top - shift) : all_lanes(1.0f);
      sum *= kept;
      rounded *= kept;
      for (int i = 0; i < args.value_dim; ++i) {
        float* at = state.out + i * kScoreStride + lane;
        store(at, load(at) * kept);
      }
      store(state.top + lane, top);
    }
    for (int key = part.key_begin; key < part.key_end; key += 2) {
      const float* at = scratch.scores + key * kScoreStride + lane;
      const Floats even = exp2_of(load(at) * factor - shift);
      const Floats odd = exp2_of(load(at + kScoreStride) * factor - shift);
      const Pairs pairs = rounded_pairs(even, odd);
      store_pairs(scratch.weights + key / 2 * kPanel + lane, pairs);
      sum += even + odd;
      rounded = add_pairs(rounded, pairs);
    }
    store(state.sum + lane, sum);
    store(state.rounded + lane, rounded);
  }
}

template <class Engine>
void panel_forward_add_keys(const AttentionForwardArgs& args,
                            const PanelGroup& group, const SeenKeys& keys,
                            void* memory) {
  const PanelForwardScratch scratch(args, group.count, memory);
  const int all_keys = rounded_up(keys.count, kDepthStep);
  copy_rows(bf16_place(args.k, group.row, keys.first, group.key_head),
            args.k.token_stride, keys.count, all_keys, args.head_dim, scratch.k,
            scratch.k_stride);
  const bool finite =
      copy_rows(bf16_place(args.v, group.row, keys.first, group.key_head),
                args.v.token_stride, keys.count, all_keys, args.value_dim,
                scratch.v, scratch.v_stride);
  rows_of_channels(scratch.v, scratch.v_stride, all_keys, args.value_dim,
                   scratch.v_t, kKeyStride);
  const int64_t next = keys.first + keys.count;
  for (int i = 0; i < group.count; ++i) {
    prefetch_keys(args.k, group.row, group.key_head, next, args.keys,
                  args.head_dim, i, group.count);
    prefetch_keys(args.v, group.row, group.key_head, next, args.keys,
                  args.value_dim, i, group.count);
    const PanelKeys& seen = keys.panel[i];
    if (seen.first >= seen.last) continue;
    const PanelState& state = scratch.panel[i];
    const Part part = part_of<Engine>(seen, kSideStep);
    multiply_part<Engine>(part, scratch.k, scratch.k_stride, state.q,
                          args.head_dim, scratch.scores);
    weigh(args, seen, part, scratch, state);
    if (!finite) {
      add_visible_to_queries(seen, scratch.weights, scratch.v, scratch.v_stride,
                             args.value_dim, state.out);
      continue;
    }
    Engine::template multiply<Begin::add>(
        {.a = scratch.v_t + part.key_begin,
         .a_stride = kKeyStride,
         .b = scratch.weights + part.key_begin / 2 * kPanel + part.lane_begin,
         .b_stride = kPanel,
         .c = state.out + part.lane_begin,
         .c_stride = kScoreStride,
         .rows = args.value_dim,
         .depth = part.key_end - part.key_begin,
         .columns = part.lane_end - part.lane_begin});
  }
}

/// What the earlier answer and this call's sums count for in the new answer.
struct Fold {
  bool seen, first;  // anything in this call, and nothing earlier
  float before, now;
};

/// Joins the softmax over this call's keys with that of earlier calls.
inline Fold fold(const PanelState& state, int query, float* lse) {
  const float sum = state.sum[query];
  if (sum == 0) return {.seen = false, .first = false, .before = 0, .now = 0};
  const float rounded = state.rounded[query];
  const float here = state.top[query] * 0.693147181f + log_of(sum);
  if (*lse == -kInfinity<float>) {
    *lse = here;
    return {.seen = true, .first = true, .before = 0, .now = 1 / rounded};
  }
  const float top = here > *lse ? here : *lse;
  const float before = exp_of(*lse - top), now = exp_of(here - top);
  const float both = before + now;
  *lse = top + log_of(both);
  return {.seen = true,
          .first = false,
          .before = before / both,
          .now = now / both / rounded};
}

template <class Engine>
void panel_forward_finish(const AttentionForwardArgs& args,
                          const PanelGroup& group, void* memory) {
  const PanelForwardScratch scratch(args, group.count, memory);
  for (int i = 0; i < group.count; ++i) {
    const PanelState& state = scratch.panel[i];
    const Panel& panel = group.panel[i];
    for (int first = 0; first < panel.count; first += 16) {
      const int count = panel.count - first < 16 ? panel.count - first : 16;
      Fold folds[16];
      for (int j = 0; j < count; ++j) {
        folds[j] = fold(state, first + j,
                        place_in<float>(args.lse, group.row,
                                        panel.first + first + j, panel.head));
      }
      for (int channel = 0; channel < args.value_dim; channel += 16) {
        float block[16][16];
        transpose_block(state.out + channel * kScoreStride + first,
                        kScoreStride * 4, block, sizeof block[0]);
        const int n =
            args.value_dim - channel < 16 ? args.value_dim - channel : 16;
        for (int j = 0; j < count; ++j) {
          if (!folds[j].seen) continue;
          float* out = place_in<float>(args.out, group.row,
                                       panel.first + first + j, panel.head) +
                       channel;
          if (folds[j].first) {
            for (int c = 0; c < n; ++c) out[c] = block[j][c] * folds[j].now;
          } else {
            for (int c = 0; c < n; ++c) {
              out[c] = out[c] * folds[j].before + block[j][c] * folds[j].now;
            }
          }
        }
      }
    }
  }
  Engine::finish();
}

inline int64_t panel_forward_bytes(const AttentionArgs& args) {
  return PanelForwardScratch(args, 1, nullptr).panel_bytes;
}

inline int64_t panel_forward_scratch_bytes(const AttentionArgs& args,
                                           int panels) {
  return PanelForwardScratch(args, panels, nullptr).bytes;
}

template <class Engine>
constexpr PanelForwardSteps panel_forward_steps() {
  return {.panel_bytes = panel_forward_bytes,
          .scratch_bytes = panel_forward_scratch_bytes,
          .start = panel_forward_start<Engine>,
          .add_keys = panel_forward_add_keys<Engine>,
          .finish = panel_forward_finish<Engine>};
}

}  // namespace
}  // namespace longspan
