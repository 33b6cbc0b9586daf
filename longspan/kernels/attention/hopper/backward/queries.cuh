#pragma once

#include <algorithm>

#include "longspan/kernels/attention/hopper/backward/spoiled.cuh"
#include "longspan/kernels/attention/hopper/backward/store.cuh"
#include "longspan/kernels/attention/hopper/bend.cuh"
#include "longspan/kernels/attention/hopper/forward/deal.cuh"
#include "longspan/kernels/common/ampere/launch.h"
#include "longspan/kernels/common/hopper/wgmma.cuh"

namespace longspan::hopper {

// ---- Load ----------------------------------------------------------------

/// One thread: asks for queries and dout, then for keys and values.
template <class Plan>
__device__ void fetch_keys(const DenseQueriesParams& params,
                           typename Plan::Small& small, uint32_t base) {
  RingPlace<Plan::kRecords> at;
  RingPlace<Plan::kStages> stage;
  uint32_t round = 0;
  prefetch_map(&params.q);
  prefetch_map(&params.dout);
  prefetch_map(&params.k);
  prefetch_map(&params.v);
  int left = 0;  // tiles of this item
  for (;;) {
    barrier_wait(shared_address(&small.record_ready[at.slot]), at.round);
    const WorkRecord& record = small.record[at.slot];
    if (record.tiles < 0) return;
    const int row = record.row, head = record.head;
    const int key_head =
        (head + params.head_offset) / params.heads_per_key_head;
    if (left == 0 && record.tiles > 0) {
      left = record.tiles;
      const uint32_t ready = shared_address(&small.query_ready);
      barrier_wait(shared_address(&small.query_free), round ^ 1);
      round ^= 1;
      barrier_expect(ready, Plan::kQueryBytes + Plan::kDoutBytes);
      for (int c = 0; c < Plan::kHeadBlocks; ++c) {
        fetch_box(base + Plan::kQuery + c * Plan::kQueryBlock, &params.q, ready,
                  64 * c, record.first_row, head, row);
      }
      for (int c = 0; c < Plan::kValueBlocks; ++c) {
        fetch_box(base + Plan::kDout + c * Plan::kQueryBlock, &params.dout,
                  ready, 64 * c, record.first_row, head, row);
      }
    }
    for (int key = record.first_column; key < record.last_column;
         key += Plan::kKeys) {
      const auto bring = [&](const CUtensorMap& map, uint64_t& free_at,
                             uint64_t& ready_at, uint32_t to, int blocks) {
        const uint32_t ready = shared_address(&ready_at);
        barrier_wait(shared_address(&free_at), stage.round ^ 1);
        barrier_expect(ready, blocks * Plan::kKeyBlock);
        for (int c = 0; c < blocks; ++c) {
          fetch_box(base + to + c * Plan::kKeyBlock, &map, ready, 64 * c, key,
                    key_head, row);
        }
      };
      bring(params.k, small.key_free[stage.slot], small.key_ready[stage.slot],
            Plan::kKey + stage.slot * Plan::kKeyBytes, Plan::kHeadBlocks);
      bring(params.v, small.value_free[stage.slot],
            small.value_ready[stage.slot],
            Plan::kValue + stage.slot * Plan::kValueBytes, Plan::kValueBlocks);
      stage.advance();
      --left;
    }
    barrier_arrive(shared_address(&small.record_free[at.slot]));
    at.advance();
  }
}

// ---- Products ------------------------------------------------------------

/// 64 queries (a) against a tile of keys (b), over all channels.
template <class Plan, int kBlocks>
__device__ __forceinline__ void issue_tile(float (&pairs)[Plan::kKeys / 2],
                                           uint32_t a_at, uint32_t b_at) {
  const uint64_t a = along_channels(a_at), b = along_channels(b_at);
#pragma unroll
  for (int c = 0; c < kBlocks; ++c) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      wgmma<0, 0, Plan::kType>(
          pairs, a + ((c * Plan::kQueryBlock + k * 32) >> 4),
          b + ((c * Plan::kKeyBlock + k * 32) >> 4), c == 0 && k == 0 ? 0 : 1);
    }
  }
}

// ---- A warpgroup of arithmetic -------------------------------------------

/// Barriers by number: both warpgroups have found what is not finite in a tile.
enum DenseQueriesMeeting { kSpoiledKeysFound = 1 };

