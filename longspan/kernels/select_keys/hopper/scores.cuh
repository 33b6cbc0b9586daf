#pragma once

#include "longspan/kernels/common/ampere/launch_after.cuh"
#include "longspan/kernels/common/hopper/fragment.cuh"
#include "longspan/kernels/common/hopper/wgmma.cuh"
#include "longspan/kernels/select_keys/hopper/config.h"
#include "longspan/kernels/top_keys/ampere/window.cuh"

namespace longspan::hopper {

// ---- Which tiles ---------------------------------------------------------

/// A unit of work is a group of queries and a tile of keys that some window of
/// the group touches. Units of a chunk are numbered group by group.
template <class Plan>
__device__ void count_units(const SelectParams& params,
                            typename Plan::Small& small, int groups) {
  for (int group = threadIdx.x; group < groups; group += blockDim.x) {
    int first = params.keys, end = 0;
    for (int i = 0; i < Plan::kQueries; ++i) {
      const int query = group * Plan::kQueries + i;
      if (query >= params.chunk) break;
      const Window window(params, params.first + query);
      if (!window.matters(params)) continue;
      first = min(first, window.first);
      end = max(end, window.end);
    }
    const int tile = first / Plan::kKeys;
    small.first_tile[group] = tile;
    small.units_before[group + 1] =
        first < end ? (end + Plan::kKeys - 1) / Plan::kKeys - tile : 0;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    int before = 0;
    for (int from = 0; from < groups; from += 32) {
      const int group = from + lane;
      int sum = group < groups ? small.units_before[group + 1] : 0;
      for (int step = 1; step < 32; step *= 2) {
        const int lower = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += lower;
      }
      if (group < groups) small.units_before[group + 1] = before + sum;
      before += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0) small.units_before[0] = 0;
  }
  __syncthreads();
}

/// The units of this block, which are neighbours: for each group it touches,
/// `tiles` tiles from `tile` on.
template <class Plan>
struct Runs {
  const typename Plan::Small& small;
  int unit, end, group, tile, tiles;

  __device__ Runs(const typename Plan::Small& small, int groups)
      : small(small) {
    const int64_t all = small.units_before[groups];
    unit = static_cast<int>(all * blockIdx.x / gridDim.x);
    end = static_cast<int>(all * (blockIdx.x + 1) / gridDim.x);
    int low = 0, high = groups;  // units_before[low] <= unit < [high]
    while (low + 1 < high) {
      const int middle = (low + high) / 2;
      (small.units_before[middle] <= unit ? low : high) = middle;
    }
    group = low;
    settle();
  }
  __device__ bool more() const { return unit < end; }
  __device__ void advance() {
    unit += tiles;
    settle();
  }

