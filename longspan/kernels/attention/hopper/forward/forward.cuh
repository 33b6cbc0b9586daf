#pragma once

#include <algorithm>

#include "longspan/kernels/attention/hopper/bend.cuh"
#include "longspan/kernels/attention/hopper/forward/answer.cuh"
#include "longspan/kernels/attention/hopper/forward/deal.cuh"
#include "longspan/kernels/attention/hopper/forward/search.cuh"
#include "longspan/kernels/attention/hopper/forward/spoiled.cuh"
#include "longspan/kernels/common/ampere/launch.h"
#include "longspan/kernels/common/hopper/fragment.cuh"
#include "longspan/kernels/common/hopper/wgmma.cuh"

namespace longspan::hopper {

// ---- Score ---------------------------------------------------------------

/// score = q k^T of 64 queries and a tile of keys.
template <class Plan>
__device__ __forceinline__ void issue_scores(float (&score)[Plan::kKeys / 2],
                                             uint32_t query, uint32_t key) {
  const uint64_t a = along_channels(query), b = along_channels(key);
#pragma unroll
  for (int c = 0; c < Plan::kHeadBlocks; ++c) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      wgmma<0, 0, Plan::kType>(
          score, a + ((c * Plan::kQueryBlock + k * 32) >> 4),
          b + ((c * Plan::kKeyBlock + k * 32) >> 4), c == 0 && k == 0 ? 0 : 1);
    }
  }
}

// ---- Accumulate ----------------------------------------------------------

template <class Plan>
__device__ __forceinline__ void pack_weights(
    uint32_t (&weight)[Plan::kKeys / 16][4],
    const float (&score)[Plan::kKeys / 2]) {
#pragma unroll
  for (int k = 0; k < Plan::kKeys / 16; ++k) {
    pack_operand<Plan::kType>(weight[k], score, k);
  }
}

/// out += weights v.
template <class Plan>
__device__ __forceinline__ void issue_values(
    float (&out)[Plan::kValueDim / 2],
    const uint32_t (&weight)[Plan::kKeys / 16][4], uint32_t value) {
  const uint64_t b = across_channels(value, Plan::kKeyBlock);
#pragma unroll
  for (int k = 0; k < Plan::kKeys / 16; ++k) {
    wgmma<1, Plan::kType>(out, weight[k], b + (k * 2048 >> 4));
  }
}

/// Barriers by number: all have added what is not finite, and have cleared it.
enum ForwardMeeting { kCleared = 1 };

/// Adds values of a tile that are not finite to the sums of who sees them, and
/// sets them to 0. Every warpgroup that reads them comes here, and waits until
/// the others have added theirs.
template <class Plan>
__device__ __forceinline__ void add_spoiled_values(
    float (&out)[Plan::kValueDim / 2], uint32_t values,
    const WorkRecordOf<Plan::kQueries>& record, int tile, int query) {
  constexpr int kThreads = 128 * Plan::kWarpgroups;
  add_spoiled<Plan::kType, Plan::kKeys>(out, values, record, tile, query);
  meet(kCleared, kThreads);
  clear_spoiled<Plan::kType, Plan::kValueBytes, kThreads>(values);
  meet(kCleared, kThreads);
}

// ---- A warpgroup of arithmetic -------------------------------------------

