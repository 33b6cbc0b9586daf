#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace longspan::hopper {

/// Tiles and shared memory of the weights kernel.
///
/// A block takes one query, 64 of its heads after the other, and its keys in
/// tiles of 64: even tiles are those of the first warpgroup, odd ones of the
/// second, and each fetches, scores and sums its own. One fetches while the
/// other is at work. Heads in registers, which leave room for a third tile,
/// were slower: 1.62 ms against 1.41 for 4096 queries with 64 heads and 2048
/// slots.
///
/// Per tile: 2 * 64 * 64 * kHeadDim FLOP are 1152 cycles of the tensor cores at
/// 576, and 72 KiB are fetched, which takes some 1900 cycles from L2.
template <int kHeadDim>
struct WeightsPlan {
  static constexpr int kThreads = 256;
  static constexpr int kBlocks = kHeadDim / 64;  // of channels
  static constexpr uint32_t kBlockBytes = 64 * 128;
  static constexpr uint32_t kTileBytes = kBlocks * kBlockBytes;

  static constexpr uint32_t kQuery = 0;
  static constexpr uint32_t kKeys = kTileBytes;  // of either warpgroup
  static constexpr uint32_t kSmall = 3 * kTileBytes;

  struct Small {
    float sum[2][4][64];  // of a warpgroup's warps, for a tile
  };
  static constexpr uint32_t kSharedBytes = kSmall + sizeof(Small);
  static_assert(kSharedBytes <= 232448);
};

}  // namespace longspan::hopper
