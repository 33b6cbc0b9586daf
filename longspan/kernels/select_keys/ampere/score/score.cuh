#pragma once

#include <cstdint>

#include "longspan/kernels/select_keys/ampere/key_scores.cuh"
#include "longspan/kernels/select_keys/ampere/listed_tiles.cuh"
#include "longspan/kernels/select_keys/select_keys.h"

namespace longspan::ampere {

/// A block takes one query with all its heads, and its keys in tiles of 64 or
/// 128. Each of four warps holds its keys of a tile in registers and goes over
/// the heads, while the next tile is fetched to where they came from.
///
/// Per key of 128 channels and 32 heads: 8 KFLOP are 3 or 4 cycles, 768 bytes
/// written to and read from shared memory 6. The 256 bytes that come from L2
/// take 7 or 8, and are the bound.
template <class Element, int kDepth>
struct ScorePlan {
  static constexpr int kThreads = 128;
  static constexpr int kKeys = 4 * ScoredKeys<Element, kDepth>::kKeys;
  static constexpr int kTile = kKeys * kPitch<kDepth>;

  struct Small {
    int32_t key[3][kKeys];  // of this tile and the next two
    uint8_t live[kMarkedTiles];
  };
  static size_t shared_bytes(int64_t heads) {
    return sizeof(Small) + sizeof(Element) * kTile +
           padded_heads(heads) *
               (sizeof(float) + sizeof(Element) * kPitch<kDepth>);
  }
};

template <class Element, int kDepth>
__global__ void __launch_bounds__(128)
    score_selected_kernel(const __grid_constant__ ScoreSelectedArgs args) {
  using Plan = ScorePlan<Element, kDepth>;
  constexpr int kThreads = Plan::kThreads, kKeys = Plan::kKeys;
  extern __shared__ __align__(16) uint8_t memory[];
  auto* held = reinterpret_cast<Element*>(memory);
  Element* query = held + Plan::kTile;
  const int heads = static_cast<int>(args.heads);
  auto* weights =
      reinterpret_cast<float*>(query + padded_heads(heads) * kPitch<kDepth>);
  auto& small =
      *reinterpret_cast<typename Plan::Small*>(weights + padded_heads(heads));

  const int thread = threadIdx.x, warp = thread / 32;
  // Later queries have longer lists and go first.
  const int64_t row = blockIdx.x % args.rows;
  const int64_t token = args.queries - 1 - blockIdx.x / args.rows;
  copy_heads<kThreads, kDepth>(
      query, weights,
      static_cast<const Element*>(args.q.data) + row * args.q.row_stride +
          token * args.q.token_stride,
      args.q.head_stride,
      static_cast<const float*>(args.weights.data) +
          row * args.weights.row_stride + token * args.weights.token_stride,
      args.weights.head_stride, heads, args.head_dim);
  float* scores = static_cast<float*>(args.scores.data) +
                  row * args.scores.row_stride +
                  token * args.scores.token_stride;
  const auto slots = static_cast<int>(args.slots);
  const ListedTiles<kThreads, kKeys> list(
      args.indices.data + row * args.indices.row_stride +
          token * args.indices.token_stride,
      slots, static_cast<int>(args.keys), small.live, [&](int tile) {
        for (int i = thread % 32; i < kKeys; i += 32) {
          const int slot = tile * kKeys + i;
          if (slot < slots) scores[slot] = -INFINITY;
        }
      });
  __syncthreads();

  const RowCopies<kThreads, kDepth, Element> rows(
      static_cast<const Element*>(args.k.data) + row * args.k.row_stride,
      args.k.token_stride, args.head_dim);
  const auto list_keys = [&](int tile) {
    return thread < kKeys ? list.key_at(tile * kKeys + thread) : -1;
  };
  const auto fetch = [&](int turn) {
    const int32_t* key = small.key[turn % 3];
    rows.template tile<kKeys>(held, [&](int i) { return key[i]; });
    copies_commit();
  };
  int tile = list.after(-1);
  if (tile >= list.tiles) {  // a block without keys still waits
    copies_commit();
    copies_wait<0>();
    return;
  }
  int next = list.after(tile);
  if (thread < kKeys) {
    small.key[0][thread] = list_keys(tile);
    small.key[1][thread] = list_keys(next);
  }
  __syncthreads();
  fetch(0);
  for (int turn = 0; tile < list.tiles; ++turn) {
    copies_wait<0>();
    __syncthreads();
    const int later = list.after(next);
    const int32_t later_key = list_keys(later);
    ScoredKeys<Element, kDepth> keys{thread % 32};
    keys.load(held + warp * keys.kKeys * kPitch<kDepth>);
    __syncthreads();
    if (next < list.tiles) fetch(turn + 1);
    const float score = keys.score(query, weights, heads);
    const int place = warp * keys.kKeys + keys.own();
    const int slot = tile * kKeys + place;
    if (keys.answers() && slot < list.slots) {
      scores[slot] = small.key[turn % 3][place] >= 0 ? score : -INFINITY;
    }
    if (thread < kKeys) small.key[(turn + 2) % 3][thread] = later_key;
    tile = next;
    next = later;
  }
}

}  // namespace longspan::ampere
