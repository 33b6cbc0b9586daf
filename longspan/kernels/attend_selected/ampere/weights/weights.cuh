#pragma once

#include <cstdint>

#include "longspan/kernels/attend_selected/ampere/listed_keys.cuh"

namespace longspan::ampere {

/// A block of eight warps takes one query and the heads of one key head,
/// kHeads at a time, and keys in tiles, of which the next arrives while one is
/// scored. A warp holds 16 heads in registers, of their channels every so many
/// 16, and scores 32 keys; what the warps with the same heads and keys find is
/// added in shared memory. Whoever writes a slot adds the next heads to it.
template <int kHeads_, int kKeys_, int kMostChannels_>
struct WeightsPlan {
  static constexpr int kHeads = kHeads_, kKeys = kKeys_;
  static constexpr int kMostChannels = kMostChannels_;
  static constexpr int kThreads = 256, kWarps = 8;
  static constexpr int kRowTiles = kHeads / 16, kKeyParts = kKeys / 32;
  static constexpr int kSplits = kWarps / kRowTiles / kKeyParts;  // of channels
  static constexpr int kSteps = (kMostChannels / 16 + kSplits - 1) / kSplits;
  static constexpr int kSums = kThreads / kKeys;  // of a key
  static constexpr int kPitch = kKeys + 8;        // of scores
  static_assert(kHeads <= 2 * kKeys);  // they come where keys will be

  static size_t shared_bytes(int head_dim) {
    return size_t{2 * kKeys} * row_pitch(head_dim) * 2 +
           (kSplits * kHeads * kPitch + kThreads + kHeads) * sizeof(float) +
           TileWalk<kKeys>::kRing * sizeof(int32_t);
  }
};

template <class Plan, class Element>
struct Weigher {
  const SelectedWeightsArgs& args;
  const int pitch, steps;  // of 16 channels
  const int thread, lane, row_tile, key_part, split;
  Element* keys;  // of this tile and the next
  float *scores, *sums, *lse;
  int32_t* slots;
  uint32_t query[Plan::kSteps][4];

  __device__ Weigher(const SelectedWeightsArgs& args, void* memory)
      : args(args),
        pitch(row_pitch(args.head_dim)),
        steps(row_depth(args.head_dim) / 16),
        thread(static_cast<int>(threadIdx.x)),
        lane(thread % 32),
        row_tile(thread / 32 % Plan::kRowTiles),
        key_part(thread / 32 / Plan::kRowTiles % Plan::kKeyParts * 32),
        split(thread / 32 / Plan::kRowTiles / Plan::kKeyParts),
        keys(static_cast<Element*>(memory)) {
    scores = reinterpret_cast<float*>(keys + 2 * Plan::kKeys * pitch);
    sums = scores + Plan::kSplits * Plan::kHeads * Plan::kPitch;
    lse = sums + Plan::kThreads;
    slots = reinterpret_cast<int32_t*>(lse + Plan::kHeads);
  }

  /// The heads of `item` and those after it, as many as there are.
  __device__ void take_heads(const BlockItem& item, int heads) {
    constexpr float kLog2e = 1.4426950408889634f;
    fetch_heads<Plan::kThreads, Plan::kHeads>(keys, args.head_dim, args.q, item,
                                              heads);
    copies_commit();
    if (thread < Plan::kHeads) {
      float log = INFINITY;
      if (thread < heads) {
        log =
            item.of_query<const float>(args.lse)[thread * args.lse.head_stride];
      }
      lse[thread] = isinf(log) ? INFINITY : log * kLog2e;
    }
    copies_wait<0>();
    __syncthreads();
    const Element* from =
        keys + (row_tile * 16 + lane % 16) * pitch + lane / 16 * 8;
#pragma unroll
    for (int i = 0; i < Plan::kSteps; ++i) {
      const int step = i * Plan::kSplits + split;
      if (step < steps) load_tiles(query[i], from + step * 16);
    }
    __syncthreads();
  }