template <class Plan>
__device__ __forceinline__ void attend(const DenseForwardParams& params,
                                       typename Plan::Small& small, int group) {
  const int lane = threadIdx.x % 32;
  const int query = 64 * group + 16 * (threadIdx.x % 128 / 32) + lane / 4;
  // The same, for what is rare: kept in no register.
  const auto query_anew = [&] {
    return 64 * group + 16 * (thread_anew() % 128 / 32) +
           thread_anew() % 32 / 4;
  };
  const auto arrive = [&](uint64_t& barrier) {
    if (lane == 0) barrier_arrive(shared_address(&barrier));
  };
  const uint32_t my_query = kSharedBase + Plan::kQuery + group * 64 * 128;
  const uint32_t values = kSharedBase + Plan::kValue;
  RingPlace<Plan::kRecords> at;
  RingPlace<Plan::kQueryStages> query_at;
  RingPlace<Plan::kStages> key_at, value_at;
  float out[Plan::kValueDim / 2];
  float score[Plan::kKeys / 2];
  uint32_t weight[Plan::kKeys / 16][4];
  RunningSoftmax softmax;
  const Bending bending(params.scale, params.softcap);
  for (;;) {
    barrier_wait(shared_address(&small.record_ready[at.slot]), at.round);
    int left = small.record[at.slot].tiles;
    if (left < 0) return;
    const AnswerPlace<Plan::kNarrow> place(small.record[at.slot]);
    int tile = small.record[at.slot].first_column;
    WorkColumns columns(small.record[at.slot]);
    begin_sums<Plan::kType>(params, place, query, 0, softmax, out, lane);
    if (left > 0) {
      const uint32_t q = my_query + query_at.slot * Plan::kQueryBytes;
      barrier_wait(shared_address(&small.query_ready[query_at.slot]),
                   query_at.round);
      barrier_wait(shared_address(&small.key_ready[key_at.slot]), key_at.round);
      wgmma_fence();
      issue_scores<Plan>(
          score, q, kSharedBase + Plan::kKey + key_at.slot * Plan::kKeyBytes);
      wgmma_commit();
      wgmma_wait<0>();
      pin(score);
      arrive(small.key_free[key_at.slot]);
      key_at.advance();
      const auto weigh = [&] {
        const float unit = bending.of(score);
        hide(score, small.record[at.slot], columns, tile, query, lane);
        softmax.weigh(score, unit);
      };
      weigh();
      softmax.rescale(out);
      pack_weights<Plan>(weight, score);
      for (;;) {
        // While the record says who sees what, and no product is under way.
        if (!columns.all_see(tile, Plan::kKeys)) {
          barrier_wait(shared_address(&small.value_searched[value_at.slot]),
                       value_at.round);
          const int(&spoiled)[2] = small.spoiled[value_at.slot];
          if ((spoiled[0] | spoiled[1]) != 0) {
            add_spoiled_values<Plan>(out,
                                     values + value_at.slot * Plan::kValueBytes,
                                     small.record[at.slot], tile, query_anew());
          }
        }
        if (--left == 0) break;
        tile += Plan::kKeys;
        if (tile >= columns.last) {
          arrive(small.record_free[at.slot]);
          at.advance();
          barrier_wait(shared_address(&small.record_ready[at.slot]), at.round);
          tile = small.record[at.slot].first_column;
          columns = WorkColumns(small.record[at.slot]);
        }
        barrier_wait_both(
            shared_address(&small.key_ready[key_at.slot]), key_at.round,
            shared_address(&small.value_ready[value_at.slot]), value_at.round);
        wgmma_fence();
        issue_scores<Plan>(
            score, q, kSharedBase + Plan::kKey + key_at.slot * Plan::kKeyBytes);
        wgmma_commit();
        issue_values<Plan>(out, weight,
                           values + value_at.slot * Plan::kValueBytes);
        wgmma_commit();
        wgmma_wait<1>();
        pin(score);
        arrive(small.key_free[key_at.slot]);
        key_at.advance();
        weigh();
        softmax.settle();
        wgmma_wait<0>();
        pin(out);
        arrive(small.value_free[value_at.slot]);
        value_at.advance();
        softmax.rescale(out);
        pack_weights<Plan>(weight, score);
      }
      arrive(small.query_free[query_at.slot]);
      query_at.advance();
      barrier_wait(shared_address(&small.value_ready[value_at.slot]),
                   value_at.round);
      wgmma_fence();
      issue_values<Plan>(out, weight,
                         values + value_at.slot * Plan::kValueBytes);
      wgmma_commit();
      wgmma_wait<0>();
      pin(out);
      arrive(small.value_free[value_at.slot]);
      value_at.advance();
    }
    arrive(small.record_free[at.slot]);
    at.advance();
    store_answer<Plan::kType>(params, place, query, 0, softmax, out, lane);
  }
}

template <class Plan>
__global__ void __launch_bounds__(Plan::kThreads, Plan::kBlocks)
    dense_forward_kernel(const __grid_constant__ DenseForwardParams params) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& small = *reinterpret_cast<typename Plan::Small*>(memory + Plan::kSmall);
  const uint32_t base = shared_address(memory);
  check_shared_base(base);
  if (threadIdx.x == 0) {
    const auto init = [](uint64_t& barrier, int arrivals) {
      barrier_init(shared_address(&barrier), arrivals);
    };
    for (int i = 0; i < Plan::kQueryStages; ++i) {
      init(small.query_ready[i], 1);
      init(small.query_free[i], Plan::kConsumerWarps);
    }
    for (int i = 0; i < Plan::kStages; ++i) {
      init(small.key_ready[i], 1);
      init(small.key_free[i], Plan::kConsumerWarps);
      init(small.value_ready[i], 1);
      init(small.value_free[i], Plan::kConsumerWarps);
      init(small.value_searched[i], 2);
    }
    for (int i = 0; i < Plan::kRecords; ++i) {
      init(small.record_ready[i], 32);
      init(small.record_free[i], Plan::kConsumerWarps + 1 + 2);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const int group = threadIdx.x / 128;
  if (group == Plan::kWarpgroups) {
    give_registers<Plan::kProducerRegisters>();
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    if (warp == 0) {
      deal<Plan>(params, small, lane, Plan::kNarrow ? params.packed_heads : 1);
    } else if (warp >= 2) {
      search<Plan>(small, base, warp - 2, lane);
    } else if (lane == 0) {
      fetch<Plan>(params, small, base);
    }
  } else {
    take_registers<Plan::kConsumerRegisters>();
    // ptxas counts with these registers only behind a branch.
    if (params.block_count > 0) attend<Plan>(params, small, group);
  }
}

template <class Plan>
cudaError_t launch_dense_forward(const DenseForwardParams& params,
                                 int processors, cudaStream_t stream) {
  const int64_t items =
      int64_t{params.block_count} * (params.heads / params.packed_heads);
  if (Plan::kBlocks > 1) {
    const auto error = ampere::prefer_shared_memory(dense_forward_kernel<Plan>);
    if (error != cudaSuccess) return error;
  }
  return ampere::launch(
      dense_forward_kernel<Plan>,
      std::min<int64_t>(items, int64_t{processors} * Plan::kBlocks),
      Plan::kThreads, Plan::kSharedBytes, stream, params);
}

}  // namespace longspan::hopper
