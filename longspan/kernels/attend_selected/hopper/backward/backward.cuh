#pragma once

#include "longspan/kernels/attend_selected/hopper/backward/config.h"
#include "longspan/kernels/attend_selected/hopper/key_tiles.cuh"
#include "longspan/kernels/common/hopper/fragment.cuh"
#include "longspan/kernels/common/hopper/wgmma.cuh"

namespace longspan::hopper {

/// Barriers by number.
enum BackwardMeeting { kTileReady = 1, kTileFree, kKeyFree, kScorers };

/// The query and heads of a block. Later queries have longer lists and go
/// first.
struct BackwardItem {
  int64_t row, query, head;

  __device__ explicit BackwardItem(const BackwardParams& params) {
    const int64_t blocks = (params.heads + 63) / 64;
    int64_t item = blockIdx.x;
    head = item % blocks * 64;
    item /= blocks;
    row = item % params.rows;
    query = params.queries - 1 - item / params.rows;
  }
};

// ---- Load ----------------------------------------------------------------

/// 64 rows of `kBlocks` blocks of channels, by `threads` threads.
template <int kBlocks>
__device__ void fetch_heads(uint32_t to, const __nv_bfloat16* from,
                            int64_t stride, int64_t heads) {
  const int piece = threadIdx.x % 8;
  for (int row = threadIdx.x / 8; row < 64; row += blockDim.x / 8) {
    const bool there = row < heads;
    const __nv_bfloat16* line = from + (there ? row : 0) * stride + piece * 8;
#pragma unroll
    for (int c = 0; c < kBlocks; ++c) {
      copy_16(to + c * 8192 + piece_place(row, piece), line + c * 64, there);
    }
  }
}

template <class Plan>
__device__ void fetch_keys(uint32_t base, const KeyTile& tile,
                           const __nv_bfloat16* kv, int64_t stride) {
  const int piece = threadIdx.x % 8, group = threadIdx.x / 8;
  const uint32_t to = base + Plan::kKey + piece_place(group, piece);
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int32_t key = tile.key_of(r * 16 + group);
    const bool there = key >= 0;
    const __nv_bfloat16* from = kv + (there ? key : 0) * stride + piece * 8;
#pragma unroll
    for (int c = 0; c < Plan::kBlocks; ++c) {
      copy_16(to + c * Plan::kBlockBytes + r * 2048, from + c * 64, there);
    }
  }
}

// ---- The first warpgroup -------------------------------------------------

template <class Plan>
__device__ void make_scores(const BackwardParams& params,
                            typename Plan::Small& small, uint32_t base,
                            const BackwardItem& item, TileList& list) {
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  constexpr float kLog2e = 1.4426950408889634f;
  const __nv_bfloat16* kv = params.kv + item.row * params.kv_row;
  float lse[2], delta[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t head = item.head + 16 * warp + lane / 4 + 8 * i;
    lse[i] = INFINITY;
    delta[i] = 0.f;
    if (head >= params.heads) continue;
    lse[i] = params.lse[item.row * params.lse_row +
                        item.query * params.lse_token + head * params.lse_head];
    delta[i] =
        params
            .delta[item.row * params.delta_row +
                   item.query * params.delta_token + head * params.delta_head];
    // Where it is infinite, no gradient passes.
    lse[i] = isinf(lse[i]) ? INFINITY : lse[i] * kLog2e;
  }
  float dq[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) dq[i] = 0.f;
  const float log2_scale = params.scale * kLog2e;
  KeyTile next = list.next();
  for (int t = 0; t < list.count; ++t) {
    KeyTile tile = next;
    tile.look();
    if (warp == 0) {
      small.key[t & 1][lane] = tile.slot[0];
      small.key[t & 1][lane + 32] = tile.slot[1];
    }
    if (t > 0) meet(kKeyFree, 256);
    fetch_keys<Plan>(base, tile, kv, params.kv_token);
    copies_commit();
    next = list.next();
    copies_wait<0>();
    fence_for_wgmma();
    meet(kScorers, 128);

    float score[32], dscore[32];
    wgmma_fence();
    {
      const uint64_t q = along_channels(kSharedBase + Plan::kQuery);
      const uint64_t k = along_channels(kSharedBase + Plan::kKey);
      const uint64_t d = along_channels(kSharedBase + Plan::kDout);
#pragma unroll
      for (int i = 0; i < Plan::kBlocks * 4; ++i) {
        const uint64_t step = (i / 4 * Plan::kBlockBytes + i % 4 * 32) >> 4;
        wgmma<0, 0>(score, q + step, k + step, i == 0 ? 0 : 1);
      }
      wgmma_commit();
#pragma unroll
      for (int i = 0; i < Plan::kValueBlocks * 4; ++i) {
        const uint64_t step = (i / 4 * Plan::kBlockBytes + i % 4 * 32) >> 4;
        wgmma<0, 0>(dscore, d + step, k + step, i == 0 ? 0 : 1);
      }
      wgmma_commit();
    }
    wgmma_wait<1>();
    pin(score);
    const uint64_t there = tile.there >> (2 * (lane & 3));
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const float p = exp2_fast(fmaf(score[i], log2_scale, -lse[i / 2 & 1]));
      score[i] = there >> (8 * (i / 4) + (i & 1)) & 1 ? p : 0.f;
    }
    wgmma_wait<0>();
    pin(dscore);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      // A weight of 0 moves nothing, whatever lies there.
      dscore[i] = score[i] == 0.f ? 0.f
                                  : score[i] * (dscore[i] - delta[i / 2 & 1]) *
                                        params.scale;
    }
    uint32_t a[4][4];
