#pragma once

#include <algorithm>
#include <cstdint>

#include "longspan/kernels/select_keys/ampere/key_scores.cuh"
#include "longspan/kernels/select_keys/select_keys.h"

namespace longspan::ampere {

/// Queries [first, first + chunk) of a row, whose scores go to scratch.
struct ScoreChunk {
  SelectKeysArgs args;
  int64_t row;
  int first, chunk;
  int group;       // queries of a block
  int parts;       // blocks that share a group's keys
  float* scratch;  // [chunk, stride]
  int64_t stride;  // a multiple of the keys of a tile
};

/// A block takes some queries, 64 or 128 heads in all, and keys in tiles of 64
/// or 128. Each of four warps holds its keys of a tile in registers and goes
/// over queries and heads, while the next tile is fetched to where they came
/// from.
template <class Element, int kDepth>
struct SelectPlan {
  static constexpr int kThreads = 128;
  static constexpr int kKeys = 4 * ScoredKeys<Element, kDepth>::kKeys;
  static constexpr int kTile = kKeys * kPitch<kDepth>;
  static constexpr int kColumns = kDepth <= 128 ? 128 : 64;

  static int group(int64_t heads) {
    return std::max(1, kColumns / std::max(16, padded_heads(heads)));
  }
  static size_t shared_bytes(int64_t heads) {
    return sizeof(Element) * kTile +
           group(heads) * padded_heads(heads) *
               (sizeof(float) + sizeof(Element) * kPitch<kDepth>);
  }
};

/// The keys that any query of a group may choose from, where scores decide.
__device__ inline void widest_window(const ScoreChunk& chunk, int from,
                                     int count, int& first, int& end) {
  const SelectKeysArgs& args = chunk.args;
  const auto keys = static_cast<int>(args.keys);
  first = keys, end = 0;
  for (int i = 0; i < count; ++i) {
    int low = 0, high = keys;
    if (args.start.data != nullptr) {
      const int64_t query = chunk.first + from + i;
      low = max(0, args.start.data[chunk.row * args.start.row_stride +
                                   query * args.start.token_stride]);
      high = min(keys, args.end.data[chunk.row * args.end.row_stride +
                                     query * args.end.token_stride]);
    }
    const int64_t size = int64_t{high} - low;
    if (size <= (args.scores.data != nullptr ? 0 : args.slots)) continue;
    first = min(first, low);
    end = max(end, high);
  }
}

template <class Element, int kDepth>
__global__ void __launch_bounds__(128)
    select_scores_kernel(const __grid_constant__ ScoreChunk chunk) {
  using Plan = SelectPlan<Element, kDepth>;
  constexpr int kThreads = Plan::kThreads, kKeys = Plan::kKeys;
  extern __shared__ __align__(16) uint8_t memory[];
  const SelectKeysArgs& args = chunk.args;
  const int heads = static_cast<int>(args.heads), padded = padded_heads(heads);
  auto* held = reinterpret_cast<Element*>(memory);
  Element* queries = held + Plan::kTile;
  auto* weights =
      reinterpret_cast<float*>(queries + chunk.group * padded * kPitch<kDepth>);
  const int thread = threadIdx.x, warp = thread / 32;
  const int from = static_cast<int>(blockIdx.x) / chunk.parts * chunk.group;
  const int part = static_cast<int>(blockIdx.x) % chunk.parts;
  const int count = min(chunk.group, chunk.chunk - from);

  int first, end;
  widest_window(chunk, from, count, first, end);
  if (first >= end) return;
  const int64_t lowest = first / kKeys, all = (end - 1) / kKeys + 1 - lowest;
  int tile = static_cast<int>(lowest + all * part / chunk.parts);
  const int last = static_cast<int>(lowest + all * (part + 1) / chunk.parts);
  if (tile >= last) return;

  const RowCopies<kThreads, kDepth, Element> rows(
      static_cast<const Element*>(args.k.data) + chunk.row * args.k.row_stride,
      args.k.token_stride, args.head_dim);
  const auto keys = static_cast<int>(args.keys);
  const auto fetch = [&](int tile) {
    rows.template tile<kKeys>(held, [&](int i) {
      const int key = tile * kKeys + i;
      return key < keys ? key : -1;
    });
    copies_commit();
  };
  for (int i = 0; i < count; ++i) {
    const int64_t query = chunk.first + from + i;
    copy_heads<kThreads, kDepth>(
        queries + i * padded * kPitch<kDepth>, weights + i * padded,
        static_cast<const Element*>(args.q.data) +
            chunk.row * args.q.row_stride + query * args.q.token_stride,
        args.q.head_stride,
        static_cast<const float*>(args.weights.data) +
            chunk.row * args.weights.row_stride +
            query * args.weights.token_stride,
        args.weights.head_stride, heads, args.head_dim);
  }
  fetch(tile);
  for (; tile < last; ++tile) {
    copies_wait<0>();
    __syncthreads();
    ScoredKeys<Element, kDepth> some{thread % 32};
    some.load(held + warp * some.kKeys * kPitch<kDepth>);
    __syncthreads();
    if (tile + 1 < last) fetch(tile + 1);
    float* to = chunk.scratch + from * chunk.stride + int64_t{tile} * kKeys +
                warp * some.kKeys + some.own();
    for (int i = 0; i < count; ++i) {
      const float score = some.score(queries + i * padded * kPitch<kDepth>,
                                     weights + i * padded, heads);
      if (some.answers()) to[i * chunk.stride] = score;
    }
  }
}

}  // namespace longspan::ampere
