#pragma once

#include "longspan/kernels/attend_selected/cpu/simd/forward.h"

namespace longspan {
namespace {

/// A slot's row of weights: dS of all heads, then P of all heads, both in whole
/// vectors.
template <class T>
inline int64_t slot_heads(const SelectedAttentionArgs& args) {
  constexpr int64_t kStep = kLanes<T>;
  return (heads_per_key_head(args) + kStep - 1) / kStep * kStep;
}

/// What a query leaves for keys: rows of q, and below them those of dout. Heads
/// that are not alive are 0.
template <class T>
struct QuerySide {
  T *q, *dout;  // [heads, channels], both with the row length of head_dim
  int64_t bytes;

  QuerySide(const SelectedAttentionArgs& args, void* memory) {
    Carver carver(memory);
    const int64_t size =
        heads_per_key_head(args) * row_length<T>(args.head_dim);
    q = carver.take<T>(2 * size);
    dout = q + size;
    bytes = carver.bytes();
  }
};

template <class T>
struct HeadGradient {
  T *q, *dout;  // [channels, heads]
  T* dq;        // [heads, head_dim]
};

template <class T>
struct SelectedBackwardScratch {
  T* k;  // [keys, head_dim] of the block at hand; a block's sum for its keys
  T *scores, *dp;
  Carver states;  // of the panels
  int64_t panel_bytes, bytes;

  SelectedBackwardScratch(const SelectedAttentionArgs& args, void* scratch)
      : states(scratch) {
    k = states.take<T>(kBlock * row_length<T>(args.head_dim));
    scores = states.take<T>(kBlock * score_stride<T>());
    dp = states.take<T>(kBlock * score_stride<T>());
    Carver counted = states;
    take_state(args, counted);
    panel_bytes = counted.bytes() - states.bytes();
    bytes = states.bytes() + head_panels(args) * panel_bytes;
  }

  HeadGradient<T> panel(const SelectedAttentionArgs& args, int index) const {
    Carver carver = states;
    carver.take<char>(index * panel_bytes);
    return take_state(args, carver);
  }

