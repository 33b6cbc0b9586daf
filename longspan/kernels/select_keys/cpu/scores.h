#pragma once

#include "longspan/kernels/common/cpu/simd/multiply.h"
#include "longspan/kernels/common/cpu/simd/pack.h"
#include "longspan/kernels/select_keys/cpu/steps.h"
#include "longspan/kernels/select_keys/cpu/top.h"

/// Scores of packed queries and keys. A product has the (query, head) pairs as
/// rows and keys as columns, so that the sum over heads runs down the columns,
/// a vector of keys at a time and head by head: one order for every pair.
///
/// `Operands` say how queries and keys are packed and multiplied.
namespace longspan {
namespace {

/// Operands in the accumulation type. Queries lie in rows, keys transposed.
template <class Value>
struct WideOperands {
  using Element = Value;
  using T = Accumulator<Element>;
  using A = T;
  using B = T;
  static constexpr int kColumns = kTileVectors * kLanes<T>;  // at once

  static void start() {}
  static void finish() {}
  static int64_t row_stride(int channels) { return row_length<T>(channels); }
  static int64_t key_elements(int channels) {
    return int64_t{whole_vectors<T>(channels)} * kScoredKeys;
  }

  static void pack_row(const Element* from, int channels, A* to) {
    pack_rows(from, 0, 1, channels, T{1}, to, 0);
  }
  /// From packed rows of keys, whole vectors of them.
  static void turn(const A* rows, int count, int channels, B* to) {
    const int64_t stride = row_stride(channels);
    for (int key = 0; key < count; key += kLanes<T>) {
      for (int i = 0; i < channels; i += kLanes<T>) {
        transpose_square(rows + key * stride + i, stride,
                         to + int64_t{i} * kScoredKeys + key, kScoredKeys);
      }
    }
  }
  /// Up to kColumns columns.
  static void multiply(const A* a, int rows, const B* b, int channels,
                       int columns, T* c) {
    longspan::multiply<Layout::rows, Start::zero>(
        Product<T>{.a = a,
                   .a_stride = row_stride(channels),
                   .b = b,
                   .b_stride = kScoredKeys,
                   .c = c,
                   .c_stride = kColumns,
                   .rows = rows,
                   .depth = channels,
                   .columns = columns});
  }
};

/// Rows of a product: all heads of some queries.
constexpr int kRowsAtOnce = 64;
/// Packed rows are read in whole steps of this.
constexpr int kRowStep = 16;

inline int queries_at_once(const KeyScoreArgs& args) {
  const int64_t heads = args.heads < 1 ? 1 : args.heads;
  return heads >= kRowsAtOnce ? 1 : static_cast<int>(kRowsAtOnce / heads);
}

template <class Operands>
struct ScoreScratch {
  using T = typename Operands::T;
  typename Operands::B* keys;  // [channels, kScoredKeys]
  typename Operands::A* rows;  // keys before they are turned
  T* products;                 // [rows, kColumns]
  T* weights;                  // [queries, heads]
  typename Operands::A* queries;
  int64_t bytes;

