#pragma once

#include "longspan/kernels/attention/cpu/simd/scores.h"
#include "longspan/kernels/attention/cpu/steps.h"
#include "longspan/kernels/common/cpu/simd/pack.h"

namespace longspan {
namespace {

template <class T>
struct BackwardScratch {
  T *k, *v;         // [keys, channels] of the block at hand
  T *q, *dout;      // [queries, channels], q with its factor
  T *q_t, *dout_t;  // [channels, queries]
  T* dq;            // [queries, head_dim]
  T* product;       // [keys, channels] of dk or dv
  T* weights;       // scores, then P
  T* changes;       // dP, then dS
  T *lse, *delta;   // [queries]
  struct Facts {
    bool finite;        // q and dout
    bool some_dead;     // of the next
    bool dead[kBlock];  // lse infinite: saw no key
  }* facts;
  int64_t bytes;

  BackwardScratch(const AttentionArgs& args, void* scratch) {
    const int64_t d = row_length<T>(args.head_dim);
    const int64_t dv = row_length<T>(args.value_dim);
    Carver carver(scratch);
    k = carver.take<T>(kBlock * d);
    v = carver.take<T>(kBlock * dv);
    q = carver.take<T>(kBlock * d);
    dout = carver.take<T>(kBlock * dv);
    q_t = carver.take<T>(d * score_stride<T>());
    dout_t = carver.take<T>(dv * score_stride<T>());
    dq = carver.take<T>(kBlock * d);
    product = carver.take<T>(kBlock * (d > dv ? d : dv));
    weights = carver.take<T>(kBlock * score_stride<T>());
    changes = carver.take<T>(kBlock * score_stride<T>());
    lse = carver.take<T>(kBlock);
    delta = carver.take<T>(kBlock);
    facts = carver.take<Facts>(1);
    bytes = carver.bytes();
  }
};

template <class Element>
void backward_start(const AttentionBackwardArgs& args,
                    const QueryBlock& queries, void* memory) {
  using T = Accumulator<Element>;
  const BackwardScratch<T> scratch(args, memory);
  const int64_t d = row_length<T>(args.head_dim);
  const int64_t dv = row_length<T>(args.value_dim);
  auto& facts = *scratch.facts;
  pack_queries(place_in<const Element>(args.q, queries.row, queries.first,
                                       queries.first_head),
               args.q.token_stride, queries.count, args.head_dim,
               query_factor<T>(args), scratch.q, scratch.q_t);
  pack_queries(place_in<const Element>(args.dout, queries.row, queries.first,
                                       queries.first_head),
               args.dout.token_stride, queries.count, args.value_dim, T{1},
               scratch.dout, scratch.dout_t);
  facts.finite =
      all_finite(Rows<T>{scratch.q, d}, queries.count, args.head_dim) &&
      all_finite(Rows<T>{scratch.dout, dv}, queries.count, args.value_dim);
  for (int64_t i = 0; i < kBlock * d; ++i) scratch.dq[i] = 0;
  facts.some_dead = false;
  for (int query = 0; query < kBlock; ++query) {
    T lse = 0, delta = 0;
    if (query < queries.count) {
      const int64_t token = queries.first + query;
      lse =
          *place_in<const T>(args.lse, queries.row, token, queries.first_head);
      delta = *place_in<const T>(args.delta, queries.row, token,
                                 queries.first_head);
    }
    const bool dead = lse == kInfinity<T> || lse == -kInfinity<T>;
    facts.dead[query] = dead;
    facts.some_dead |= dead;
    scratch.lse[query] = dead ? 0 : lse;
    scratch.delta[query] = delta;
  }
}

/// From scores and dP to P and dS: P = exp(score - lse), dS = P * (dP - delta),
/// times the slope of the soft cap. The scale is in the queries that dS meets,
/// and comes to dq in the end. Hidden pairs get 0 by choice, not by arithmetic:
/// what they hold may be NaN.
template <class T>
void differentiate(const AttentionArgs& args, const KeyBlock& keys,
                   const BackwardScratch<T>& scratch) {
  const Lanes lanes = lanes_of<T>(keys);
  const int64_t stride = score_stride<T>();
  const T cap = static_cast<T>(args.softcap);
  const Vector<T> zero = {};
  for (int lane = lanes.begin; lane < lanes.end; lane += kLanes<T>) {
    const Visible<T> visible(keys, lane);
    const Vector<T> lse = load(scratch.lse + lane);
    const Vector<T> delta = load(scratch.delta + lane);
    for (int key = 0; key < keys.count; ++key) {
      T* p_at = scratch.weights + key * stride + lane;
      T* ds_at = scratch.changes + key * stride + lane;
      const Vector<T> s = load(p_at);
      Vector<T> p = exp_of(s - lse);
      Vector<T> ds = p * (load(ds_at) - delta);
      if (cap != 0) ds *= cap * (T{1} - (s / cap) * (s / cap));
      if (!visible.all) {
        const Choice<T> sees = visible.sees(key);
        p = sees ? p : zero;
        ds = sees ? ds : zero;
      }
      store(p_at, p);
      store(ds_at, ds);
    }
  }
}

/// target[key] += sum over queries of weights[key, query] * rows[query].
template <class T>
void add_to_keys(const KeyBlock& keys, const Depth* depths, const T* weights,
                 const T* rows, int n, bool plain, T* product, T* target,
                 int64_t target_stride) {
  const int64_t stride = row_length<T>(n);
  Product<T> m{.a = weights + keys.first_query,
               .a_stride = score_stride<T>(),
               .b = rows + keys.first_query * stride,
               .b_stride = stride,
               .c = target,
               .c_stride = target_stride,
               .rows = keys.count,
               .depth = keys.last_query - keys.first_query,
               .columns = whole_vectors<T>(n),
               .depths = depths};
  if (plain && n == m.columns) return multiply<Layout::rows, Start::add>(m);
  m.c = product;
  m.c_stride = stride;
  if (plain) {
    multiply<Layout::rows, Start::zero>(m);
  } else {
    sum_visible_of_keys(keys, weights, rows, stride, n, product);
  }
  for (int key = 0; key < keys.count; ++key) {
    T* to = target + key * target_stride;
    const T* from = product + key * stride;
    for (int i = 0; i < n; ++i) to[i] += from[i];
  }
}

/// The block without queries that saw nothing.
inline KeyBlock without_dead(const KeyBlock& keys, const bool* dead) {
  KeyBlock alive = keys;
  alive.hides = true;
  for (int query = 0; query < kBlock; ++query) {
    if (dead[query]) alive.low[query] = alive.high[query] = 0;
  }
  return alive;
}

template <class Element>
void backward_add_keys(const AttentionBackwardArgs& args,
                       const QueryBlock& queries, const KeyBlock& given,
                       const KeyGradients& gradients, void* memory) {
  using T = Accumulator<Element>;
  const BackwardScratch<T> scratch(args, memory);
  const auto& facts = *scratch.facts;
  const KeyBlock keys =
      facts.some_dead ? without_dead(given, facts.dead) : given;
  const int64_t d = row_length<T>(args.head_dim);
  const Rows<T> k = rows_of<Reads::vectors>(
      place_in<const Element>(args.k, queries.row, keys.first,
                              queries.key_head),
      args.k.token_stride, keys.count, args.head_dim, scratch.k);
  const Rows<T> v = rows_of<Reads::elements>(
      place_in<const Element>(args.v, queries.row, keys.first,
                              queries.key_head),
      args.v.token_stride, keys.count, args.value_dim, scratch.v);

  compute_scores(args, keys, k, scratch.q_t, scratch.weights);
  multiply_visible(keys, v, args.value_dim, scratch.dout_t, scratch.changes);
  differentiate(args, keys, scratch);

  // Where nothing is hidden, infinities and NaNs are everybody's to see.
  const bool plain = !keys.hides || facts.finite;
  const TileDepths depths = TileDepths::of_keys(keys);
  add_to_keys(keys, depths.data(), scratch.weights, scratch.dout,
              args.value_dim, plain, scratch.product,
              static_cast<T*>(gradients.dv), gradients.dv_stride);
  add_to_keys(keys, depths.data(), scratch.changes, scratch.q, args.head_dim,
              plain, scratch.product, static_cast<T*>(gradients.dk),
              gradients.dk_stride);
  if (keys.hides && !all_finite(k, keys.count, args.head_dim)) {
    add_visible_to_queries(keys, scratch.changes, k, args.head_dim, scratch.dq,
                           d);
    return;
  }
  const TileDepths query_tiles = TileDepths::of_queries(keys);
  multiply<Layout::transposed, Start::add>(
      Product<T>{.a = scratch.changes + keys.first_query,
                 .a_stride = score_stride<T>(),
                 .b = k.data,
                 .b_stride = k.stride,
                 .c = scratch.dq + keys.first_query * d,
                 .c_stride = d,
                 .rows = keys.last_query - keys.first_query,
                 .depth = keys.count,
                 .columns = whole_vectors<T>(args.head_dim),
                 .depths = query_tiles.data()});
}

template <class Element>
void backward_finish(const AttentionBackwardArgs& args,
                     const QueryBlock& queries, void* memory) {
  using T = Accumulator<Element>;
  const BackwardScratch<T> scratch(args, memory);
  const int64_t d = row_length<T>(args.head_dim);
  const T factor = query_factor<T>(args);
  for (int query = 0; query < queries.count; ++query) {
    T* dq = place_in<T>(args.dq, queries.row, queries.first + query,
                        queries.first_head);
    for (int i = 0; i < args.head_dim; ++i) {
      dq[i] += factor * scratch.dq[query * d + i];
    }
  }
}

template <class Element>
int64_t backward_scratch_bytes(const AttentionArgs& args) {
  return BackwardScratch<Accumulator<Element>>(args, nullptr).bytes;
}

template <class Element>
constexpr BackwardSteps backward_steps() {
  return {.scratch_bytes = backward_scratch_bytes<Element>,
          .start = backward_start<Element>,
          .add_keys = backward_add_keys<Element>,
          .finish = backward_finish<Element>};
}

}  // namespace
}  // namespace longspan