 private:
  __device__ void settle() {
    if (!more()) return;
    while (small.units_before[group + 1] <= unit) ++group;
    tile = small.first_tile[group] + unit - small.units_before[group];
    tiles = min(small.units_before[group + 1], end) - unit;
  }
};

// ---- Load ----------------------------------------------------------------

/// 128 threads bring queries and keys, 16 rows of 128 bytes at a time. Two
/// neighbours among keys become rows 8 apart: the same thread gets their sums.
template <int kHeads, class Plan>
__device__ void fetch(const SelectParams& params, typename Plan::Small& small,
                      uint32_t base, int groups) {
  const int piece = threadIdx.x % 8, line = threadIdx.x % 128 / 8;
  const uint32_t place = piece_place(line, piece);
  const uint32_t key_place = piece_place(line / 2 + line % 2 * 8, piece);
  uint32_t fill = 0, query_fill = 0;
  for (Runs<Plan> runs(small, groups); runs.more(); runs.advance()) {
    barrier_wait(shared_address(&small.query_free), (query_fill & 1) ^ 1);
    ++query_fill;
    const int first = params.first + runs.group * Plan::kQueries;
    const int end = params.first + params.chunk;
#pragma unroll 2
    for (int row = 0; row < Plan::kColumns; row += 16) {
      const int which = Plan::content(row + line);
      const int query = first + which / kHeads, head = which % kHeads;
      const bool there = query < end;
      const __nv_bfloat16* from = params.q +
                                  (there ? query : 0) * params.q_token +
                                  head * params.q_head + piece * 8;
#pragma unroll
      for (int c = 0; c < Plan::kBlocks; ++c) {
        copy_16(base + Plan::kQuery + c * Plan::kQueryBlockBytes + row * 128 +
                    place,
                from + c * 64, there);
      }
    }
    barrier_arrive_copies(shared_address(&small.query_ready));
    for (int tile = runs.tile; tile < runs.tile + runs.tiles; ++tile) {
      const uint32_t stage = fill % Plan::kStages;
      barrier_wait(shared_address(&small.key_free[stage]),
                   (fill / Plan::kStages & 1) ^ 1);
      const uint32_t to =
          base + Plan::kKey + stage * Plan::kTileBytes + key_place;
#pragma unroll 4
      for (int row = 0; row < Plan::kKeys; row += 16) {
        const int key = tile * Plan::kKeys + row + line;
        const bool there = key < params.keys;
        const __nv_bfloat16* from =
            params.k + (there ? key : 0) * params.k_token + piece * 8;
#pragma unroll
        for (int c = 0; c < Plan::kBlocks; ++c) {
          copy_16(to + c * Plan::kKeyBlockBytes + row * 128, from + c * 64,
                  there);
        }
      }
      barrier_arrive_copies(shared_address(&small.key_ready[stage]));
      ++fill;
    }
  }
}

// ---- Score, fold over heads, store ---------------------------------------

/// Two warpgroups: each takes one half of the columns, whose weights stay in
/// its registers: those of the 32 that ScorePlan::content gives a thread. While
/// it folds the products of 64 keys, those of the next 64 are under way.
template <int kHeads, int kDim>
struct Scorer {
  using Plan = ScorePlan<kHeads, kDim>;
  static constexpr int kQ = Plan::kHalfQueries;
  const SelectParams& params;
  typename Plan::Small& small;
  uint32_t base;
  int half, warp, lane;
  float weight[32];
  float* to;  // the thread's next score
  int rows;   // that the thread may write, from there on

  __device__ void take_group(int group, int tile) {
    const int from = group * Plan::kQueries + half * kQ;
    const int mine = (lane & 3) * 32;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      // What comes for queries past the end is not stored.
      const int query = min(from + (mine + i) / kHeads, params.chunk - 1);
      weight[i] =
          __ldg(params.weights + (params.first + query) * params.weights_token +
                (mine + i) % kHeads * params.weights_head);
    }
    const int query = from + mine / kHeads;
    const int key = tile * Plan::kKeys + warp * 16 + lane / 4 * 2;
    rows = params.chunk - query;
    to = params.scratch + query * params.stride + key;
    if (kHeads > 32) to += lane & 1;
  }

