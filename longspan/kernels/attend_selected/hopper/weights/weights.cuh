#pragma once

#include "longspan/kernels/attend_selected/attend_selected.h"
#include "longspan/kernels/attend_selected/hopper/key_tiles.cuh"
#include "longspan/kernels/attend_selected/hopper/weights/config.h"
#include "longspan/kernels/common/hopper/fragment.cuh"
#include "longspan/kernels/common/hopper/wgmma.cuh"

namespace longspan::hopper {

// ---- Load ----------------------------------------------------------------

/// Starts to copy 64 rows of `kBlocks` blocks of channels, 128 bytes of a row
/// by eight lanes; `row_at(row)` is where a row starts, null for zeros; `any`
/// may be read.
template <int kBlocks, int kThreads, class RowAt>
__device__ __forceinline__ void copy_rows(uint32_t to, const __nv_bfloat16* any,
                                          int thread, const RowAt& row_at) {
  const int piece = thread % 8;
#pragma unroll
  for (int r = 0; r < 64 / (kThreads / 8); ++r) {
    const int row = r * (kThreads / 8) + thread / 8;
    const __nv_bfloat16* from = row_at(row);
    const bool there = from != nullptr;
    if (!there) from = any;
#pragma unroll
    for (int c = 0; c < kBlocks; ++c) {
      copy_16(to + c * 8192 + piece_place(row, piece),
              there ? from + piece * 8 + c * 64 : from, there);
    }
  }
}

/// A list as one warpgroup sees it: every other tile.
struct EveryOtherTile {
  const int32_t* list;
  int slots, keys, lane;
  int at;  // the tile that `ahead` holds
  KeyTile ahead;

  __device__ EveryOtherTile(const int32_t* list, int slots, int keys, int first,
                            int lane)
      : list(list), slots(slots), keys(keys), lane(lane), at(first) {
    load();
  }
  __device__ void load() {
    ahead = KeyTile{};
    ahead.keys = keys;
    const int64_t slot = at * 64ll + lane;
    if (slot < slots) ahead.slot[0] = __ldg(list + slot);
    if (slot + 32 < slots) ahead.slot[1] = __ldg(list + slot + 32);
  }
  __device__ bool ends() const { return at * 64ll >= slots; }
};

// ---- Sum -----------------------------------------------------------------

/// Lanes that are 2 kCount apart give each other half of their columns.
template <int kCount>
__device__ __forceinline__ void halve_columns(float (&x)[16], int lane) {
  const bool upper = lane & (2 * kCount);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float mine = upper ? x[i + kCount] : x[i];
    const float others = upper ? x[i] : x[i + kCount];
    x[i] = mine + __shfl_xor_sync(~0u, others, 2 * kCount);
  }
}

/// Sums over the 16 heads of a warp, in one order. Lane l is left with columns
/// 2 l and 2 l + 1.
__device__ __forceinline__ float2 sum_heads(const float (&weight)[32],
                                            int lane) {
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int at = i / 2 * 4 + i % 2;
    x[i] = weight[at] + weight[at + 2];
  }
  halve_columns<8>(x, lane);
  halve_columns<4>(x, lane);
  halve_columns<2>(x, lane);
  return make_float2(x[0], x[1]);
}

// ---- A warpgroup's tiles -------------------------------------------------