 private:
  static HeadGradient<T> take_state(const SelectedAttentionArgs& args,
                                    Carver& carver) {
    const int64_t d = row_length<T>(args.head_dim);
    HeadGradient<T> state;
    state.q = carver.take<T>(d * score_stride<T>());
    state.dout =
        carver.take<T>(row_length<T>(args.value_dim) * score_stride<T>());
    state.dq = carver.take<T>(kBlock * d);
    return state;
  }
};

/// From scores and dP to a panel's part of the slots' rows. Heads that are not
/// alive get 0 by choice, not by arithmetic.
template <class T>
void differentiate_heads(const HeadFacts<T>& facts, const T* delta, T scale,
                         int keys, int heads, const T* scores, const T* dp,
                         T* ds_rows, T* p_rows, int64_t row_stride) {
  for (int h = 0; h < heads; h += kLanes<T>) {
    const Choice<T> alive = load(facts.alive + h) != 0;
    const Vector<T> lse = load(facts.lse + h), offset = load(delta + h);
    for (int key = 0; key < keys; ++key) {
      const int64_t at = key * score_stride<T>() + h;
      const Vector<T> p = exp_of(load(scores + at) - lse);
      const Vector<T> ds = p * (load(dp + at) - offset) * scale;
      store(p_rows + key * row_stride + h, alive ? p : Vector<T>{});
      store(ds_rows + key * row_stride + h, alive ? ds : Vector<T>{});
    }
  }
}

/// Heads of one query as rows, 0 for those that are not alive.
template <class Element, class T = Accumulator<Element>>
void alive_rows(const TokenArray<const void*>& array, const SelectedKeys& list,
                const HeadPanel& panel, const T* alive, int n, T* to,
                int64_t stride) {
  for (int h = 0; h < panel.count; ++h, to += stride) {
    if (alive[h] == 0) {
      clear_row(whole_vectors<T>(n), to);
    } else {
      pack_rows(
          place_in<const Element>(array, list.row, list.query, panel.first + h),
          0, 1, n, T{1}, to, stride);
    }
  }
}

template <class Element>
void selected_take_query(const SelectedBackwardArgs& args,
                         const SelectedKeys& list, void* query_side,
                         void* slot_rows, void* memory) {
  using T = Accumulator<Element>;
  SelectedBackwardScratch<T> s(args, memory);
  const QuerySide<T> side(args, query_side);
  const int64_t d = row_length<T>(args.head_dim);
  const int64_t row_heads = slot_heads<T>(args);
  const auto scale = static_cast<T>(args.scale);
  for (int p = 0; p < head_panels(args); ++p) {
    const HeadPanel panel = panel_of(args, list.key_head, p);
    const HeadFacts<T> facts(args.lse, list, panel);
    const HeadGradient<T> state = s.panel(args, p);
    heads_as_columns<Element>(args.q, list, panel, args.head_dim, scale, s.k,
                              state.q);
    heads_as_columns<Element>(args.dout, list, panel, args.value_dim, T{1}, s.k,
                              state.dout);
    alive_rows<Element>(args.q, list, panel, facts.alive, args.head_dim,
                        side.q + p * kBlock * d, d);
    alive_rows<Element>(args.dout, list, panel, facts.alive, args.value_dim,
                        side.dout + p * kBlock * d, d);
    for (int64_t i = 0; i < panel.count * d; ++i) state.dq[i] = 0;
  }
  T* rows = static_cast<T*>(slot_rows);
  for (int64_t first = 0; first < list.count; first += kBlock) {
    const int keys = keys_in_block(list, first, kBlock);
    gather_keys<Element>(args, list, first, keys, s.k);
    for (int p = 0; p < head_panels(args); ++p) {
      const HeadPanel panel = panel_of(args, list.key_head, p);
      const HeadFacts<T> facts(args.lse, list, panel);
      const HeadGradient<T> state = s.panel(args, p);
      T delta[kBlock] = {};
      for (int h = 0; h < panel.count; ++h) {
        delta[h] = *place_in<const T>(args.delta, list.row, list.query,
                                      panel.first + h);
      }
      score_keys<Element>(args, list, first, keys, s.k, state.q, panel.count,
                          s.scores);
      multiply_keys(s.k, d, keys, args.value_dim, state.dout, panel.count,
                    s.dp);
      T* ds_rows = rows + p * kBlock;
      differentiate_heads(facts, delta, scale, keys, panel.count, s.scores,
                          s.dp, ds_rows, ds_rows + row_heads, 2 * row_heads);
      add_to_heads(ds_rows, 2 * row_heads, panel.count, keys, s.k, d,
                   args.head_dim, state.dq, d);
    }
    rows += keys * 2 * row_heads;
  }
  for (int p = 0; p < head_panels(args); ++p) {
    const HeadPanel panel = panel_of(args, list.key_head, p);
    const HeadFacts<T> facts(args.lse, list, panel);
    const T* dq = s.panel(args, p).dq;
    for (int h = 0; h < panel.count; ++h) {
      auto* to =
          place_in<Element>(args.dq, list.row, list.query, panel.first + h);
      if (facts.alive[h] == 0) {
        clear_row(args.head_dim, to);
      } else {
        narrow_row(dq + h * d, args.head_dim, T{1}, to);
      }
    }
  }
}

/// dkv[key] += dS q + P dout, over the heads of one query.
template <class Element>
void selected_add_to_keys(const SelectedBackwardArgs& args,
                          const SelectedKeys& part, const void* query_side,
                          const void* slot_rows, void* memory) {
  using T = Accumulator<Element>;
  const SelectedBackwardScratch<T> s(args, memory);
  const QuerySide<T> side(args, const_cast<void*>(query_side));
  const int64_t d = row_length<T>(args.head_dim);
  const int64_t row_heads = slot_heads<T>(args);
  const int64_t heads = heads_per_key_head(args);
  const int values = whole_vectors<T>(args.value_dim);
  const int channels = whole_vectors<T>(args.head_dim);
  const T* rows = static_cast<const T*>(slot_rows);
  for (int64_t first = 0; first < part.count; first += kBlock) {
    const int keys = keys_in_block(part, first, kBlock);
    const auto target = [&](int i) {
      return place_in<T>(args.dkv, part.row, part.keys[first + i],
                         part.key_head);
    };
    for (int i = 0; i < keys; ++i) {
      constexpr int kLine = 64 / sizeof(T);
      for (int c = 0; c < args.head_dim; c += kLine) {
        __builtin_prefetch(target(i) + c, 1, 2);
      }
    }
    Product<T> product{.a = rows + first * 2 * row_heads,
                       .a_stride = 2 * row_heads,
                       .b = side.q,
                       .b_stride = d,
                       .c = s.k,
                       .c_stride = d,
                       .rows = keys,
                       .depth = static_cast<int>(heads),
                       .columns = channels};
    if (heads == row_heads) {
      // dS and P lie side by side, as q and dout do: one sum for values.
      product.depth *= 2;
      product.columns = values;
      multiply<Layout::rows, Start::zero>(product);
      product.depth /= 2;
      product.b += values;
      product.c += values;
      product.columns = channels - values;
      multiply<Layout::rows, Start::zero>(product);
    } else {
      multiply<Layout::rows, Start::zero>(product);
      product.a += row_heads;
      product.b = side.dout;
      product.columns = values;
      multiply<Layout::rows, Start::add>(product);
    }
    for (int i = 0; i < keys; ++i) {
      T* to = target(i);
      for (int c = 0; c < args.head_dim; ++c) to[c] += s.k[i * d + c];
    }
  }
}

template <class Element>
int64_t selected_backward_bytes(const SelectedAttentionArgs& args) {
  return SelectedBackwardScratch<Accumulator<Element>>(args, nullptr).bytes;
}

template <class Element>
int64_t selected_query_bytes(const SelectedAttentionArgs& args) {
  return QuerySide<Accumulator<Element>>(args, nullptr).bytes;
}

template <class Element>
int64_t selected_slot_bytes(const SelectedAttentionArgs& args) {
  using T = Accumulator<Element>;
  return 2 * slot_heads<T>(args) * static_cast<int64_t>(sizeof(T));
}

template <class Element>
constexpr SelectedSteps selected_steps() {
  return {
      .forward = {.scratch_bytes = selected_forward_bytes<Element>,
                  .run = selected_forward<Element>},
      .weights = {.scratch_bytes = selected_forward_bytes<Element>,
                  .run = selected_weights<Element>},
      .backward = {.scratch_bytes = selected_backward_bytes<Element>,
                   .query_bytes = selected_query_bytes<Element>,
                   .slot_bytes = selected_slot_bytes<Element>,
                   .take_query = selected_take_query<Element>,
                   .add_to_keys = selected_add_to_keys<Element>},
  };
}

}  // namespace
}  // namespace longspan
