#pragma once

#include <algorithm>

#include "longspan/kernels/attention/hopper/backward/keys.cuh"

namespace longspan::hopper {

/// A warpgroup that makes dv (0) or dk (1) of 64 keys.
template <class Plan>
__device__ __forceinline__ void derive_wide_keys(const DenseKeysParams& params,
                                                 typename Plan::Small& small,
                                                 int group) {
  const int lane = threadIdx.x % 32;
  const int key = 16 * (threadIdx.x % 128 / 32) + lane / 4;
  const auto arrive = [&](uint64_t& barrier) {
    if (lane == 0) barrier_arrive(shared_address(&barrier));
  };
  RingPlace<Plan::kRecords> at;
  RingPlace<Plan::kStages> stage;
  uint32_t keys_round = 0;
  float sums[Plan::kHeadDim / 2];
  float pair[32], slope[32];
  for (;;) {
    barrier_wait(shared_address(&small.record_ready[at.slot]), at.round);
    int left = small.record[at.slot].tiles;
    if (left < 0) break;
    int tile = last_tile(small.record[at.slot], Plan::kQueries), head = 0;
#pragma unroll
    for (int i = 0; i < Plan::kHeadDim / 2; ++i) sums[i] = 0.f;
    if (left > 0) {
      barrier_wait(shared_address(&small.keys_ready), keys_round);
      keys_round ^= 1;
    }
    for (; left > 0; --left) {
      if (tile < small.record[at.slot].first_column) {
        arrive(small.record_free[at.slot]);
        at.advance();
        barrier_wait(shared_address(&small.record_ready[at.slot]), at.round);
        tile = last_tile(small.record[at.slot], Plan::kQueries);
      }
      const uint32_t query =
          kSharedBase + Plan::kQuery + stage.slot * Plan::kQueryBytes;
      const uint32_t dout =
          kSharedBase + Plan::kDout + stage.slot * Plan::kDoutBytes;
      barrier_wait(shared_address(&small.query_ready[stage.slot]), stage.round);
      barrier_wait(shared_address(&small.dout_ready[stage.slot]), stage.round);
      wgmma_fence();
      issue_pairs<Plan::kType, Plan::kHeadBlocks, Plan::kKeyBlock,
                  Plan::kQueryBlock>(pair, kSharedBase + Plan::kKey, query);
      wgmma_commit();
      // dv does not need these, but a branch would have the products wait for
      // one another.
      issue_pairs<Plan::kType, Plan::kValueBlocks, Plan::kKeyBlock,
                  Plan::kQueryBlock>(slope, kSharedBase + Plan::kValue, dout);
      wgmma_commit();
      wgmma_wait<0>();
      pin(pair);
      pin(slope);
      const bool all_see =
          WorkColumns(small.record[at.slot]).all_see(tile, Plan::kQueries);
      const uint32_t summed = group == 0 ? dout : query;
      if (!all_see) {
        const SuspectQueries suspects(small.lse[stage.slot],
                                      small.delta[stage.slot], lane);
        if ((suspects.any() || holds_spoiled(pair)) &&
            finds_spoiled_queries<Plan>(pair, query, dout, suspects))
            [[unlikely]] {
          add_seen_spoiled<Plan::kType>(sums, summed, small.record[at.slot],
                                        tile, key);
          clear_spoiled_together<Plan::kType, Plan::kQueryBytes,
                                 Plan::kDoutBytes>(kSearched, query, dout);
        }
      }
      const float unit =
          bend(pair, params.scale, Plan::kSoftcap ? params.softcap : 0.f);
      const float* lse = small.lse[stage.slot] + 2 * (lane & 3);
      const float* delta = small.delta[stage.slot] + 2 * (lane & 3);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 sum = *reinterpret_cast<const float2*>(lse + 8 * j);
        const float2 mean = *reinterpret_cast<const float2*>(delta + 8 * j);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& x = pair[4 * j + i];
          const float p = exp2_fast(fmaf(x, unit, -(i & 1 ? sum.y : sum.x)));
          // A bent score may exceed 1 by a last bit.
          const float bent =
              Plan::kSoftcap ? fmaxf(fmaf(-x, x, 1.f), 0.f) : 1.f;
          const float more = slope[4 * j + i] - (i & 1 ? mean.y : mean.x);
          x = group == 0 ? p : p * bent * more;
        }
      }
      uint32_t operand[4][4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        pack_operand<Plan::kType>(operand[k], pair, k);
      }
      if (!all_see) {
        hide_some(operand, small.record[at.slot], tile, key, lane);
      }
      wgmma_fence();
      issue_sums<Plan::kType, Plan::kHeadDim / 2, Plan::kQueryBlock>(
          sums, operand, summed);
      wgmma_commit();
      wgmma_wait<0>();
      pin(sums);
      arrive(small.dout_free[stage.slot]);
      arrive(small.query_free[stage.slot]);
      stage.advance();
      if (++head == small.record[at.slot].heads) {
        head = 0;
        tile -= Plan::kQueries;
      }
    }
    const WorkRecord& record = small.record[at.slot];
    if (record.tiles > 0) arrive(small.keys_free);
    const int key_head =
        (record.head + params.head_offset) / params.heads_per_key_head;
    store_sums<Plan::kType>(sums, group == 0 ? 1.f : params.scale,
                            group == 0 ? params.dv : params.dk, record,
                            key_head, key, lane);
    __syncwarp();  // all lanes have read the record
    arrive(small.record_free[at.slot]);
    at.advance();
  }
}

