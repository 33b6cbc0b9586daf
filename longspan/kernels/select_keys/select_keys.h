#pragma once

#include <cstdint>

#include "longspan/kernels/common/element.h"
#include "longspan/kernels/common/parallel.h"

namespace longspan {

/// The lightning indexer: score[t, s] = sum_h w[t, h] * max(0, q[t, h] . k[s]),
/// NaN where a term is NaN, and never -0. Products and sums are in the
/// accumulation type, one order for every pair: a score has the same bits
/// wherever its query and key lie in a call.
struct KeyScoreArgs {
  ElementType type = ElementType::float32;  // of q and k
  int64_t rows = 0, queries = 0, keys = 0;
  int64_t heads = 0;
  int head_dim = 0;                 // 1 to 576
  TokenArray<const void*> q;        // [rows, queries, heads, head_dim]
  TokenArray<const void*> k;        // [rows, keys, head_dim], head_stride 0
  TokenArray<const void*> weights;  // [rows, queries, heads], accumulation type
  int64_t slots = 0;
};

/// The best keys of each query (top-k) in its window [start, end), which is cut
/// to [0, keys). Greater scores win, NaN above all; of equal scores the lower
/// key wins. The chosen keys are listed in ascending order, and -1 fills the
/// tail.
struct SelectKeysArgs : KeyScoreArgs {
  TokenArray<const int32_t*> start, end;  // [rows, queries]
  TokenArray<int32_t*> indices;  // [rows, queries, slots], head_stride 0
  TokenArray<void*> scores;  // likewise, accumulation type; null: not wanted.
                             // -inf for an empty slot
};

/// The scores of given keys, differentiable. A slot outside [0, keys) is empty:
/// score -inf, no derivative, never used as an address.
struct ScoreSelectedArgs : KeyScoreArgs {
  TokenArray<const int32_t*> indices;  // [rows, queries, slots], head_stride 0
  TokenArray<void*> scores;            // likewise, accumulation type
};

struct ScoreSelectedBackwardArgs : KeyScoreArgs {
  TokenArray<const int32_t*> indices;  // [rows, queries, slots], head_stride 0
  TokenArray<const void*> dscores;     // likewise, accumulation type
  TokenArray<void*> dq;                // like q, written; on the CPU in the
                                       // accumulation type, on CUDA of `type`
  TokenArray<void*> dk;                // like k, accumulation type, added to
  TokenArray<void*> dweights;          // like weights, written
};

/// The selection alone, on given scores, by the same order.
struct TopKeysArgs {
  ElementType type = ElementType::float32;  // or float64
  int64_t queries = 0, keys = 0, slots = 0;
  const void* scores = nullptr;  // [queries, keys], rows `stride` apart
  int64_t stride = 0;
  const int32_t* start = nullptr;  // [queries], both null: all keys
  const int32_t* end = nullptr;
  int32_t* indices = nullptr;  // [queries, slots], contiguous
};

/// One implementation. Any number of threads gives the same bits. However many
/// queries and keys there are, a thread's scratch is at most 4 MiB, or what one
/// query takes where that is more: 24 bytes a slot, 16 bytes for each channel
/// of each head.
struct KeySelectionKernels {
  void (*select)(const SelectKeysArgs& args,
                 const ParallelFor& parallel_for) = nullptr;
  void (*score)(const ScoreSelectedArgs& args,
                const ParallelFor& parallel_for) = nullptr;
  void (*score_backward)(const ScoreSelectedBackwardArgs& args,
                         const ParallelFor& parallel_for) = nullptr;
  void (*top_keys)(const TopKeysArgs& args,
                   const ParallelFor& parallel_for) = nullptr;
};

}  // namespace longspan
