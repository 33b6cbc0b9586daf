#pragma once

#include "longspan/kernels/attend_selected/cpu/simd/heads.h"
#include "longspan/kernels/attention/cpu/simd/forward.h"
#include "longspan/kernels/common/cpu/simd/narrow.h"

/// Selected keys, one query at a time: the heads of a key head stand where a
/// block of queries stands elsewhere, and the rows of listed keys are gathered
/// into one block that serves as keys and as values.
namespace longspan {
namespace {

/// A block of keys that all heads see.
inline KeyBlock block_of(int keys, int heads) {
  KeyBlock block;
  block.count = keys;
  block.last_query = heads;
  return block;
}

/// Rows of listed keys [first, first + count), side by side.
template <class Element, class T = Accumulator<Element>>
void gather_keys(const SelectedAttentionArgs& args, const SelectedKeys& list,
                 int64_t first, int count, T* to) {
  const int64_t stride = row_length<T>(args.head_dim);
  constexpr int kAhead = 12;
  for (int i = 0; i < count; ++i) {
    prefetch_listed<Element>(args, list, first + i + kAhead,
                             first + i + kAhead + 1);
    pack_rows(key_row<Element>(args, list, first + i), 0, 1, args.head_dim,
              T{1}, to + i * stride, stride);
  }
}

/// Heads of one query, times a factor, as columns; what is left of the last
/// vector is 0. `rows` has room for them.
template <class Element, class T = Accumulator<Element>>
void heads_as_columns(const TokenArray<const void*>& array,
                      const SelectedKeys& list, const HeadPanel& panel, int n,
                      T factor, T* rows, T* columns) {
  const int64_t stride = row_length<T>(n), to_stride = score_stride<T>();
  const int whole = whole_vectors<T>(panel.count);
  pack_rows(place_in<const Element>(array, list.row, list.query, panel.first),
            array.head_stride, panel.count, n, factor, rows, stride);
  for (int64_t i = panel.count * stride; i < whole * stride; ++i) rows[i] = 0;
  for (int i = 0; i < n; i += kLanes<T>) {
    for (int head = 0; head < whole; head += kLanes<T>) {
      transpose_square(rows + head * stride + i, stride,
                       columns + i * to_stride + head, to_stride);
    }
  }
}

/// c[key, head] = rows[key] * columns[head].
template <class T>
void multiply_keys(const T* rows, int64_t row_stride, int keys, int depth,
                   const T* columns, int heads, T* c) {
  multiply<Layout::rows, Start::zero>(
      Product<T>{.a = rows,
                 .a_stride = row_stride,
                 .b = columns,
                 .b_stride = score_stride<T>(),
                 .c = c,
                 .c_stride = score_stride<T>(),
                 .rows = keys,
                 .depth = depth,
                 .columns = whole_vectors<T>(heads)});
}

/// Scores of a gathered block, while rows of the next come from memory.
template <class Element, class T = Accumulator<Element>>
void score_keys(const SelectedAttentionArgs& args, const SelectedKeys& list,
                int64_t first, int keys, const T* k, const T* q, int heads,
                T* scores) {
  constexpr int kStep = 2 * kTileRows;
  const int64_t stride = row_length<T>(args.head_dim);
  for (int i = 0; i < keys; i += kStep) {
    const int64_t next = first + kBlock + i;
    prefetch_listed<Element>(args, list, next, next + kStep);
    multiply_keys(k + i * stride, stride, keys - i < kStep ? keys - i : kStep,
                  args.head_dim, q, heads, scores + i * score_stride<T>());
  }
}

/// c[head] += sum over keys of weight[key, head] * rows[key].
template <class T>
void add_to_heads(const T* weights, int64_t weight_stride, int heads, int keys,
                  const T* rows, int64_t row_stride, int n, T* c,
                  int64_t c_stride) {
  multiply<Layout::transposed, Start::add>(
      Product<T>{.a = weights,
                 .a_stride = weight_stride,
                 .b = rows,
                 .b_stride = row_stride,
                 .c = c,
                 .c_stride = c_stride,
                 .rows = heads,
                 .depth = keys,
                 .columns = whole_vectors<T>(n)});
}

template <class T>
struct SelectedForwardScratch {
  T* k;  // [keys, head_dim] of the block at hand
  T *scores, *keep;
  Carver states;  // of the panels
  int64_t panel_bytes, bytes;

  SelectedForwardScratch(const SelectedAttentionArgs& args, void* scratch)
      : states(scratch) {
    k = states.take<T>(kBlock * row_length<T>(args.head_dim));
    scores = states.take<T>(kBlock * score_stride<T>());
    keep = states.take<T>(kBlock);
    Carver counted = states;
    take_state(args, counted);
    panel_bytes = counted.bytes() - states.bytes();
    bytes = states.bytes() + head_panels(args) * panel_bytes;
  }

  HeadState<T> panel(const SelectedAttentionArgs& args, int index) const {
    Carver carver = states;
    carver.take<char>(index * panel_bytes);
    return take_state(args, carver);
  }