#pragma unroll
    for (int k = 0; k < 4; ++k) pack_operand(a[k], score, k);
    if (t > 0) meet(kTileFree, 256);
    store_operand(base + Plan::kWeights, a, warp, lane);
#pragma unroll
    for (int k = 0; k < 4; ++k) pack_operand(a[k], dscore, k);
    store_operand(base + Plan::kDscores, a, warp, lane);
    fence_for_wgmma();
    announce(kTileReady, 256);
    {
      const uint64_t k =
          across_channels(kSharedBase + Plan::kKey, Plan::kBlockBytes);
      pin(dq);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) wgmma<1>(dq, a[i], k + (i * 2048 >> 4));
      wgmma_commit();
      wgmma_wait<0>();
      pin(dq);
    }
  }
  __nv_bfloat16* to[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t head = item.head + 16 * warp + lane / 4 + 8 * i;
    to[i] = head < params.heads
                ? params.dq + item.row * params.dq_row +
                      item.query * params.dq_token + head * params.dq_head
                : nullptr;
  }
  store_rows(dq, 1.f, 1.f, to[0], to[1], lane);
}

// ---- The second ----------------------------------------------------------

/// Adds a tile of 64 keys and 64 channels. Lanes swap values, first in pairs
/// and then between halves of the warp, so that eight of them add 128 bytes of
/// one key: lanes below 16 take channels [0, 16) of 32, the others [16, 32).
/// `row` is where a lane's four channels of key r, r + 4, r + 8 and r + 12 of
/// its warp start, null: no key there.
__device__ __forceinline__ void add_rows(const float (&d)[32],
                                         float* const (&row)[4], int offset,
                                         int lane) {
  const bool odd = lane & 1, upper = lane & 16;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int line = 0; line < 2; ++line) {
      float piece[2][4];
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        const float* low = d + 16 * line + 8 * p + 2 * i;
        const float* high = low + 4;
        const float x = __shfl_xor_sync(~0u, odd ? low[0] : high[0], 1);
        const float y = __shfl_xor_sync(~0u, odd ? low[1] : high[1], 1);
        piece[p][0] = odd ? x : low[0];
        piece[p][1] = odd ? y : low[1];
        piece[p][2] = odd ? high[0] : x;
        piece[p][3] = odd ? high[1] : y;
      }
      float other[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        other[k] = __shfl_xor_sync(~0u, upper ? piece[0][k] : piece[1][k], 16);
      }
      float near[4], far[4];  // of key r and of key r + 4
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        near[k] = upper ? other[k] : piece[0][k];
        far[k] = upper ? piece[1][k] : other[k];
      }
      const int at = offset + 32 * line;
      if (row[2 * i] != nullptr) {
        add_to(row[2 * i] + at, near[0], near[1], near[2], near[3]);
      }
      if (row[2 * i + 1] != nullptr) {
        add_to(row[2 * i + 1] + at, far[0], far[1], far[2], far[3]);
      }
    }
  }
}

