#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace longspan::hopper {

/// What a launch of the backward kernel is told. Strides count elements.
struct BackwardParams {
  int64_t rows, queries, heads, slots;
  int32_t keys;
  float scale;
  const __nv_bfloat16* q;
  int64_t q_row, q_token, q_head;
  const __nv_bfloat16* kv;
  int64_t kv_row, kv_token;
  const int32_t* indices;
  int64_t indices_row, indices_token;
  const __nv_bfloat16* dout;
  int64_t dout_row, dout_token, dout_head;
  const float* lse;  // natural
  int64_t lse_row, lse_token, lse_head;
  const float* delta;
  int64_t delta_row, delta_token, delta_head;
  __nv_bfloat16* dq;
  int64_t dq_row, dq_token, dq_head;
  float* dkv;
  int64_t dkv_row, dkv_token;
};

/// Tiles and shared memory of the backward kernel.
///
/// A block takes one query and 64 of its heads, and its keys in tiles of 64.
/// The first warpgroup fetches keys, scores them, finds the derivatives of the
/// scores and holds dq's channels [0, 256); the second holds the others and
/// makes the derivative of the keys, 64 channels at a time, which it adds to
/// device memory while the next 64 are computed.
///
/// Per tile: 2 * 64 * 64 * (3 * kHeadDim + 2 * 512) FLOP are 5504 cycles of the
/// tensor cores at 576. The 147456 bytes that are added take 9100 to 10900
/// cycles in L2, and are the bound.
template <int kHeadDim>
struct BackwardPlan {
  static constexpr int kThreads = 256;
  static constexpr int kValueDim = 512;
  static constexpr int kBlocks = kHeadDim / 64;  // of channels
  static constexpr int kValueBlocks = kValueDim / 64;
  static constexpr uint32_t kBlockBytes = 64 * 128;

  static constexpr uint32_t kQuery = 0;
  static constexpr uint32_t kDout = kBlocks * kBlockBytes;
  static constexpr uint32_t kKey = kDout + kValueBlocks * kBlockBytes;
  static constexpr uint32_t kWeights = kKey + kBlocks * kBlockBytes;
  static constexpr uint32_t kDscores = kWeights + kBlockBytes;
  static constexpr uint32_t kSmall = kDscores + kBlockBytes;
  static constexpr int kMarkedTiles = 512;  // whose emptiness is remembered

  struct Small {
    int32_t key[2][64];  // in the slots of this tile and the next, -1: none
    int tiles;
    uint8_t live[kMarkedTiles];
  };
  static constexpr uint32_t kSharedBytes = kSmall + sizeof(Small);
  static_assert(kSharedBytes <= 232448);
};

template <int kHeadDim>
cudaError_t launch_backward(const BackwardParams& params, cudaStream_t stream);

}  // namespace longspan::hopper