/// The heads from `head` on, added to what `weights` holds unless they are the
/// first.
template <class Plan>
__device__ void weigh_heads(const SelectedWeightsArgs& args,
                            typename Plan::Small& small, uint32_t base,
                            int64_t row, int64_t query, int64_t head,
                            float* weights) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const int which = threadIdx.x / 128;
  const int meeting = 1 + which;
  constexpr float kLog2e = 1.4426950408889634f;
  const auto* kv = static_cast<const __nv_bfloat16*>(args.kv.data) +
                   row * args.kv.row_stride;
  const auto* logs = static_cast<const float*>(args.lse.data) +
                     row * args.lse.row_stride + query * args.lse.token_stride;
  float lse[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t at = head + 16 * warp + lane / 4 + 8 * i;
    lse[i] = at < args.heads ? logs[at * args.lse.head_stride] : INFINITY;
    lse[i] = isinf(lse[i]) ? INFINITY : lse[i] * kLog2e;
  }
  const float log2_scale = static_cast<float>(args.scale) * kLog2e;
  const uint32_t to = Plan::kKeys + which * Plan::kTileBytes;
  EveryOtherTile tiles(args.indices.data + row * args.indices.row_stride +
                           query * args.indices.token_stride,
                       static_cast<int>(args.slots),
                       static_cast<int>(args.keys), which, lane);
  // Fetches the next tile that holds any key, and leaves 0 in those before it.
  const auto fetch = [&](KeyTile& tile, int& place) {
    while (!tiles.ends()) {
      tile = tiles.ahead;
      place = tiles.at;
      tiles.at += 2;
      tiles.load();
      tile.look();
      if (tile.there != 0) {
        copy_rows<Plan::kBlocks, 128>(base + to, kv, thread, [&](int r) {
          const int32_t key = tile.key_of(r);
          return key >= 0 ? kv + key * args.kv.token_stride : nullptr;
        });
        copies_commit();
        return true;
      }
      if (head == 0 && thread < 64 && place * 64 + thread < args.slots) {
        weights[place * 64 + thread] = 0.f;
      }
    }
    return false;
  };
  KeyTile tile;
  int place = 0;
  bool more = fetch(tile, place);
  while (more) {
    copies_wait<0>();
    fence_for_wgmma();
    meet(meeting, 128);
    float score[32];
    wgmma_fence();
    const uint64_t q = along_channels(kSharedBase + Plan::kQuery);
    const uint64_t k = along_channels(kSharedBase + to);
#pragma unroll
    for (int i = 0; i < Plan::kBlocks * 4; ++i) {
      const uint64_t step = (i / 4 * Plan::kBlockBytes + i % 4 * 32) >> 4;
      wgmma<0, 0>(score, q + step, k + step, i == 0 ? 0 : 1);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(score);
    meet(meeting, 128);  // nobody reads these keys any more
    const uint64_t there = tile.there >> (2 * (lane & 3));
    const int slot = place * 64 + thread;
    more = fetch(tile, place);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const float log = lse[i / 2 & 1];
      const float weight = exp2_fast(fmaf(score[i], log2_scale, -log));
      const bool counts =
          (there >> (8 * (i / 4) + (i & 1)) & 1) != 0 && log != INFINITY;
      score[i] = counts ? weight : 0.f;
    }
    *reinterpret_cast<float2*>(small.sum[which][warp] + 2 * lane) =
        sum_heads(score, lane);
    meet(meeting, 128);
    if (thread < 64 && slot < args.slots) {
      float all = head == 0 ? 0.f : weights[slot];
#pragma unroll
      for (int w = 0; w < 4; ++w) all += small.sum[which][w][thread];
      weights[slot] = all;
    }
  }
}

template <int kHeadDim>
__global__ void __launch_bounds__(WeightsPlan<kHeadDim>::kThreads, 1)
    weights_kernel(const __grid_constant__ SelectedWeightsArgs args) {
  using Plan = WeightsPlan<kHeadDim>;
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& small = *reinterpret_cast<typename Plan::Small*>(memory + Plan::kSmall);
  const uint32_t base = shared_address(memory);
  check_shared_base(base);
  // Later queries have longer lists and go first.
  const int64_t row = blockIdx.x % args.rows;
  const int64_t query = args.queries - 1 - blockIdx.x / args.rows;
  float* weights = static_cast<float*>(args.weights.data) +
                   row * args.weights.row_stride +
                   query * args.weights.token_stride;
  for (int64_t head = 0; head < args.heads; head += 64) {
    if (head > 0) __syncthreads();  // nobody needs the former heads
    const auto* q = static_cast<const __nv_bfloat16*>(args.q.data) +
                    row * args.q.row_stride + query * args.q.token_stride +
                    head * args.q.head_stride;
    copy_rows<Plan::kBlocks, Plan::kThreads>(
        base + Plan::kQuery, q, static_cast<int>(threadIdx.x), [&](int r) {
          return head + r < args.heads ? q + r * args.q.head_stride : nullptr;
        });
    copies_commit();
    copies_wait<0>();
    fence_for_wgmma();
    __syncthreads();
    weigh_heads<Plan>(args, small, base, row, query, head, weights);
  }
}

}  // namespace longspan::hopper
