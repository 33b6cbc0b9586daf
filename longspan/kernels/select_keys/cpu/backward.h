#pragma once

#include "longspan/kernels/select_keys/cpu/scores.h"

namespace longspan {
namespace {

/// With a = q k and m = 0 where a <= 0, else dscore * weight (so where a is
/// NaN, as torch's relu has it):
/// dweights[h] += sum_j dscore_j max(0, a), dq[h] += sum_j m k_j,
/// dk_j += sum_h m q_h. Products with m are in the accumulation type, those of
/// q and k the same as in scores.
template <class T>
struct ScoreBackwardScratch {
  static constexpr int64_t kStride = kScoredKeys;
  T* changes;  // [heads, kStride]: a, then m
  T* dscores;  // [kStride]
  T *k, *q;    // [keys, channels], [heads, channels]
  T* product;  // of dq or dk
  int64_t bytes;

  ScoreBackwardScratch(const KeyScoreArgs& args, void* scratch) {
    const int64_t d = row_length<T>(args.head_dim);
    const int64_t rows = args.heads + kRowStep;
    Carver carver(scratch);
    changes = carver.take<T>(rows * kStride);
    dscores = carver.take<T>(kStride);
    k = carver.take<T>(kScoredKeys * d);
    q = carver.take<T>(rows * d);
    product = carver.take<T>((rows > kScoredKeys ? rows : kScoredKeys) * d);
    bytes = carver.bytes();
  }
};

template <class Operands>
int64_t score_backward_bytes(const KeyScoreArgs& args) {
  return ScoreBackwardScratch<typename Operands::T>(args, nullptr).bytes;
}

/// From a to m, a head at a time; returns its part of dweights.
template <class T>
T differentiate_head(T* changes, const T* dscores, T weight, int columns) {
  Vector<T> sum = {};
  const Vector<T> zero = {};
  for (int i = 0; i < columns; i += kLanes<T>) {
    const Vector<T> a = load(changes + i), g = load(dscores + i);
    sum = multiply_add(g, rectified<T>(a), sum);
    store(changes + i, a <= zero ? zero : g * weight);
  }
  T total = 0;
  for (int lane = 0; lane < kLanes<T>; ++lane) total += sum[lane];
  return total;
}

template <class Operands>
void score_backward(const ScoreSelectedBackwardArgs& args,
                    const ScoredQueries& query, const int32_t* keys, int count,
                    const void* dscores, void* memory, void* backward_memory) {
  using Element = typename Operands::Element;
  using T = typename Operands::T;
  constexpr int kColumns = Operands::kColumns;
  const ScoreScratch<Operands> packed(args, 1, memory);
  const ScoreBackwardScratch<T> scratch(args, backward_memory);
  const int heads = static_cast<int>(args.heads), n = args.head_dim;
  const int64_t d = row_length<T>(n), stride = scratch.kStride;
  const int whole = (count + 15) / 16 * 16;
  if (heads == 0) return;

  pack_scored_keys<Operands>(args, query.row, keys, count, memory);
  for (int key = 0; key < whole; ++key) {
    if (key < count) {
      pack_rows(place_in<const Element>(args.k, query.row, keys[key], 0), 0, 1,
                n, T{1}, scratch.k + key * d, d);
    }
    scratch.dscores[key] =
        key < count ? static_cast<const T*>(dscores)[key] : 0;
  }
  for (int head = 0; head < heads; ++head) {
    pack_rows(place_in<const Element>(args.q, query.row, query.first, head), 0,
              1, n, T{1}, scratch.q + head * d, d);
  }

  for (int column = 0; column < whole; column += kColumns) {
    const int columns = whole - column < kColumns ? whole - column : kColumns;
    Operands::multiply(packed.queries, heads, packed.keys + column, n, columns,
                       packed.products);
    for (int head = 0; head < heads; ++head) {
      T* to = scratch.changes + head * stride + column;
      const T* from = packed.products + head * kColumns;
      for (int i = 0; i < columns; ++i) {
        to[i] = column + i < count ? from[i] : T{0};
      }
    }
  }
  for (int head = 0; head < heads; ++head) {
    *place_in<T>(args.dweights, query.row, query.first, head) +=
        differentiate_head(scratch.changes + head * stride, scratch.dscores,
                           packed.weights[head], whole);
  }

  const auto add_rows = [n, d](const T* from, int row, T* to) {
    for (int i = 0; i < n; ++i) to[i] += from[row * d + i];
  };
  Product<T> m{.a = scratch.changes,
               .a_stride = stride,
               .b = scratch.k,
               .b_stride = d,
               .c = scratch.product,
               .c_stride = d,
               .rows = heads,
               .depth = count,
               .columns = whole_vectors<T>(n)};
  multiply<Layout::rows, Start::zero>(m);
  for (int head = 0; head < heads; ++head) {
    add_rows(scratch.product, head,
             place_in<T>(args.dq, query.row, query.first, head));
  }
  m.b = scratch.q;
  m.rows = count;
  m.depth = heads;
  multiply<Layout::transposed, Start::zero>(m);
  for (int key = 0; key < count; ++key) {
    add_rows(scratch.product, key,
             place_in<T>(args.dk, query.row, keys[key], 0));
  }
}

template <class Operands>
constexpr KeyScoreSteps key_score_steps() {
  return {.start = Operands::start,
          .finish = Operands::finish,
          .scratch_bytes = score_scratch_bytes<Operands>,
          .pack_queries = pack_scored_queries<Operands>,
          .pack_keys = pack_scored_keys<Operands>,
          .score = score_keys<Operands>,
          .backward_bytes = score_backward_bytes<Operands>,
          .backward = score_backward<Operands>};
}

}  // namespace
}  // namespace longspan