  /// sum = keys of a part of a tile times columns.
  __device__ void multiply(float (&sum)[64], uint32_t stage, int part) {
    const uint64_t a = along_channels(base + Plan::kKey +
                                      stage * Plan::kTileBytes + part * 8192);
    const uint64_t b = along_channels(base + Plan::kQuery + half * 16384);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      wgmma<0, 0>(sum, a + ((i / 4 * Plan::kKeyBlockBytes + i % 4 * 32) >> 4),
                  b + ((i / 4 * Plan::kQueryBlockBytes + i % 4 * 32) >> 4),
                  i == 0 ? 0 : 1);
    }
    wgmma_commit();
  }

  /// Folds over heads and stores, for the next 64 keys. The thread has two
  /// neighbours of them.
  __device__ void fold(const float (&sum)[64]) {
    constexpr int kCount = kHeads < 32 ? kHeads : 32;
#pragma unroll
    for (int q = 0; q < 32 / kCount; ++q) {
      float term[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int h = 0; h < kCount; h += 2) {
        const int at = q * kCount + h;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          term[i] =
              fmaf(positive_part(sum[2 * at + i]), weight[at + i % 2], term[i]);
        }
      }
      const float low = term[0] + term[1], high = term[2] + term[3];
      float* place = to + q * params.stride;
      // + 0: no -0.
      if constexpr (kHeads > 32) {
        // The other lane has the other heads, and takes one of the keys.
        const bool odd = lane & 1;
        const float other = __shfl_xor_sync(~0u, odd ? low : high, 1);
        store_if(q < rows, place, (odd ? high : low) + other + 0.f);
      } else {
        store_if(q < rows, place, low + 0.f, high + 0.f);
      }
    }
    to += 64;
  }

  __device__ void release(uint64_t& barrier) {
    barrier_arrive_if(lane == 0, shared_address(&barrier));
  }

  __device__ void run(int groups) {
    uint32_t fill = 0, query_fill = 0;
    const auto wait_for_keys = [&] {
      barrier_wait(shared_address(&small.key_ready[fill % Plan::kStages]),
                   fill / Plan::kStages & 1);
      fence_for_wgmma();
    };
    Runs<Plan> runs(small, groups);
    if (runs.more()) after_former_launch();  // it reads what is written here
    for (; runs.more(); runs.advance()) {
      float even[64], odd[64];
      take_group(runs.group, runs.tile);
      barrier_wait(shared_address(&small.query_ready), query_fill & 1);
      ++query_fill;
      wait_for_keys();
      multiply(even, fill % Plan::kStages, 0);
      for (int left = runs.tiles;; --left) {
        const uint32_t stage = fill % Plan::kStages;
        ++fill;
        multiply(odd, stage, 1);
        wgmma_wait<1>();
        pin(even);
        fold(even);
        if (left == 1) {
          wgmma_wait<0>();
          pin(odd);
          release(small.key_free[stage]);
          release(small.query_free);
          fold(odd);
          break;
        }
        wait_for_keys();
        multiply(even, fill % Plan::kStages, 0);
        wgmma_wait<1>();
        pin(odd);
        release(small.key_free[stage]);
        fold(odd);
      }
    }
  }
};

template <int kHeads, int kDim>
__global__ void __launch_bounds__(ScorePlan<kHeads, kDim>::kThreads, 1)
    score_kernel(const __grid_constant__ SelectParams params) {
  using Plan = ScorePlan<kHeads, kDim>;
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& small = *reinterpret_cast<typename Plan::Small*>(memory + Plan::kSmall);
  if (threadIdx.x == 0) {
    barrier_init(shared_address(&small.query_ready), 128);
    barrier_init(shared_address(&small.query_free), 4 * Plan::kWorkers);
    for (int stage = 0; stage < Plan::kStages; ++stage) {
      barrier_init(shared_address(&small.key_ready[stage]), 128);
      barrier_init(shared_address(&small.key_free[stage]), 4 * Plan::kWorkers);
    }
    barrier_init_fence();
  }
  const int groups = (params.chunk + Plan::kQueries - 1) / Plan::kQueries;
  count_units<Plan>(params, small, groups);
  const uint32_t base = shared_address(memory);
  if (threadIdx.x >= 256) {
    give_registers<40>();
    fetch<kHeads, Plan>(params, small, base, groups);
    after_former_launch();
    let_next_launch_begin();
  } else {
    take_registers<232>();
    // Equal in all lanes, and the compiler can tell.
    const int half = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
    Scorer<kHeads, kDim> scorer{params,
                                small,
                                base,
                                half,
                                static_cast<int>(threadIdx.x) / 32 % 4,
                                static_cast<int>(threadIdx.x) % 32};
    scorer.run(groups);
  }
}

template <int kHeads, int kDim>
cudaError_t launch_scores(const SelectParams& params, int processors,
                          bool follows, cudaStream_t stream) {
  using Plan = ScorePlan<kHeads, kDim>;
  return launch_after(score_kernel<kHeads, kDim>, processors, Plan::kThreads,
                      Plan::kSharedBytes, follows, stream, params);
}

}  // namespace longspan::hopper