template <class Plan>
__device__ void make_dkv(const BackwardParams& params,
                         const typename Plan::Small& small, uint32_t base,
                         const BackwardItem& item, int tiles) {
  constexpr bool kHasRest = Plan::kBlocks > Plan::kValueBlocks;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  float dq[128], rest[32];
#pragma unroll
  for (int i = 0; i < 128; ++i) dq[i] = 0.f;
#pragma unroll
  for (int i = 0; i < 32; ++i) rest[i] = 0.f;
  // Where a lane's four columns start: see add_rows.
  float* dkv = params.dkv + item.row * params.dkv_row + (lane & 16) +
               (lane & 1 ? 8 + 2 * ((lane & 3) - 1) : 2 * (lane & 3));
  const auto chunk = [&](float(&d)[32], int c) {
    const uint64_t p = across_channels(kSharedBase + Plan::kWeights, 0);
    const uint64_t s = across_channels(kSharedBase + Plan::kDscores, 0);
    const uint64_t q =
        across_channels(kSharedBase + Plan::kQuery + c * Plan::kBlockBytes, 0);
    const uint64_t o =
        across_channels(kSharedBase + Plan::kDout + c * Plan::kBlockBytes, 0);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint64_t step = k * 2048 >> 4;
      wgmma<1, 1>(d, s + step, q + step, k == 0 ? 0 : 1);
    }
    if (c < Plan::kValueBlocks) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint64_t step = k * 2048 >> 4;
        wgmma<1, 1>(d, p + step, o + step);
      }
    }
    wgmma_commit();
  };
  for (int t = 0; t < tiles; ++t) {
    meet(kTileReady, 256);
    float* row[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int32_t key = small.key[t & 1][16 * warp + lane / 4 % 4 + 4 * i];
      row[i] = key >= 0 ? dkv + key * params.dkv_token : nullptr;
    }
    {
      const uint64_t s = along_channels(kSharedBase + Plan::kDscores);
      const uint64_t k = across_channels(
          kSharedBase + Plan::kKey + 4 * Plan::kBlockBytes, Plan::kBlockBytes);
      pin(dq);
      pin(rest);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        wgmma<0, 1>(dq, s + (i * 32 >> 4), k + (i * 2048 >> 4));
      }
      if constexpr (kHasRest) {
        const uint64_t step = 4 * Plan::kBlockBytes >> 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          wgmma<0, 1>(rest, s + (i * 32 >> 4), k + step + (i * 2048 >> 4));
        }
      }
      wgmma_commit();
    }
    float even[32], odd[32];
    chunk(even, 0);
    wgmma_wait<1>();
    pin(dq);
    pin(rest);
    if (t + 1 < tiles) announce(kKeyFree, 256);
#pragma unroll
    for (int c = 0; c < Plan::kBlocks; ++c) {
      const bool last = c + 1 == Plan::kBlocks;
      if (!last) chunk(c & 1 ? even : odd, c + 1);
      if (last) {
        wgmma_wait<0>();
        if (t + 1 < tiles) announce(kTileFree, 256);
      } else {
        wgmma_wait<1>();
      }
      if (c & 1) {
        pin(odd);
        add_rows(odd, row, 64 * c, lane);
      } else {
        pin(even);
        add_rows(even, row, 64 * c, lane);
      }
    }
  }
  __nv_bfloat16* to[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t head = item.head + 16 * warp + lane / 4 + 8 * i;
    to[i] = head < params.heads
                ? params.dq + item.row * params.dq_row +
                      item.query * params.dq_token + head * params.dq_head + 256
                : nullptr;
  }
  store_rows(dq, 1.f, 1.f, to[0], to[1], lane);
  if constexpr (kHasRest) {
    if (to[0] != nullptr) to[0] += 256;
    if (to[1] != nullptr) to[1] += 256;
    store_rows(rest, 1.f, 1.f, to[0], to[1], lane);
  }
}

template <int kHeadDim>
__global__ void __launch_bounds__(BackwardPlan<kHeadDim>::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams params) {
  using Plan = BackwardPlan<kHeadDim>;
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& small = *reinterpret_cast<typename Plan::Small*>(memory + Plan::kSmall);
  const uint32_t base = shared_address(memory);
  check_shared_base(base);
  const BackwardItem item(params);
  const int64_t heads = params.heads - item.head;
  fetch_heads<Plan::kBlocks>(base + Plan::kQuery,
                             params.q + item.row * params.q_row +
                                 item.query * params.q_token +
                                 item.head * params.q_head,
                             params.q_head, heads);
  fetch_heads<Plan::kValueBlocks>(base + Plan::kDout,
                                  params.dout + item.row * params.dout_row +
                                      item.query * params.dout_token +
                                      item.head * params.dout_head,
                                  params.dout_head, heads);
  copies_commit();
  if (threadIdx.x < 128) {
    TileList list(params.indices + item.row * params.indices_row +
                      item.query * params.indices_token,
                  static_cast<int>(params.slots), params.keys, small.live,
                  Plan::kMarkedTiles, static_cast<int>(threadIdx.x), kScorers);
    if (threadIdx.x == 0) small.tiles = list.count;
    copies_wait<0>();
    fence_for_wgmma();
    __syncthreads();
    make_scores<Plan>(params, small, base, item, list);
  } else {
    copies_wait<0>();
    fence_for_wgmma();
    __syncthreads();
    make_dkv<Plan>(params, small, base, item, small.tiles);
  }
}

template <int kHeadDim>
cudaError_t launch_backward(const BackwardParams& params, cudaStream_t stream) {
  using Plan = BackwardPlan<kHeadDim>;
  const cudaError_t error = cudaFuncSetAttribute(
      backward_kernel<kHeadDim>, cudaFuncAttributeMaxDynamicSharedMemorySize,
      Plan::kSharedBytes);
  if (error != cudaSuccess) return error;
  const auto blocks = static_cast<unsigned>(params.rows * params.queries *
                                            ((params.heads + 63) / 64));
  backward_kernel<kHeadDim>
      <<<blocks, Plan::kThreads, Plan::kSharedBytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace longspan::hopper
