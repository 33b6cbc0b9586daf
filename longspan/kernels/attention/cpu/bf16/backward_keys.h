#pragma once

#include "longspan/kernels/attention/cpu/bf16/backward.h"

/// The three products that give derivatives, and the table of steps.
namespace longspan {
namespace {

/// Consecutive panels of a group, as a range.
struct PanelRun {
  int begin, end;
};

/// product[key] += weight[key, query] * rows[query] over the visible pairs of
/// one panel, where `rows` has an infinity or a NaN.
inline void add_visible_to_keys(const PanelKeys& seen, const uint16_t* weights,
                                int64_t weight_stride, const uint32_t* rows,
                                int64_t row_stride, int channels,
                                float* product, int64_t product_stride) {
  for (int query = seen.first_query; query < seen.last_query; ++query) {
    for (int key = seen.low[query]; key < seen.high[query]; ++key) {
      const float weight = widened_bits(weights[key * weight_stride + query]);
      for (int i = 0; i < channels; ++i) {
        product[key * product_stride + i] +=
            weight * element_of_pairs(rows, row_stride, query, i);
      }
    }
  }
}

/// A gradient of keys: target[key] += sum over queries of weight[key, query] *
/// rows[query].
struct KeySum {
  const uint16_t* weights;  // A: [keys, queries of all panels]
  const uint32_t* rows;     // B: [queries / 2, channels]
  int64_t row_stride;
  int channels;
  float* target;
  int64_t target_stride;
};

/// Panels that see something and hold no infinity go through one product.
template <class Engine>
void add_to_keys(const PanelGroup& group, const SeenKeys& keys,
                 const PanelBackwardScratch& scratch, const KeySum& sum) {
  const int all_keys = rounded_up(keys.count, Engine::kDepth);
  const auto is_plain = [&](int i) {
    return keys.panel[i].first < keys.panel[i].last &&
           scratch.panel[i].facts->finite;
  };
  bool started = false;
  for (PanelRun run{0, 0}; run.begin < group.count; run.begin = run.end) {
    run.end = run.begin + 1;
    if (!is_plain(run.begin)) continue;
    while (run.end < group.count && is_plain(run.end)) ++run.end;
    const PairProduct product{
        .a = sum.weights + run.begin * kPanel,
        .a_stride = scratch.p_stride,
        .b = sum.rows + run.begin * (kPanel / 2) * sum.row_stride,
        .b_stride = sum.row_stride,
        .c = scratch.product,
        .c_stride = scratch.product_stride,
        .rows = all_keys,
        .depth = (run.end - run.begin) * kPanel,
        .columns = rounded_up(sum.channels, kSideStep)};
    if (started) {
      Engine::template multiply<Begin::add>(product);
    } else {
      Engine::template multiply<Begin::zero>(product);
    }
    started = true;
  }
  if (!started) {
    for (int64_t i = 0; i < keys.count * scratch.product_stride; ++i) {
      scratch.product[i] = 0;
    }
  }
  for (int i = 0; i < group.count; ++i) {
    const PanelGradient::Facts& facts = *scratch.panel[i].facts;
    if (facts.finite || keys.panel[i].first >= keys.panel[i].last) continue;
    add_visible_to_keys(
        without_dead(keys.panel[i], facts.dead), sum.weights + i * kPanel,
        scratch.p_stride, sum.rows + i * (kPanel / 2) * sum.row_stride,
        sum.row_stride, sum.channels, scratch.product, scratch.product_stride);
  }
  for (int key = 0; key < keys.count; ++key) {
    float* to = sum.target + key * sum.target_stride;
    const float* from = scratch.product + key * scratch.product_stride;
    for (int i = 0; i < sum.channels; ++i) to[i] += from[i];
  }
}

template <class Engine>
void panel_backward_add_keys(const AttentionBackwardArgs& args,
                             const PanelGroup& group, const SeenKeys& keys,
                             const KeyGradients& gradients, void* memory) {
  const PanelBackwardScratch scratch(args, group.count, memory);
  const int all_keys = rounded_up(keys.count, kDepthStep);
  const bool k_finite =
      copy_rows(bf16_place(args.k, group.row, keys.first, group.key_head),
                args.k.token_stride, keys.count, all_keys, args.head_dim,
                scratch.k, scratch.k_stride);
  copy_rows(bf16_place(args.v, group.row, keys.first, group.key_head),
            args.v.token_stride, keys.count, all_keys, args.value_dim,
            scratch.v, scratch.v_stride);
  rows_of_channels(scratch.k, scratch.k_stride, all_keys, args.head_dim,
                   scratch.k_t, kKeyStride);
  const int64_t next = keys.first + keys.count;
  for (int i = 0; i < group.count; ++i) {
    prefetch_rows(static_cast<const float*>(gradients.dv), gradients.dv_stride,
                  keys.count, args.value_dim, i, group.count);
    prefetch_rows(static_cast<const float*>(gradients.dk), gradients.dk_stride,
                  keys.count, args.head_dim, i, group.count);
    prefetch_keys(args.k, group.row, group.key_head, next, args.keys,
                  args.head_dim, i, group.count);
    prefetch_keys(args.v, group.row, group.key_head, next, args.keys,
                  args.value_dim, i, group.count);
    const PanelGradient& gradient = scratch.panel[i];
    if (keys.panel[i].first >= keys.panel[i].last) continue;
    const PanelKeys seen =
        gradient.facts->some_dead
            ? without_dead(keys.panel[i], gradient.facts->dead)
            : keys.panel[i];
    const Part part = part_of<Engine>(seen, kDepthStep);
    multiply_part<Engine>(part, scratch.k, scratch.k_stride, gradient.q_t,
                          args.head_dim, scratch.scores);
    multiply_part<Engine>(part, scratch.v, scratch.v_stride, gradient.dout_t,
                          args.value_dim, scratch.dp);
    differentiate(args, seen, part, all_keys, i, scratch);
    if (!k_finite) {
      add_visible_to_queries(seen, scratch.ds_pairs, scratch.k,
                             scratch.k_stride, args.head_dim, gradient.dq);
      continue;
    }
    Engine::template multiply<Begin::add>(
        {.a = scratch.k_t + part.key_begin,
         .a_stride = kKeyStride,
         .b = scratch.ds_pairs + part.key_begin / 2 * kPanel + part.lane_begin,
         .b_stride = kPanel,
         .c = gradient.dq + part.lane_begin,
         .c_stride = kScoreStride,
         .rows = args.head_dim,
         .depth = part.key_end - part.key_begin,
         .columns = part.lane_end - part.lane_begin});
  }
  add_to_keys<Engine>(group, keys, scratch,
                      {.weights = scratch.p,
                       .rows = scratch.dout,
                       .row_stride = scratch.dout_stride,
                       .channels = args.value_dim,
                       .target = static_cast<float*>(gradients.dv),
                       .target_stride = gradients.dv_stride});
  add_to_keys<Engine>(group, keys, scratch,
                      {.weights = scratch.ds,
                       .rows = scratch.q,
                       .row_stride = scratch.q_stride,
                       .channels = args.head_dim,
                       .target = static_cast<float*>(gradients.dk),
                       .target_stride = gradients.dk_stride});
}

template <class Engine>
void panel_backward_finish(const AttentionBackwardArgs& args,
                           const PanelGroup& group, void* memory) {
  const PanelBackwardScratch scratch(args, group.count, memory);
  for (int i = 0; i < group.count; ++i) {
    const Panel& panel = group.panel[i];
    for (int first = 0; first < panel.count; first += 16) {
      const int count = panel.count - first < 16 ? panel.count - first : 16;
      for (int channel = 0; channel < args.head_dim; channel += 16) {
        float block[16][16];
        transpose_block(scratch.panel[i].dq + channel * kScoreStride + first,
                        kScoreStride * 4, block, sizeof block[0]);
        const int n =
            args.head_dim - channel < 16 ? args.head_dim - channel : 16;
        for (int j = 0; j < count; ++j) {
          float* dq = place_in<float>(args.dq, group.row,
                                      panel.first + first + j, panel.head) +
                      channel;
          for (int c = 0; c < n; ++c) dq[c] += block[j][c];
        }
      }
    }
  }
  Engine::finish();
}

inline int64_t panel_backward_bytes(const AttentionArgs& args) {
  return PanelBackwardScratch(args, 1, nullptr).panel_bytes;
}

inline int64_t panel_backward_scratch_bytes(const AttentionArgs& args,
                                            int panels) {
  return PanelBackwardScratch(args, panels, nullptr).bytes;
}

template <class Engine>
constexpr PanelBackwardSteps panel_backward_steps() {
  return {.panel_bytes = panel_backward_bytes,
          .scratch_bytes = panel_backward_scratch_bytes,
          .start = panel_backward_start<Engine>,
          .add_keys = panel_backward_add_keys<Engine>,
          .finish = panel_backward_finish<Engine>};
}

}  // namespace
}  // namespace longspan