  /// A warp's part of the scores of a tile.
  __device__ void score(const Element* tile) const {
    float score[4][4] = {};
    const Element* from =
        tile + (key_part + lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 8;
#pragma unroll
    for (int i = 0; i < Plan::kSteps; ++i) {
      const int step = i * Plan::kSplits + split;
      if (step >= steps) break;
      uint32_t b[2][4];
      load_tiles(b[0], from + step * 16);
      load_tiles(b[1], from + 16 * pitch + step * 16);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        multiply<Element>(score[n], query[i], b[n / 2][n % 2 * 2],
                          b[n / 2][n % 2 * 2 + 1]);
      }
    }
    const int row = split * Plan::kHeads + row_tile * 16 + lane / 4;
    float* to = scores + row * Plan::kPitch + key_part + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        *reinterpret_cast<float2*>(to + 8 * half * Plan::kPitch + 8 * n) =
            make_float2(score[n][2 * half], score[n][2 * half + 1]);
      }
    }
  }

  /// Weights of a key, summed over some of the heads.
  __device__ void weigh(const int32_t* tile, float log2_scale) const {
    const int key = thread % Plan::kKeys;
    const bool there = tile[key] >= 0;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < Plan::kHeads; i += Plan::kSums) {
      const int head = i + thread / Plan::kKeys;
      float score = 0.f;
#pragma unroll
      for (int s = 0; s < Plan::kSplits; ++s) {
        score += scores[(s * Plan::kHeads + head) * Plan::kPitch + key];
      }
      const float log = lse[head];
      if (there && log != INFINITY) {
        sum += exp2_fast(fmaf(score, log2_scale, -log));
      }
    }
    sums[thread] = sum;
  }
};

template <class Plan, class Element>
__global__ void __launch_bounds__(Plan::kThreads, 2)
    weights_kernel(const __grid_constant__ SelectedWeightsArgs args) {
  extern __shared__ __align__(16) uint8_t memory[];
  constexpr float kLog2e = 1.4426950408889634f;
  const int group = static_cast<int>(args.heads / args.key_heads);
  BlockItem item(args, group);
  Weigher<Plan, Element> block(args, memory);
  const auto* kv = item.of_keys<const Element>(args.kv);
  const float log2_scale = static_cast<float>(args.scale) * kLog2e;
  const int thread = block.thread, tile_size = Plan::kKeys * block.pitch;
  float* weights = item.of_keys<float>(args.weights) +
                   item.query * args.weights.token_stride;
  for (int64_t j = thread; j < args.slots; j += Plan::kThreads) weights[j] = 0;

  for (int first = 0; first < group; first += Plan::kHeads) {
    __syncthreads();  // nobody needs the former keys
    block.take_heads(item, group - first);
    item.head += Plan::kHeads;
    TileWalk<Plan::kKeys> walk(item.list(args), args, block.slots);
    const auto fetch = [&](const int32_t* tile, int which) {
      fetch_keys<Plan::kThreads, Plan::kKeys>(block.keys + which * tile_size,
                                              args, kv, tile);
    };
    const int32_t* tile = walk.next();
    if (tile != nullptr) fetch(tile, 0);
    copies_commit();
    for (int which = 0; tile != nullptr; which ^= 1) {
      const int64_t at = walk.from - Plan::kKeys;
      const int32_t* const upcoming = walk.next();
      if (upcoming != nullptr) fetch(upcoming, which ^ 1);
      copies_commit();
      copies_wait<1>();
      __syncthreads();
      block.score(block.keys + which * tile_size);
      __syncthreads();
      block.weigh(tile, log2_scale);
      __syncthreads();
      if (thread < Plan::kKeys && at + thread < args.slots) {
        float sum = weights[at + thread];
#pragma unroll
        for (int i = 0; i < Plan::kSums; ++i) {
          sum += block.sums[i * Plan::kKeys + thread];
        }
        weights[at + thread] = sum;
      }
      tile = upcoming;
    }
    copies_wait<0>();
  }
}

}  // namespace longspan::ampere
