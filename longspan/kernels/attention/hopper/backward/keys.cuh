#pragma once

#include <algorithm>

#include "longspan/kernels/attention/hopper/backward/deal.cuh"
#include "longspan/kernels/attention/hopper/backward/spoiled.cuh"
#include "longspan/kernels/attention/hopper/backward/store.cuh"
#include "longspan/kernels/common/ampere/launch.h"
#include "longspan/kernels/common/hopper/wgmma.cuh"

namespace longspan::hopper {

// ---- Products ------------------------------------------------------------

/// 64 keys (a) against 64 queries (b), over all channels.
template <ElementType kType, int kBlocks, uint32_t kBlockA, uint32_t kBlockB>
__device__ __forceinline__ void issue_pairs(float (&pairs)[32], uint32_t a_at,
                                            uint32_t b_at) {
  const uint64_t a = along_channels(a_at), b = along_channels(b_at);
#pragma unroll
  for (int c = 0; c < kBlocks; ++c) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      wgmma<0, 0, kType>(pairs, a + ((c * kBlockA + k * 32) >> 4),
                         b + ((c * kBlockB + k * 32) >> 4),
                         c == 0 && k == 0 ? 0 : 1);
    }
  }
}

/// sums += pairs x, over 64 queries; a row for each key.
template <ElementType kType, int kCount, uint32_t kBlock>
__device__ __forceinline__ void issue_sums(float (&sums)[kCount],
                                           const uint32_t (&pairs)[4][4],
                                           uint32_t at) {
  const uint64_t b = across_channels(at, kBlock);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    wgmma<1, kType>(sums, pairs[k], b + (k * 2048 >> 4));
  }
}

/// Half of the channels of dq: 64 queries, over all 128 keys.
template <class Plan>
__device__ __forceinline__ void issue_query_sums(
    float (&dq)[Plan::kHeadDim / 4], uint32_t slopes, uint32_t key) {
  const uint64_t a = across_channels(slopes, Plan::kSlopeBytes);
  const uint64_t b = across_channels(key, Plan::kKeyBlock);
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    wgmma<1, 1, Plan::kType>(dq, a + (k * 2048 >> 4), b + (k * 2048 >> 4),
                             k == 0 ? 0 : 1);
  }
}

/// A warp's 16 rows of sums, in boxes of shared memory. Lanes of odd rows store
/// the right half of a box first: so no two rows of a store share banks.
template <uint32_t kBoxBytes, int kCount>
__device__ __forceinline__ void write_boxes(const float (&sums)[kCount],
                                            float scale, uint32_t at,
                                            int lane) {
  const int row = lane / 4;
  const bool odd = row & 1;
  const uint32_t place =
      at + piece_place(row, (lane >> 1 & 1) ^ (odd ? 4 : 0)) + 8 * (lane & 1);
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const int other = j ^ 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t to = (place ^ static_cast<uint32_t>((j & 3) << 5)) +
                          (j / 4) * kBoxBytes + i * 1024;
      const float x = odd ? sums[4 * other + 2 * i] : sums[4 * j + 2 * i];
      const float y =
          odd ? sums[4 * other + 2 * i + 1] : sums[4 * j + 2 * i + 1];
      store_pair(to, x * scale, y * scale);
    }
  }
}

/// Where dq of a query and a channel stands in boxes.
template <class Plan>
__device__ __forceinline__ uint32_t sum_place(int query, int channel) {
  return kSharedBase + Plan::kSums + channel / 32 * Plan::kBoxBytes +
         piece_place(query, channel % 32 / 4) + 4 * (channel % 4);
}

