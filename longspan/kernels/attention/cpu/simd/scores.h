#pragma once

#include "longspan/kernels/attention/attention.h"
#include "longspan/kernels/attention/cpu/blocks.h"
#include "longspan/kernels/common/cpu/simd/functions.h"
#include "longspan/kernels/common/cpu/simd/multiply.h"
#include "longspan/kernels/common/cpu/simd/pack.h"

/// What both directions do with a block of scores. A block lies transposed,
/// [keys, queries]: a softmax over keys then works on whole vectors of queries,
/// and keys and values are used as the caller has them.
namespace longspan {
namespace {

/// The scratch row of a block of scores.
template <class T>
inline int64_t score_stride() {
  return row_length<T>(kBlock);
}

/// Lanes of whole vectors that hold every query that sees something.
struct Lanes {
  int begin, end;
};

template <class T>
inline Lanes lanes_of(const KeyBlock& keys) {
  return {keys.first_query / kLanes<T> * kLanes<T>,
          whole_vectors<T>(keys.last_query)};
}

/// Which keys the queries of one vector see.
template <class T>
struct Visible {
  Choice<T> low, high;
  bool all = true;  // all queries, all keys

  Visible(const KeyBlock& keys, int lane) {
    for (int i = 0; i < kLanes<T>; ++i) {
      low[i] = keys.low[lane + i];
      high[i] = keys.high[lane + i];
      all &= low[i] == 0 && high[i] == keys.count;
    }
  }
  Choice<T> sees(int key) const {
    const auto place = static_cast<typename VectorTypes<T>::Integer>(key);
    return (low <= place) & (high > place);
  }
};

/// rows[key] * columns[query] for all visible pairs, laid out as scores are.
/// Others have any value, where a whole vector of queries hides a key.
template <class T>
void multiply_visible(const KeyBlock& keys, Rows<T> rows, int depth,
                      const T* columns, T* c) {
  const int64_t stride = score_stride<T>();
  const auto multiply_part = [&](Lanes lanes, int first_key, int last_key) {
    multiply<Layout::rows, Start::zero>(
        Product<T>{.a = rows.data + first_key * rows.stride,
                   .a_stride = rows.stride,
                   .b = columns + lanes.begin,
                   .b_stride = stride,
                   .c = c + first_key * stride + lanes.begin,
                   .c_stride = stride,
                   .rows = last_key - first_key,
                   .depth = depth,
                   .columns = lanes.end - lanes.begin});
  };
  const Lanes lanes = lanes_of<T>(keys);
  if (!keys.hides) return multiply_part(lanes, 0, keys.count);
  for (int lane = lanes.begin; lane < lanes.end; lane += kLanes<T>) {
    int first = keys.count, last = 0;
    for (int query = lane; query < lane + kLanes<T>; ++query) {
      if (keys.low[query] >= keys.high[query]) continue;
      first = keys.low[query] < first ? keys.low[query] : first;
      last = keys.high[query] > last ? keys.high[query] : last;
    }
    if (first < last) multiply_part({lane, lane + kLanes<T>}, first, last);
  }
}

/// How deep the tiles of a product are whose A is a block of weights.
class TileDepths {
 public:
  /// Rows are queries: the keys that any query of a tile sees.
  static TileDepths of_queries(const KeyBlock& keys) {
    TileDepths depths(keys.hides);
    if (!keys.hides) return depths;
    for (int i = 0; i < keys.last_query - keys.first_query; ++i) {
      const int query = keys.first_query + i;
      depths.cover(i, keys.low[query], keys.high[query]);
    }
    return depths;
  }

  /// Rows are keys: the queries, from first_query on, that see some of a tile.
  static TileDepths of_keys(const KeyBlock& keys) {
    TileDepths depths(keys.hides);
    if (!keys.hides) return depths;
    for (int i = 0; i < keys.last_query - keys.first_query; ++i) {
      const int query = keys.first_query + i;
      for (int key = keys.low[query]; key < keys.high[query];
           key = (key / kTileRows + 1) * kTileRows) {
        depths.cover(key, i, i + 1);
      }
    }
    return depths;
  }

  /// For a Product; null where nothing is hidden.
  const Depth* data() const { return hides_ ? of_ : nullptr; }

 private:
  explicit TileDepths(bool hides) : hides_(hides) {
    for (Depth& depth : of_) depth = {0, 0};
  }

  void cover(int row, int begin, int end) {
    if (begin >= end) return;
    Depth& depth = of_[row / kTileRows];
    const bool first = depth.end == 0;
    depth.begin = first || begin < depth.begin ? begin : depth.begin;
    depth.end = end > depth.end ? end : depth.end;
  }

  bool hides_;
  Depth of_[kBlock / kTileRows + 1];
};

/// What queries are multiplied with before they meet keys: the scale, as the
/// soft cap wants it.
template <class T>
inline T query_factor(const AttentionArgs& args) {
  return static_cast<T>(args.softcap == 0 ? args.scale
                                          : args.scale / args.softcap);
}

/// scores = k q', soft-capped, -inf where a query does not see a key; q comes
/// with its factor. The same bits in both directions: one chain over channels
/// for each pair.
template <class T>
void compute_scores(const AttentionArgs& args, const KeyBlock& keys, Rows<T> k,
                    const T* q_transposed, T* scores) {
  const Lanes lanes = lanes_of<T>(keys);
  const int64_t stride = score_stride<T>();
  multiply_visible(keys, k, args.head_dim, q_transposed, scores);
  const T cap = static_cast<T>(args.softcap);
  const Vector<T> hidden = all_lanes(-kInfinity<T>);
  for (int lane = lanes.begin; lane < lanes.end; lane += kLanes<T>) {
    const Visible<T> visible(keys, lane);
    if (visible.all && cap == 0) continue;
    for (int key = 0; key < keys.count; ++key) {
      T* at = scores + key * stride + lane;
      Vector<T> s = load(at);
      if (cap != 0) s = tanh_of(s) * cap;
      if (!visible.all) s = visible.sees(key) ? s : hidden;
      store(at, s);
    }
  }
}

/// c[query] += weight[key, query] * rows[key] over visible pairs. Takes the
/// place of a product where `rows` has an infinity or a NaN, which a hidden
/// pair's weight of 0 would not keep out.
template <class T>
void add_visible_to_queries(const KeyBlock& keys, const T* weights,
                            Rows<T> rows, int n, T* c, int64_t c_stride) {
  for (int query = keys.first_query; query < keys.last_query; ++query) {
    for (int key = keys.low[query]; key < keys.high[query]; ++key) {
      const T weight = weights[key * score_stride<T>() + query];
      for (int i = 0; i < n; ++i) {
        c[query * c_stride + i] += weight * rows.data[key * rows.stride + i];
      }
    }
  }
}

/// c[key] = sum of weight[key, query] * rows[query] over visible pairs.
template <class T>
void sum_visible_of_keys(const KeyBlock& keys, const T* weights, const T* rows,
                         int64_t row_stride, int n, T* c) {
  for (int key = 0; key < keys.count; ++key) {
    for (int i = 0; i < n; ++i) c[key * row_stride + i] = 0;
    for (int query = keys.first_query; query < keys.last_query; ++query) {
      if (key < keys.low[query] || key >= keys.high[query]) continue;
      const T weight = weights[key * score_stride<T>() + query];
      for (int i = 0; i < n; ++i) {
        c[key * row_stride + i] += weight * rows[query * row_stride + i];
      }
    }
  }
}

}  // namespace
}  // namespace longspan
