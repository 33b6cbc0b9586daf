#pragma once

#include "longspan/kernels/attend_selected/cpu/bf16/pack.h"
#include "longspan/kernels/common/cpu/simd/narrow.h"

/// Selected keys in products of bfloat16, one query at a time. Scores lie
/// transposed, [keys, heads]: gathered rows are an A as they are, and two rows
/// side by side a B. Only the weights are turned, which are few.
namespace longspan {
namespace {

/// One panel of heads: its running softmax. As for panels of queries, weights
/// are 2^(score - top), and `top` is raised only by scores that exceed it by
/// more than kSlack.
struct SelectedState {
  static constexpr float kSlack = 8;
  uint32_t* q;  // B: [head_dim / 2, heads]
  float* out;   // [heads, value_dim], times `rounded`
  float *top, *sum;
  float* rounded;  // sum of the rounded weights
};

struct SelectedPairsScratch {
  GatheredKeys keys;
  float* scores;
  uint32_t* weights;  // [keys / 2, heads]
  uint16_t* turned;   // A: [heads, keys]
  float* keep;        // [heads]
  Carver states;      // of the panels
  int64_t out_stride, panel_bytes, bytes;

  SelectedPairsScratch(const SelectedAttentionArgs& args, void* scratch)
      : states(scratch) {
    keys = GatheredKeys(args, args.value_dim, states);
    scores = states.take<float>(kKeysAtOnce * kScoreStride);
    weights = states.take<uint32_t>(kKeysAtOnce / 2 * kPanel);
    turned = states.take<uint16_t>(kPanel * kKeyStride);
    keep = states.take<float>(kPanel);
    out_stride = row_length<float>(args.value_dim);
    Carver counted = states;
    take_state(args, counted);
    panel_bytes = counted.bytes() - states.bytes();
    bytes = states.bytes() + head_panels(args) * panel_bytes;
  }

  SelectedState panel(const SelectedAttentionArgs& args, int index) const {
    Carver carver = states;
    carver.take<char>(index * panel_bytes);
    return take_state(args, carver);
  }