/// What a thread wrote into boxes once more, by hand, where it is not finite:
/// over keys that a query sees, where the product multiplies all others with 0.
template <class Plan, class Record>
__device__ __forceinline__ void sum_seen_keys(uint32_t slopes,
                                              const Record& record, int tile) {
  constexpr int kChannels = Plan::kHeadDim / 2;  // of a warpgroup
  const int thread = thread_anew(), group = thread / 128, lane = thread % 32;
#pragma unroll 1
  for (int n = 0; n < kChannels / 2; ++n) {
    const int query = thread % 128 / 32 * 16 + lane / 4 + 8 * (n & 1);
    const int channel =
        group * kChannels + 8 * (n / 4) + 2 * (lane & 3) + (n >> 1 & 1);
    const uint32_t place = sum_place<Plan>(query, channel);
    if (0.f * __uint_as_float(load_word(place)) == 0.f) continue;
    float sum = 0.f;
#pragma unroll 1
    for (int key = 0; key < Plan::kKeys; ++key) {
      if (tile + query < record.begin[key] || tile + query >= record.end[key]) {
        continue;
      }
      const auto element = [](uint32_t row, int column) {
        return float_of<Plan::kType>(load_word(row + 4 * (column % 8 / 2)) >>
                                         16 * (column & 1) &
                                     0xFFFF);
      };
      const float slope = element(slopes + key / 64 * Plan::kSlopeBytes +
                                      piece_place(key % 64, query / 8),
                                  query);
      const float x =
          element(kSharedBase + Plan::kKey + channel / 64 * Plan::kKeyBlock +
                      piece_place(key, channel % 64 / 8),
                  channel);
      sum = fmaf(slope, x, sum);
    }
    store_word(place, __float_as_uint(sum));
  }
}

/// Barriers by number: both warpgroups have written their slopes; both have
/// looked through a tile, or keys.
enum DenseKeysMeeting { kSlopesWritten = 1, kSearched };

// ---- A warpgroup of arithmetic -------------------------------------------