 private:
  static HeadState<T> take_state(const SelectedAttentionArgs& args,
                                 Carver& carver) {
    HeadState<T> state;
    state.q = carver.take<T>(row_length<T>(args.head_dim) * score_stride<T>());
    state.out = carver.take<T>(kBlock * row_length<T>(args.value_dim));
    state.max = carver.take<T>(kBlock);
    state.sum = carver.take<T>(kBlock);
    return state;
  }
};

template <class Element>
void selected_forward_start(const SelectedForwardArgs& args,
                            const SelectedKeys& list,
                            SelectedForwardScratch<Accumulator<Element>>& s) {
  using T = Accumulator<Element>;
  for (int p = 0; p < head_panels(args); ++p) {
    const HeadPanel panel = panel_of(args, list.key_head, p);
    const HeadState<T> state = s.panel(args, p);
    heads_as_columns<Element>(args.q, list, panel, args.head_dim,
                              static_cast<T>(args.scale), s.k, state.q);
    const int64_t sums = panel.count * row_length<T>(args.value_dim);
    for (int64_t i = 0; i < sums; ++i) state.out[i] = 0;
    for (int i = 0; i < kBlock; ++i) {
      state.max[i] = -kInfinity<T>;
      state.sum[i] = 0;
    }
  }
}

template <class Element>
void selected_forward_finish(const SelectedForwardArgs& args,
                             const SelectedKeys& list,
                             SelectedForwardScratch<Accumulator<Element>>& s) {
  using T = Accumulator<Element>;
  const int64_t stride = row_length<T>(args.value_dim);
  for (int p = 0; p < head_panels(args); ++p) {
    const HeadPanel panel = panel_of(args, list.key_head, p);
    const HeadState<T> state = s.panel(args, p);
    for (int h = 0; h < panel.count; ++h) {
      const int64_t head = panel.first + h;
      const T max = state.max[h], sum = state.sum[h];
      auto* out = place_in<Element>(args.out, list.row, list.query, head);
      T* lse = place_in<T>(args.lse, list.row, list.query, head);
      if (sum == 0) {  // saw nothing
        clear_row(args.value_dim, out);
        *lse = -kInfinity<T>;
        continue;
      }
      T all = sum;
      if (args.sink != nullptr) {
        all += exp_of(static_cast<const T*>(args.sink)[head] - max);
      }
      narrow_row(state.out + h * stride, args.value_dim, 1 / all, out);
      *lse = max + log_of(sum);
    }
  }
}

template <class Element>
void selected_forward(const SelectedForwardArgs& args, const SelectedKeys& list,
                      void* memory) {
  using T = Accumulator<Element>;
  SelectedForwardScratch<T> s(args, memory);
  const int64_t d = row_length<T>(args.head_dim);
  const int64_t dv = row_length<T>(args.value_dim);
  const int columns = whole_vectors<T>(args.value_dim);
  selected_forward_start<Element>(args, list, s);
  for (int64_t first = 0; first < list.count; first += kBlock) {
    const int keys = keys_in_block(list, first, kBlock);
    gather_keys<Element>(args, list, first, keys, s.k);
    for (int p = 0; p < head_panels(args); ++p) {
      const int heads = panel_of(args, list.key_head, p).count;
      const HeadState<T> state = s.panel(args, p);
      score_keys<Element>(args, list, first, keys, s.k, state.q, heads,
                          s.scores);
      weigh(state, block_of(keys, heads), s.scores, s.keep);
      rescale(s.keep, 0, heads, columns, state.out, dv);
      add_to_heads(s.scores, score_stride<T>(), heads, keys, s.k, d,
                   args.value_dim, state.out, dv);
    }
  }
  selected_forward_finish<Element>(args, list, s);
}

template <class Element>
int64_t selected_forward_bytes(const SelectedAttentionArgs& args) {
  return SelectedForwardScratch<Accumulator<Element>>(args, nullptr).bytes;
}

template <class Element>
void selected_weights(const SelectedWeightsArgs& args, const SelectedKeys& list,
                      void* weights, void* memory) {
  using T = Accumulator<Element>;
  SelectedForwardScratch<T> s(args, memory);
  for (int p = 0; p < head_panels(args); ++p) {
    const HeadPanel panel = panel_of(args, list.key_head, p);
    heads_as_columns<Element>(args.q, list, panel, args.head_dim,
                              static_cast<T>(args.scale), s.k,
                              s.panel(args, p).q);
  }
  T* to = static_cast<T*>(weights);
  for (int64_t first = 0; first < list.count; first += kBlock, to += kBlock) {
    const int keys = keys_in_block(list, first, kBlock);
    gather_keys<Element>(args, list, first, keys, s.k);
    for (int p = 0; p < head_panels(args); ++p) {
      const HeadPanel panel = panel_of(args, list.key_head, p);
      const HeadFacts<T> facts(args.lse, list, panel);
      score_keys<Element>(args, list, first, keys, s.k, s.panel(args, p).q,
                          panel.count, s.scores);
      for (int key = 0; key < keys; ++key) {
        Vector<T> sum = {};
        for (int h = 0; h < panel.count; h += kLanes<T>) {
          const Vector<T> weight =
              exp_of(load(s.scores + key * score_stride<T>() + h) -
                     load(facts.lse + h));
          sum += load(facts.alive + h) != 0 ? weight : Vector<T>{};
        }
        T all = p == 0 ? 0 : to[key];
        for (int lane = 0; lane < kLanes<T>; ++lane) all += sum[lane];
        to[key] = all;
      }
    }
  }
}

}  // namespace
}  // namespace longspan