 private:
  SelectedState take_state(const SelectedAttentionArgs& args,
                           Carver& carver) const {
    SelectedState state;
    state.q = carver.take<uint32_t>(rounded_up(args.head_dim, kDepthStep) / 2 *
                                    kPanel);
    state.out = carver.take<float>(kPanel * out_stride);
    state.top = carver.take<float>(kPanel);
    state.sum = carver.take<float>(kPanel);
    state.rounded = carver.take<float>(kPanel);
    return state;
  }
};

/// Scores become weights, rounded, in pairs of keys; those that fill up the
/// block are 0. Heads whose top grows are rescaled.
inline void weigh_heads(float factor, int count, int all_keys, int heads,
                        const SelectedPairsScratch& s,
                        const SelectedState& state) {
  bool some_grown = false;
  for (int lane = 0; lane < heads; lane += kWidth) {
    const float* scores = s.scores + lane;
    Floats here = all_lanes(-kInfinity<float>);
    for (int key = 0; key < count; ++key) {
      here = larger(load(scores + key * kScoreStride) * factor, here);
    }
    const Floats old_top = load(state.top + lane);
    const Choice<float> grown = here > old_top + SelectedState::kSlack;
    const Floats top = grown ? here : old_top;
    const Floats shift = top == -kInfinity<float> ? Floats{} : top;
    const Floats kept = grown ? exp2_of(old_top - shift) : all_lanes(1.0f);
    Floats sum = load(state.sum + lane) * kept;
    Floats rounded = load(state.rounded + lane) * kept;
    some_grown |= any_of(grown);
    store(s.keep + lane, kept);
    store(state.top + lane, top);
    const auto weight = [&](int key) {
      return exp2_of(load(scores + key * kScoreStride) * factor - shift);
    };
    uint32_t* to = s.weights + lane;
    const auto take = [&](Floats even, Floats odd) {
      const Pairs pairs = rounded_pairs(even, odd);
      store_pairs(to, pairs);
      to += kPanel;
      sum += even + odd;
      rounded = add_pairs(rounded, pairs);
    };
    int key = 0;
    for (; key + 1 < count; key += 2) take(weight(key), weight(key + 1));
    if (key < count) take(weight(key), Floats{});
    for (key = rounded_up(count, 2); key < all_keys; key += 2) {
      store_pairs(to, Pairs{});
      to += kPanel;
    }
    store(state.sum + lane, sum);
    store(state.rounded + lane, rounded);
  }
  for (int h = 0; some_grown && h < heads; ++h) {
    if (s.keep[h] == 1) continue;
    float* out = state.out + h * s.out_stride;
    for (int i = 0; i < s.out_stride; ++i) out[i] *= s.keep[h];
  }
}

template <class Engine>
void selected_pairs_start(const SelectedForwardArgs& args,
                          const SelectedKeys& list,
                          const SelectedPairsScratch& s) {
  for (int p = 0; p < head_panels(args); ++p) {
    const HeadPanel panel = panel_of(args, list.key_head, p);
    const SelectedState state = s.panel(args, p);
    // Rows pass through the place of keys, which no block has taken yet.
    pack_heads(args.q, list, panel, args.head_dim, s.keys, state.q);
    for (int64_t i = 0; i < kPanel * s.out_stride; ++i) state.out[i] = 0;
    for (int h = 0; h < kPanel; ++h) {
      state.top[h] = -kInfinity<float>;
      state.sum[h] = state.rounded[h] = 0;
    }
  }
}

inline void selected_pairs_finish(const SelectedForwardArgs& args,
                                  const SelectedKeys& list,
                                  const SelectedPairsScratch& s) {
  for (int p = 0; p < head_panels(args); ++p) {
    const HeadPanel panel = panel_of(args, list.key_head, p);
    const SelectedState state = s.panel(args, p);
    for (int h = 0; h < panel.count; ++h) {
      const int64_t head = panel.first + h;
      auto* out = place_in<Bfloat16>(args.out, list.row, list.query, head);
      float* lse = place_in<float>(args.lse, list.row, list.query, head);
      if (state.sum[h] == 0) {  // saw nothing
        clear_row(args.value_dim, out);
        *lse = -kInfinity<float>;
        continue;
      }
      const float top = state.top[h] * 0.693147181f;
      float all = state.rounded[h];
      if (args.sink != nullptr) {
        all += exp_of(static_cast<const float*>(args.sink)[head] - top);
      }
      narrow_row(state.out + h * s.out_stride, args.value_dim, 1 / all, out);
      *lse = top + log_of(state.sum[h]);
    }
  }
}

/// products[key, head] = row[key] * columns[head], of gathered keys
/// [begin, end).
template <class Engine>
void multiply_gathered(const GatheredKeys& keys, int begin, int end,
                       const uint32_t* columns, int channels, int heads,
                       float* products) {
  Engine::template multiply<Begin::zero>(
      {.a = keys.rows + begin * keys.row_stride,
       .a_stride = keys.row_stride,
       .b = columns,
       .b_stride = kPanel,
       .c = products + begin * kScoreStride,
       .c_stride = kScoreStride,
       .rows = end - begin,
       .depth = channels,
       .columns = rounded_up(heads, kSideStep)});
}

/// Scores of the block of listed keys from `first` on, while rows of the next
/// block are fetched from memory.
template <class Engine>
void score_gathered(const SelectedAttentionArgs& args, const SelectedKeys& list,
                    int64_t first, int all_keys, const GatheredKeys& keys,
                    const uint32_t* q, int heads, float* scores) {
  for (int key = 0; key < all_keys; key += kDepthStep) {
    const int64_t next = first + kKeysAtOnce + key;
    prefetch_listed<uint16_t>(args, list, next, next + kDepthStep);
    multiply_gathered<Engine>(keys, key, key + kDepthStep, q, args.head_dim,
                              heads, scores);
  }
}

/// c[head] += sum over keys of weight[key, head] * row[key]; weights in pairs
/// of keys.
template <class Engine>
void add_gathered(const GatheredKeys& keys, int all_keys,
                  const uint32_t* weights, int heads, int channels,
                  uint16_t* turned, float* c, int64_t c_stride) {
  for (int head = 0; head < heads; head += 16) {
    for (int key = 0; key < all_keys; key += 32) {
      transpose_block(weights + key / 2 * kPanel + head, kPanel * 4,
                      turned + head * kKeyStride + key, kKeyStride * 2);
    }
  }
  Engine::template multiply<Begin::add>(
      {.a = turned,
       .a_stride = kKeyStride,
       .b = keys.pairs,
       .b_stride = keys.pair_stride,
       .c = c,
       .c_stride = c_stride,
       .rows = heads,
       .depth = all_keys,
       .columns = rounded_up(channels, kSideStep)});
}

template <class Engine>
void selected_pairs_forward(const SelectedForwardArgs& args,
                            const SelectedKeys& list, void* memory) {
  Engine::start();
  const SelectedPairsScratch s(args, memory);
  const auto factor = static_cast<float>(args.scale * ScoreScale::kLog2E);
  selected_pairs_start<Engine>(args, list, s);
  for (int64_t first = 0; first < list.count; first += kKeysAtOnce) {
    const int count = keys_in_block(list, first, kKeysAtOnce);
    const int all_keys = rounded_up(count, kDepthStep);
    gather_pairs(args, list, first, count, args.value_dim, s.keys);
    for (int p = 0; p < head_panels(args); ++p) {
      const int heads = panel_of(args, list.key_head, p).count;
      const SelectedState state = s.panel(args, p);
      score_gathered<Engine>(args, list, first, all_keys, s.keys, state.q,
                             heads, s.scores);
      weigh_heads(factor, count, all_keys, heads, s, state);
      add_gathered<Engine>(s.keys, all_keys, s.weights, heads, args.value_dim,
                           s.turned, state.out, s.out_stride);
    }
  }
  selected_pairs_finish(args, list, s);
  Engine::finish();
}

inline int64_t selected_pairs_forward_bytes(const SelectedAttentionArgs& args) {
  return SelectedPairsScratch(args, nullptr).bytes;
}

template <class Engine>
void selected_pairs_weights(const SelectedWeightsArgs& args,
                            const SelectedKeys& list, void* weights,
                            void* memory) {
  Engine::start();
  const SelectedPairsScratch s(args, memory);
  const auto factor = static_cast<float>(args.scale * ScoreScale::kLog2E);
  for (int p = 0; p < head_panels(args); ++p) {
    pack_heads(args.q, list, panel_of(args, list.key_head, p), args.head_dim,
               s.keys, s.panel(args, p).q);
  }
  float* to = static_cast<float*>(weights);
  for (int64_t first = 0; first < list.count; first += kKeysAtOnce) {
    const int count = keys_in_block(list, first, kKeysAtOnce);
    gather_pairs(args, list, first, count, 0, s.keys);
    for (int p = 0; p < head_panels(args); ++p) {
      const HeadPanel panel = panel_of(args, list.key_head, p);
      HeadFacts<float> facts(args.lse, list, panel);
      for (float& lse : facts.lse)
        lse *= static_cast<float>(ScoreScale::kLog2E);
      score_gathered<Engine>(args, list, first, rounded_up(count, kDepthStep),
                             s.keys, s.panel(args, p).q, panel.count, s.scores);
      for (int key = 0; key < count; ++key) {
        Floats sum = {};
        for (int lane = 0; lane < panel.count; lane += kWidth) {
          const Floats weight =
              exp2_of(load(s.scores + key * kScoreStride + lane) * factor -
                      load(facts.lse + lane));
          sum += load(facts.alive + lane) != 0 ? weight : Floats{};
        }
        to[key] = sum_of_lanes(sum) + (p == 0 ? 0 : to[key]);
      }
    }
    to += count;
  }
  Engine::finish();
}

}  // namespace
}  // namespace longspan