template <class Plan>
__device__ __forceinline__ void derive_keys(const DenseKeysParams& params,
                                            typename Plan::Small& small,
                                            int group) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const int key = 64 * group + 16 * warp + lane / 4;
  const auto arrive = [&](uint64_t& barrier) {
    if (lane == 0) barrier_arrive(shared_address(&barrier));
  };
  const uint32_t my_key = kSharedBase + Plan::kKey + group * 64 * 128;
  const uint32_t my_value = kSharedBase + Plan::kValue + group * 64 * 128;
  const uint32_t my_sums = kSharedBase + Plan::kSums +
                           group * Plan::kBoxes / 2 * Plan::kBoxBytes +
                           warp * 16 * 128;
  // Half of the channels are whole blocks, or half of the only one.
  const uint32_t my_channels =
      kSharedBase + Plan::kKey +
      group * (Plan::kHeadBlocks > 1 ? Plan::kHeadBlocks / 2 * Plan::kKeyBlock
                                     : 64);
  RingPlace<Plan::kRecords> at;
  RingPlace<Plan::kStages> stage;
  uint32_t keys_round = 0, turn = 0, sums_round = 0;
  float dk[Plan::kHeadDim / 2], dv[Plan::kValueDim / 2];
  float pair[32], slope[32];
  uint32_t weight[4][4];
  const Bending bending(params.scale, Plan::kSoftcap ? params.softcap : 0.f);
  for (;;) {
    barrier_wait(shared_address(&small.record_ready[at.slot]), at.round);
    int left = small.record[at.slot].tiles;
    if (left < 0) break;
    int tile = last_tile(small.record[at.slot], Plan::kQueries);
    WorkColumns columns(small.record[at.slot]);
#pragma unroll
    for (int i = 0; i < Plan::kHeadDim / 2; ++i) dk[i] = 0.f;
#pragma unroll
    for (int i = 0; i < Plan::kValueDim / 2; ++i) dv[i] = 0.f;
    bool spoiled_keys = false;
    if (left > 0) {
      barrier_wait(shared_address(&small.keys_ready), keys_round);
      keys_round ^= 1;
      spoiled_keys =
          meet_any(kSearched, 256,
                   finds_spoiled<Plan::kType, Plan::kKeyBytes, 256>(
                       kSharedBase + Plan::kKey) |
                       finds_spoiled<Plan::kType, Plan::kValueBytes, 256>(
                           kSharedBase + Plan::kValue));
    }
    const auto query_of = [&](int slot) {
      return kSharedBase + Plan::kQuery + slot * Plan::kQueryBytes;
    };
    const auto dout_of = [&](int slot) {
      return kSharedBase + Plan::kDout + slot * Plan::kDoutBytes;
    };
    // A tile, of which some see a part alone if it is `cut`, and then may be
    // spoiled: weights and slopes of hidden pairs, which else are 0, are set to
    // it, and dq is mended.
    const auto run_tile = [&]<bool kSpoiled>(bool cut) {
      const uint32_t query = query_of(stage.slot), dout = dout_of(stage.slot);
      wgmma_fence();
      issue_pairs<Plan::kType, Plan::kHeadBlocks, Plan::kKeyBlock,
                  Plan::kQueryBlock>(pair, my_key, query);
      wgmma_commit();
      issue_pairs<Plan::kType, Plan::kValueBlocks, Plan::kKeyBlock,
                  Plan::kQueryBlock>(slope, my_value, dout);
      wgmma_commit();
      wgmma_wait<1>();
      pin(pair);
      // Weights, as the forward kernel found them.
      const float unit = bending.of(pair);
      if (cut) hide_some(pair, small.record[at.slot], tile, key, lane);
      const auto hide_operand = [&](uint32_t(&operand)[4][4]) {
        if constexpr (kSpoiled) {
          hide_some(operand, small.record[at.slot], tile, key, lane);
        }
      };
      const float* lse = small.lse[stage.slot] + 2 * (lane & 3);
      const float* delta = small.delta[stage.slot] + 2 * (lane & 3);
      if constexpr (!Plan::kSoftcap) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float2 sum = *reinterpret_cast<const float2*>(lse + 8 * j);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& x = pair[4 * j + i];
            x = exp2_fast(fmaf(x, unit, -(i & 1 ? sum.y : sum.x)));
          }
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          pack_operand<Plan::kType>(weight[k], pair, k);
        }
        hide_operand(weight);
        wgmma_fence();
        issue_sums<Plan::kType, Plan::kValueDim / 2, Plan::kQueryBlock>(
            dv, weight, dout);
        wgmma_commit();
        wgmma_wait<1>();
        pin(slope);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float2 mean = *reinterpret_cast<const float2*>(delta + 8 * j);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& x = slope[4 * j + i];
            x = pair[4 * j + i] *
                fmaf(x, params.scale, -(i & 1 ? mean.y : mean.x));
          }
        }
      } else {
        // Scores are still needed for the bend, so weights are made twice.
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
          float made[8];
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const float sum = lse[8 * (j + i / 4) + (i & 1)];
            made[i] = exp2_fast(fmaf(pair[4 * j + i], unit, -sum));
          }
          pack_operand<Plan::kType>(weight[j / 2], made, 0);
        }
        hide_operand(weight);
        wgmma_fence();
        issue_sums<Plan::kType, Plan::kValueDim / 2, Plan::kQueryBlock>(
            dv, weight, dout);
        wgmma_commit();
        wgmma_wait<1>();
        pin(slope);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float2 sum = *reinterpret_cast<const float2*>(lse + 8 * j);
          const float2 mean = *reinterpret_cast<const float2*>(delta + 8 * j);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float score = pair[4 * j + i];
            float& x = slope[4 * j + i];
            const float p =
                exp2_fast(fmaf(score, unit, -(i & 1 ? sum.y : sum.x)));
            // A hidden score is infinite, and its bend too.
            const float bent = fmaxf(fmaf(-score, score, 1.f), 0.f);
            x = p * bent * fmaf(x, params.scale, -(i & 1 ? mean.y : mean.x));
          }
        }
      }
      uint32_t operand[4][4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        pack_operand<Plan::kType>(operand[k], slope, k);
      }
      hide_operand(operand);
      float dq[Plan::kHeadDim / 4];
      const uint32_t slopes =
          kSharedBase + Plan::kSlopes + (turn & 1) * 2 * Plan::kSlopeBytes;
      ++turn;
      store_operand(slopes + group * Plan::kSlopeBytes, operand, warp, lane);
      fence_for_wgmma();
      meet(kSlopesWritten, 256);
      wgmma_fence();
      issue_query_sums<Plan>(dq, slopes, my_channels);
      wgmma_commit();
      issue_sums<Plan::kType, Plan::kHeadDim / 2, Plan::kQueryBlock>(
          dk, operand, query);
      wgmma_commit();
      wgmma_wait<1>();
      pin(dv);
      pin(dq);
      arrive(small.dout_free[stage.slot]);
      barrier_wait(shared_address(&small.sums_free), sums_round ^ 1);
      sums_round ^= 1;
      write_boxes<Plan::kBoxBytes>(dq, 1.f, my_sums, lane);
      if constexpr (kSpoiled) {
        __syncwarp();
        if (holds_spoiled(dq)) {
          sum_seen_keys<Plan>(slopes, small.record[at.slot], tile);
        }
      }
      fence_for_wgmma();
      __syncwarp();
      arrive(small.sums_ready);
      wgmma_wait<0>();
      pin(dk);
      arrive(small.query_free[stage.slot]);
      stage.advance();
      tile -= Plan::kQueries;
      --left;
    };
    // What is rare stands outside of the loop over tiles, whose instructions
    // are fetched again and again: beside them it cost 6 % of the time.
    bool spoiled = true;
    while (left > 0 && spoiled) {
      spoiled = false;
      while (left > 0) {
        if (tile < columns.first) {
          arrive(small.record_free[at.slot]);
          at.advance();
          barrier_wait(shared_address(&small.record_ready[at.slot]), at.round);
          tile = last_tile(small.record[at.slot], Plan::kQueries);
          columns = WorkColumns(small.record[at.slot]);
        }
        barrier_wait_both(
            shared_address(&small.query_ready[stage.slot]), stage.round,
            shared_address(&small.dout_ready[stage.slot]), stage.round);
        const bool cut = !columns.all_see(tile, Plan::kQueries);
        if (cut) {
          spoiled =
              meet_any(kSearched, 256,
                       spoiled_keys |
                           finds_spoiled_queries<Plan>(
                               query_of(stage.slot), dout_of(stage.slot),
                               small.lse[stage.slot], small.delta[stage.slot]));
          if (spoiled) break;
        }
        run_tile.template operator()<false>(cut);
      }
      if (spoiled) {
        add_seen_spoiled<Plan::kType>(dv, dout_of(stage.slot),
                                      small.record[at.slot], tile, key);
        clear_spoiled_queries<Plan>(kSearched, query_of(stage.slot),
                                    dout_of(stage.slot), small.lse[stage.slot],
                                    small.delta[stage.slot]);
        run_tile.template operator()<true>(true);
      }
    }
    const WorkRecord& record = small.record[at.slot];
    if (record.tiles > 0) arrive(small.keys_free);
    const int key_head =
        (record.head + params.head_offset) / params.heads_per_key_head;
    const HeadsInTurn turn(params, small.turn[at.slot].block, record.head,
                           key_head);
    turn.wait(lane);
    store_sums<Plan::kType>(dk, 1.f, params.dk, record, key_head, key, lane);
    store_sums<Plan::kType>(dv, 1.f, params.dv, record, key_head, key, lane);
    __syncwarp();  // all lanes have read the record
    turn.pass_on(lane);
    arrive(small.record_free[at.slot]);
    at.advance();
  }
}

template <class Plan>
__global__ void __launch_bounds__(Plan::kThreads, 1)
    dense_keys_kernel(const __grid_constant__ DenseKeysParams params) {
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
      init(small.record_free[i], Plan::kConsumerWarps + 3);
    }
    init(small.sums_ready, Plan::kConsumerWarps);
    init(small.sums_free, 1);
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
    } else if (warp == 3 && threadIdx.x % 32 == 0) {
      add_queries<Plan>(params, small, base);
    }
  } else {
    take_registers<240>();
    // ptxas counts with these registers only behind a branch.
    if (params.block_count > 0) derive_keys<Plan>(params, small, group);
  }
}

template <class Plan>
cudaError_t launch_dense_keys(const DenseKeysParams& params, int processors,
                              cudaStream_t stream) {
  return ampere::launch(dense_keys_kernel<Plan>,
                        std::min(params.items(), processors), Plan::kThreads,
                        Plan::kSharedBytes, stream, params);
}

}  // namespace longspan::hopper
