#pragma once

#include "longspan/kernels/attention/cpu/simd/scores.h"
#include "longspan/kernels/attention/cpu/steps.h"
#include "longspan/kernels/common/cpu/simd/pack.h"

namespace longspan {
namespace {

/// One head's running softmax over the keys so far.
template <class T>
struct HeadState {
  T* q;    // [head_dim, queries]
  T* out;  // [queries, value_dim], times `sum`
  T *max, *sum;
};

template <class T>
struct ForwardScratch {
  T *k, *v;  // [keys, channels] of the block at hand
  T* scores;
  T* keep;  // what a larger maximum leaves of earlier sums, for each query
  HeadState<T> head[4];
  int64_t bytes;

  ForwardScratch(const AttentionArgs& args, int heads, void* scratch) {
    const int64_t d = row_length<T>(args.head_dim);
    const int64_t dv = row_length<T>(args.value_dim);
    Carver carver(scratch);
    k = carver.take<T>(kBlock * d);
    v = carver.take<T>(kBlock * dv);
    scores = carver.take<T>(kBlock * score_stride<T>());
    keep = carver.take<T>(kBlock);
    for (int h = 0; h < heads; ++h) {
      head[h].q = carver.take<T>(d * score_stride<T>());
      head[h].out = carver.take<T>(kBlock * dv);
      head[h].max = carver.take<T>(kBlock);
      head[h].sum = carver.take<T>(kBlock);
    }
    bytes = carver.bytes();
  }
};

template <class Element>
void forward_start(const AttentionForwardArgs& args, const QueryBlock& queries,
                   void* memory) {
  using T = Accumulator<Element>;
  const ForwardScratch<T> scratch(args, queries.heads, memory);
  const int64_t dv = row_length<T>(args.value_dim);
  for (int h = 0; h < queries.heads; ++h) {
    const HeadState<T>& head = scratch.head[h];
    // Rows pass through the place of k, which no block has taken yet.
    pack_queries(place_in<const Element>(args.q, queries.row, queries.first,
                                         queries.first_head + h),
                 args.q.token_stride, queries.count, args.head_dim,
                 query_factor<T>(args), scratch.k, head.q);
    for (int64_t i = 0; i < kBlock * dv; ++i) head.out[i] = 0;
    for (int i = 0; i < kBlock; ++i) {
      head.max[i] = -kInfinity<T>;
      head.sum[i] = 0;
    }
  }
}

/// Scores become weights exp(score - maximum), hidden pairs 0. A maximum of
/// -inf counts as 0, so that queries that saw nothing keep sums of 0.
template <class T>
void weigh(const HeadState<T>& head, const KeyBlock& keys, T* scores, T* keep) {
  const Lanes lanes = lanes_of<T>(keys);
  const int64_t stride = score_stride<T>();
  for (int lane = lanes.begin; lane < lanes.end; lane += kLanes<T>) {
    const Vector<T> old_max = load(head.max + lane);
    Vector<T> max = old_max;
    for (int key = 0; key < keys.count; ++key) {
      const Vector<T> s = load(scores + key * stride + lane);
      max = s > max ? s : max;
    }
    const Vector<T> shift = max == -kInfinity<T> ? Vector<T>{} : max;
    const Vector<T> kept = exp_of(old_max - shift);
    Vector<T> sum = load(head.sum + lane) * kept;
    for (int key = 0; key < keys.count; ++key) {
      T* at = scores + key * stride + lane;
      const Vector<T> weight = exp_of(load(at) - shift);
      store(at, weight);
      sum += weight;
    }
    store(head.max + lane, max);
    store(head.sum + lane, sum);
    store(keep + lane, kept);
  }
}

template <class T>
void rescale(const T* keep, int first, int last, int columns, T* out,
             int64_t stride) {
  for (int query = first; query < last; ++query) {
    if (keep[query] == 1) continue;
    T* row = out + query * stride;
    for (int i = 0; i < columns; ++i) row[i] *= keep[query];
  }
}

template <class Element>
void forward_add_keys(const AttentionForwardArgs& args,
                      const QueryBlock& queries, const KeyBlock& keys,
                      void* memory) {
  using T = Accumulator<Element>;
  const ForwardScratch<T> scratch(args, queries.heads, memory);
  const int64_t dv = row_length<T>(args.value_dim);
  const Rows<T> k = rows_of<Reads::elements>(
      place_in<const Element>(args.k, queries.row, keys.first,
                              queries.key_head),
      args.k.token_stride, keys.count, args.head_dim, scratch.k);
  const Rows<T> v = rows_of<Reads::vectors>(
      place_in<const Element>(args.v, queries.row, keys.first,
                              queries.key_head),
      args.v.token_stride, keys.count, args.value_dim, scratch.v);
  // Where nothing is hidden, infinities and NaNs are everybody's to see.
  const bool plain = !keys.hides || all_finite(v, keys.count, args.value_dim);
  const int columns = whole_vectors<T>(args.value_dim);
  const TileDepths depths = TileDepths::of_queries(keys);
  for (int h = 0; h < queries.heads; ++h) {
    const HeadState<T>& head = scratch.head[h];
    compute_scores(args, keys, k, head.q, scratch.scores);
    weigh(head, keys, scratch.scores, scratch.keep);
    rescale(scratch.keep, keys.first_query, keys.last_query, columns, head.out,
            dv);
    if (!plain) {
      add_visible_to_queries(keys, scratch.scores, v, args.value_dim, head.out,
                             dv);
      continue;
    }
    multiply<Layout::transposed, Start::add>(
        Product<T>{.a = scratch.scores + keys.first_query,
                   .a_stride = score_stride<T>(),
                   .b = v.data,
                   .b_stride = v.stride,
                   .c = head.out + keys.first_query * dv,
                   .c_stride = dv,
                   .rows = keys.last_query - keys.first_query,
                   .depth = keys.count,
                   .columns = columns,
                   .depths = depths.data()});
  }
}

/// Joins the softmax over this call's keys with that of earlier calls.
template <class T>
void fold(const T* sums, T sum, T max, T* out, T* lse, int n) {
  const T here = max + log_of(sum);
  if (*lse == -kInfinity<T>) {
    for (int i = 0; i < n; ++i) out[i] = sums[i] / sum;
    *lse = here;
    return;
  }
  const T top = here > *lse ? here : *lse;
  const T before = exp_of(*lse - top), now = exp_of(here - top);
  const T both = before + now;
  for (int i = 0; i < n; ++i) {
    out[i] = (out[i] * before + sums[i] / sum * now) / both;
  }
  *lse = top + log_of(both);
}

template <class Element>
void forward_finish(const AttentionForwardArgs& args, const QueryBlock& queries,
                    void* memory) {
  using T = Accumulator<Element>;
  const ForwardScratch<T> scratch(args, queries.heads, memory);
  const int64_t dv = row_length<T>(args.value_dim);
  for (int h = 0; h < queries.heads; ++h) {
    const HeadState<T>& head = scratch.head[h];
    for (int query = 0; query < queries.count; ++query) {
      if (head.sum[query] == 0) continue;  // saw nothing
      const int64_t token = queries.first + query;
      const int64_t at = queries.first_head + h;
      fold(head.out + query * dv, head.sum[query], head.max[query],
           place_in<T>(args.out, queries.row, token, at),
           place_in<T>(args.lse, queries.row, token, at), args.value_dim);
    }
  }
}

template <class Element>
int64_t forward_scratch_bytes(const AttentionArgs& args, int heads) {
  return ForwardScratch<Accumulator<Element>>(args, heads, nullptr).bytes;
}

template <class Element>
constexpr ForwardSteps forward_steps() {
  return {.scratch_bytes = forward_scratch_bytes<Element>,
          .start = forward_start<Element>,
          .add_keys = forward_add_keys<Element>,
          .finish = forward_finish<Element>};
}

}  // namespace
}  // namespace longspan