/// What the forward pass said of a thread's two queries: lse in powers of two,
/// infinite for those that are not there or saw nothing, and delta.
struct QueryFacts {
  float lse[2], delta[2];
  template <class Record>
  __device__ QueryFacts(const DenseQueriesParams& params, const Record& record,
                        int first) {
    const int64_t row = record.row, head = record.head;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool there = first + 8 * i < record.rows;
      const int64_t query = record.first_row + first + 8 * i;
      const auto read = [&](const QueryNumbers& numbers) {
        return numbers.data[row * numbers.row + query * numbers.token +
                            head * numbers.head];
      };
      const float sum = there ? read(params.lse) : -INFINITY;
      // Weights of a query that saw nothing, or only infinities, are 0.
      lse[i] = isinf(sum) ? INFINITY : sum * kLog2e;
      delta[i] = there ? read(params.delta) : 0.f;
    }
  }
};

template <class Plan>
__device__ __forceinline__ void derive_queries(const DenseQueriesParams& params,
                                               typename Plan::Small& small,
                                               int group) {
  constexpr int kCount = Plan::kKeys / 2;
  const int lane = threadIdx.x % 32;
  const int query = 64 * group + 16 * (threadIdx.x % 128 / 32) + lane / 4;
  const auto arrive = [&](uint64_t& barrier) {
    if (lane == 0) barrier_arrive(shared_address(&barrier));
  };
  const uint32_t my_query = kSharedBase + Plan::kQuery + group * 64 * 128;
  const uint32_t my_dout = kSharedBase + Plan::kDout + group * 64 * 128;
  RingPlace<Plan::kRecords> at;
  RingPlace<Plan::kStages> stage;
  uint32_t round = 0;
  float dq[Plan::kHeadDim / 2];
  float pair[kCount], slope[kCount];
  uint32_t operand[Plan::kKeys / 16][4];
  for (;;) {
    barrier_wait(shared_address(&small.record_ready[at.slot]), at.round);
    int left = small.record[at.slot].tiles;
    if (left < 0) return;
    const QueryFacts facts(params, small.record[at.slot], query);
    int tile = small.record[at.slot].first_column;
#pragma unroll
    for (int i = 0; i < Plan::kHeadDim / 2; ++i) dq[i] = 0.f;
    const auto issue_pairs = [&] {
      issue_tile<Plan, Plan::kHeadBlocks>(
          pair, my_query,
          kSharedBase + Plan::kKey + stage.slot * Plan::kKeyBytes);
      wgmma_commit();
      issue_tile<Plan, Plan::kValueBlocks>(
          slope, my_dout,
          kSharedBase + Plan::kValue + stage.slot * Plan::kValueBytes);
      wgmma_commit();
    };
    const auto wait_for_tile = [&] {
      barrier_wait(shared_address(&small.key_ready[stage.slot]), stage.round);
      barrier_wait(shared_address(&small.value_ready[stage.slot]), stage.round);
    };
    if (left > 0) {
      barrier_wait(shared_address(&small.query_ready), round);
      round ^= 1;
      wait_for_tile();
      wgmma_fence();
      issue_pairs();
    }
    // The products of a tile are under way before it begins.
    for (; left > 0; --left) {
      if (tile >= small.record[at.slot].last_column) {
        arrive(small.record_free[at.slot]);
        at.advance();
        barrier_wait(shared_address(&small.record_ready[at.slot]), at.round);
        tile = small.record[at.slot].first_column;
      }
      wgmma_wait<Plan::kSoftcap ? 0 : 1>();
      pin(pair);
      const bool all_see =
          WorkColumns(small.record[at.slot]).all_see(tile, Plan::kKeys);
      if (!all_see && holds_spoiled(pair)) [[unlikely]] {
        wgmma_wait<0>();
        pin(slope);
        pin(dq);
        const uint32_t keys =
            kSharedBase + Plan::kKey + stage.slot * Plan::kKeyBytes;
        if (finds_spoiled<Plan::kType, Plan::kKeyBytes>(keys)) {
          add_seen_spoiled<Plan::kType>(dq, keys, small.record[at.slot], tile,
                                        query);
          clear_spoiled_together<Plan::kType, Plan::kKeyBytes>(
              kSpoiledKeysFound, keys);
        }
      }
      const float unit =
          bend(pair, params.scale, Plan::kSoftcap ? params.softcap : 0.f);
      if constexpr (!Plan::kSoftcap) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          pair[i] = exp2_fast(fmaf(pair[i], unit, -facts.lse[i / 2 & 1]));
        }
      }
      wgmma_wait<0>();
      pin(slope);
      pin(dq);
      arrive(small.value_free[stage.slot]);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float more = slope[i] - facts.delta[i / 2 & 1];
        if constexpr (Plan::kSoftcap) {
          const float p = exp2_fast(fmaf(pair[i], unit, -facts.lse[i / 2 & 1]));
          // A bent score may exceed 1 by a last bit.
          const float bent = fmaxf(fmaf(-pair[i], pair[i], 1.f), 0.f);
          slope[i] = p * bent * more;
        } else {
          slope[i] = pair[i] * more;
        }
      }
