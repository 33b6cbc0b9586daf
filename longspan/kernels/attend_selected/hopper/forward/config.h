#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace longspan::hopper {

/// What a launch of the forward kernel is told. Strides count elements.
struct ForwardParams {
  int64_t rows, queries, heads, slots;
  int32_t keys;
  float scale;  // times log2(e): everything inside is in powers of two
  const __nv_bfloat16* q;
  int64_t q_row, q_token, q_head;
  const __nv_bfloat16* kv;
  int64_t kv_row, kv_token;
  const int32_t* indices;
  int64_t indices_row, indices_token;
  const float* sink;  // [heads], natural; null: none
  __nv_bfloat16* out;
  int64_t out_row, out_token, out_head;
  float* lse;
  int64_t lse_row, lse_token, lse_head;
};

/// Tiles and shared memory of the forward kernel.
///
/// A block takes one query and 64 of its heads at a time, and its keys in tiles
/// of 64. The output, 64 x 512 floats, is half of a processor's registers: two
/// warpgroups hold half of the channels each (128 registers a thread), beside
/// 32 of scores and 16 of weights. A third warpgroup fetches keys.
///
/// Per tile: 2 * 64 * 64 * (kHeadDim + 512) FLOP are 2176 cycles of the tensor
/// cores at 576, and 72 KiB are fetched, which takes some 1900 cycles from L2.
template <int kHeadDim>
struct ForwardPlan {
  static constexpr int kHeads = 64, kKeys = 64, kValueDim = 512;
  static constexpr int kThreads = 384;
  static constexpr int kBlocks = kHeadDim / 64;  // of channels
  static constexpr int kLeftBlocks = 4;          // the rest is right
  static constexpr uint32_t kBlockBytes = 64 * 128;
  static constexpr uint32_t kTileBytes = kBlocks * kBlockBytes;

  // Queries; two tiles of keys; the weights of the even and of the odd tile.
  // Channels past the value are free once they were scored: the weights of the
  // even tile move in there.
  static constexpr uint32_t kQuery = 0;
  static constexpr uint32_t kKey0 = kTileBytes, kKey1 = 2 * kTileBytes;
  static constexpr uint32_t kWeights1 = 3 * kTileBytes;
  static constexpr uint32_t kWeights0 =
      kHeadDim > kValueDim ? kKey0 + 8 * kBlockBytes : kWeights1 + kBlockBytes;
  static constexpr uint32_t kSmall =
      kWeights1 + (kHeadDim > kValueDim ? 1 : 2) * kBlockBytes;
  static constexpr int kMarkedTiles = 512;  // whose emptiness is remembered

  struct Small {
    uint64_t query_ready, query_free;
    uint64_t key_ready[2][2], key_free[2][2];  // tile, half
    uint64_t there[2];                         // bit j: slot j holds a key
    float high[2][64];                         // of either warpgroup, a head
    float sum[2][2][64];  // likewise, of this query and the one before
    int tiles;            // of this query
    uint8_t live[2][kMarkedTiles];  // of this query and the next
  };
  static constexpr uint32_t kSharedBytes = kSmall + sizeof(Small);
  static_assert(kSharedBytes <= 232448);
};

/// Scores may exceed the subtracted maximum by so many powers of two before
/// sums are rescaled: float and bfloat16 keep their precision there.
constexpr float kSlack = 8.f;

template <int kHeadDim>
cudaError_t launch_forward(const ForwardParams& params, int processors,
                           cudaStream_t stream);

}  // namespace longspan::hopper