template <class Plan>
__global__ void __launch_bounds__(Plan::kThreads, 1)
    wide_keys_kernel(const __grid_constant__ DenseKeysParams params) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& small = *reinterpret_cast<typename Plan::Small*>(memory + Plan::kSmall);
  const uint32_t base = shared_address(memory);
  check_shared_base(base);
  if (threadIdx.x == 0) {
    const auto init = [](uint64_t& barrier, int arrivals) {
      barrier_init(shared_address(&barrier), arrivals);
    };
    init(small.keys_ready, 1);
    init(small.keys_free, Plan::kConsumerWarps);
    for (int i = 0; i < Plan::kStages; ++i) {
      init(small.query_ready[i], 1 + 32);
      init(small.query_free[i], Plan::kConsumerWarps);
      init(small.dout_ready[i], 1);
      init(small.dout_free[i], Plan::kConsumerWarps);
    }
    for (int i = 0; i < Plan::kRecords; ++i) {
      init(small.record_ready[i], 32);
      init(small.record_free[i], Plan::kConsumerWarps + 2);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const int group = threadIdx.x / 128;
  if (group == 2) {
    give_registers<24>();
    const int warp = threadIdx.x % 128 / 32;
    if (warp == 0) {
      deal_keys<Plan>(params, small, threadIdx.x % 32);
    } else if (warp == 1) {
      fetch_numbers<Plan>(params, small, small.query_ready, small.query_free,
                          threadIdx.x % 32);
    } else if (warp == 2 && threadIdx.x % 32 == 0) {
      fetch_queries<Plan>(params, small, base);
    }
  } else {
    take_registers<240>();
    // ptxas counts with these registers only behind a branch.
    if (params.block_count > 0) derive_wide_keys<Plan>(params, small, group);
  }
}

template <class Plan>
cudaError_t launch_wide_keys(const DenseKeysParams& params, int processors,
                             cudaStream_t stream) {
  const int64_t items = int64_t{params.block_count} * params.key_heads;
  return ampere::launch(wide_keys_kernel<Plan>,
                        std::min<int64_t>(items, processors), Plan::kThreads,
                        Plan::kSharedBytes, stream, params);
}

}  // namespace longspan::hopper