#pragma unroll
      for (int k = 0; k < Plan::kKeys / 16; ++k) {
        pack_operand<Plan::kType>(operand[k], slope, k);
      }
      if (!all_see) {
        hide_some(operand, small.record[at.slot], tile, query, lane);
      }
#pragma unroll
      for (int k = 0; k < Plan::kKeys / 16; ++k) pin(operand[k]);
      const int slot = stage.slot;
      stage.advance();
      wgmma_fence();
      const uint64_t b = across_channels(
          kSharedBase + Plan::kKey + slot * Plan::kKeyBytes, Plan::kKeyBlock);
#pragma unroll
      for (int k = 0; k < Plan::kKeys / 16; ++k) {
        wgmma<1, Plan::kType>(dq, operand[k], b + (k * 2048 >> 4));
      }
      wgmma_commit();
      wgmma_wait<0>();
      pin(dq);
      arrive(small.key_free[slot]);
      if (left > 1) wait_for_tile();
      wgmma_fence();
      // After the last tile these are of whatever lies there, and not looked
      // at: a branch here would have the products wait for one another.
      issue_pairs();
      tile += Plan::kKeys;
    }
    wgmma_wait<0>();
    pin(dq);
    pin(pair);
    pin(slope);
    const WorkRecord& record = small.record[at.slot];
    if (record.tiles > 0) arrive(small.query_free);
    store_sums<Plan::kType>(dq, params.scale, params.dq, record, record.head,
                            query, lane);
    __syncwarp();  // all lanes have read the record
    arrive(small.record_free[at.slot]);
    at.advance();
  }
}

template <class Plan>
__global__ void __launch_bounds__(Plan::kThreads, 1)
    dense_queries_kernel(const __grid_constant__ DenseQueriesParams params) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& small = *reinterpret_cast<typename Plan::Small*>(memory + Plan::kSmall);
  const uint32_t base = shared_address(memory);
  check_shared_base(base);
  if (threadIdx.x == 0) {
    const auto init = [](uint64_t& barrier, int arrivals) {
      barrier_init(shared_address(&barrier), arrivals);
    };
    init(small.query_ready, 1);
    init(small.query_free, Plan::kConsumerWarps);
    for (int i = 0; i < Plan::kStages; ++i) {
      init(small.key_ready[i], 1);
      init(small.key_free[i], Plan::kConsumerWarps);
      init(small.value_ready[i], 1);
      init(small.value_free[i], Plan::kConsumerWarps);
    }
    for (int i = 0; i < Plan::kRecords; ++i) {
      init(small.record_ready[i], 32);
      init(small.record_free[i], Plan::kConsumerWarps + 1);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const int group = threadIdx.x / 128;
  if (group == 2) {
    give_registers<Plan::kProducerRegisters>();
    const int warp = threadIdx.x % 128 / 32;
    if (warp == 0) {
      deal<Plan>(params, small, threadIdx.x % 32);
    } else if (warp == 1 && threadIdx.x % 32 == 0) {
      fetch_keys<Plan>(params, small, base);
    }
  } else {
    take_registers<Plan::kConsumerRegisters>();
    // ptxas counts with these registers only behind a branch.
    if (params.block_count > 0) derive_queries<Plan>(params, small, group);
  }
}

template <class Plan>
cudaError_t launch_dense_queries(const DenseQueriesParams& params,
                                 int processors, cudaStream_t stream) {
  const int64_t items = int64_t{params.block_count} * params.heads;
  return ampere::launch(dense_queries_kernel<Plan>,
                        std::min<int64_t>(items, processors), Plan::kThreads,
                        Plan::kSharedBytes, stream, params);
}

}  // namespace longspan::hopper