  ScoreScratch(const KeyScoreArgs& args, int query_count, void* scratch) {
    const int64_t stride = Operands::row_stride(args.head_dim);
    const int64_t product_rows = queries_at_once(args) * args.heads + kRowStep;
    Carver carver(scratch);
    keys = carver.take<typename Operands::B>(
        Operands::key_elements(args.head_dim));
    rows = carver.take<typename Operands::A>(kScoredKeys * stride);
    products = carver.take<T>(product_rows * Operands::kColumns);
    weights = carver.take<T>(query_count * args.heads);
    queries = carver.take<typename Operands::A>(
        (query_count * args.heads + kRowStep) * stride);
    bytes = carver.bytes();
  }
};

template <class Operands>
int64_t score_scratch_bytes(const KeyScoreArgs& args, int queries) {
  return ScoreScratch<Operands>(args, queries, nullptr).bytes;
}

template <class Operands>
void pack_scored_queries(const KeyScoreArgs& args, const ScoredQueries& queries,
                         void* memory) {
  using Element = typename Operands::Element;
  using T = typename Operands::T;
  const ScoreScratch<Operands> scratch(args, queries.count, memory);
  const int64_t stride = Operands::row_stride(args.head_dim);
  auto* row = scratch.queries;
  T* weight = scratch.weights;
  for (int query = 0; query < queries.count; ++query) {
    const int64_t token = queries.first + query;
    for (int64_t head = 0; head < args.heads; ++head) {
      Operands::pack_row(
          place_in<const Element>(args.q, queries.row, token, head),
          args.head_dim, row);
      *weight++ = *place_in<const T>(args.weights, queries.row, token, head);
      row += stride;
    }
  }
  for (int64_t i = 0; i < kRowStep * stride; ++i) row[i] = {};
}

template <class Operands>
void pack_scored_keys(const KeyScoreArgs& args, int64_t row,
                      const int32_t* keys, int count, void* memory) {
  using Element = typename Operands::Element;
  const ScoreScratch<Operands> scratch(args, 0, memory);
  const int64_t stride = Operands::row_stride(args.head_dim);
  const int whole = (count + 15) / 16 * 16;
  for (int key = 0; key < count; ++key) {
    Operands::pack_row(place_in<const Element>(args.k, row, keys[key], 0),
                       args.head_dim, scratch.rows + key * stride);
  }
  for (int64_t i = count * stride; i < whole * stride; ++i) {
    scratch.rows[i] = {};
  }
  Operands::turn(scratch.rows, whole, args.head_dim, scratch.keys);
}

/// max(0, x), NaN where x is.
template <class T>
inline Vector<T> rectified(Vector<T> x) {
  const Vector<T> zero = {};
  return x < zero ? zero : x;
}

/// scores[key] = sum_h weights[h] * max(0, products[h, key]), for whole vectors
/// of keys.
template <int kVectors, class T>
[[gnu::always_inline]] inline void sum_heads(const T* products, int64_t stride,
                                             const T* weights, int64_t heads,
                                             T* scores) {
  Vector<T> sum[kVectors] = {};
  for (int64_t head = 0; head < heads; ++head) {
    const Vector<T> weight = all_lanes(weights[head]);
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      sum[i] = multiply_add(
          weight, rectified<T>(load(products + i * kLanes<T>)), sum[i]);
    }
    products += stride;
  }
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) {
    store(scores + i * kLanes<T>, plain_score<T>(sum[i]));
  }
}

template <class Operands>
void score_keys(const KeyScoreArgs& args, const ScoredQueries& queries,
                int first, int last, int keys, void* memory, void* to) {
  using T = typename Operands::T;
  constexpr int kColumns = Operands::kColumns;
  constexpr int kSummed = kColumns / kLanes<T> % 3 == 0 ? 3 : 2;
  const ScoreScratch<Operands> scratch(args, queries.count, memory);
  const int64_t stride = Operands::row_stride(args.head_dim);
  const int step = queries_at_once(args);
  const int whole = (keys + 15) / 16 * 16;
  T* scores = static_cast<T*>(to);
  for (int column = 0; column < whole; column += kColumns) {
    const int columns = whole - column < kColumns ? whole - column : kColumns;
    for (int query = first; query < last; query += step) {
      const int end = last - query < step ? last : query + step;
      Operands::multiply(scratch.queries + query * args.heads * stride,
                         static_cast<int>((end - query) * args.heads),
                         scratch.keys + column, args.head_dim, columns,
                         scratch.products);
      const T* products = scratch.products;
      for (int i = query; i < end; ++i) {
        const T* weights = scratch.weights + i * args.heads;
        T* row = scores + i * kScoredKeys + column;
        int part = 0;
        for (; part + kSummed * kLanes<T> <= columns;
             part += kSummed * kLanes<T>) {
          sum_heads<kSummed>(products + part, kColumns, weights, args.heads,
                             row + part);
        }
        for (; part < columns; part += kLanes<T>) {
          sum_heads<1>(products + part, kColumns, weights, args.heads,
                       row + part);
        }
        products += args.heads * kColumns;
      }
    }
  }
}

}  // namespace
}  // namespace longspan
