#pragma once

#include <algorithm>

#include "longspan/kernels/attention/hopper/backward/deal.cuh"
#include "longspan/kernels/attention/hopper/backward/queries.cuh"
#include "longspan/kernels/attention/hopper/backward/spoiled.cuh"
#include "longspan/kernels/attention/hopper/backward/store.cuh"
#include "longspan/kernels/attention/hopper/backward/widest_config.h"
#include "longspan/kernels/common/ampere/launch.h"
#include "longspan/kernels/common/hopper/wgmma.cuh"

namespace longspan::hopper {

/// What is a row and what a column.
template <class Plan>
struct Sides {
  const CUtensorMap *row, *row_value, *column, *column_value;
  __device__ explicit Sides(const typename Plan::Params& params)
      : row(Plan::kByKeys ? &params.k : &params.q),
        row_value(Plan::kByKeys ? &params.v : &params.dout),
        column(Plan::kByKeys ? &params.q : &params.k),
        column_value(Plan::kByKeys ? &params.dout : &params.v) {}
};

/// The tiles of a part: of keys, forwards; of queries backwards, and each of
/// them for all heads that use the keys.
template <class Plan>
struct Walk {
  int tile, head = 0;
  template <class Record>
  __device__ explicit Walk(const Record& record)
      : tile(Plan::kByKeys ? last_tile(record, Plan::kColumns)
                           : record.first_column) {}
  template <class Record>
  __device__ bool is_over(const Record& record) const {
    return Plan::kByKeys ? tile < record.first_column
                         : tile >= record.last_column;
  }
  template <class Record>
  __device__ void advance(const Record& record) {
    if constexpr (!Plan::kByKeys) {
      tile += Plan::kColumns;
    } else if (++head == record.heads) {
      head = 0;
      tile -= Plan::kColumns;
    }
  }
};

// ---- Load ----------------------------------------------------------------

/// One thread: asks for rows, then for columns. Where a tile's column is scored
/// and summed, the slot is free when its last sum is made: what is beside it in
/// the tile goes first, as far as there is room.
template <class Plan>
__device__ void fetch_widest(const typename Plan::Params& params,
                             typename Plan::Small& small, uint32_t base) {
  const Sides<Plan> sides(params);
  RingPlace<Plan::kRecords> at;
  RingPlace<Plan::kSlots> value;
  uint32_t rows_round = 0, column_round = 0;
  prefetch_map(sides.row);
  prefetch_map(sides.column);
  prefetch_map(sides.column_value);
  if (Plan::kSlopes) prefetch_map(sides.row_value);
  int left = 0;  // tiles of this item
  for (;;) {
    barrier_wait(shared_address(&small.record_ready[at.slot]), at.round);
    const auto& record = small.record[at.slot];
    if (record.tiles < 0) return;
    const int row = record.row, head = record.head;
    const int key_head =
        (head + params.head_offset) / params.heads_per_key_head;
    const auto bring = [&](uint32_t to, const CUtensorMap* map, uint32_t ready,
                           int first, int last, int token, int which) {
      for (int c = first; c < last; ++c) {
        fetch_box(to + (c - first) * Plan::kBlock, map, ready, 64 * c, token,
                  which, row);
      }
    };
    if (left == 0 && record.tiles > 0) {
      left = record.tiles;
      const int which = Plan::kByKeys ? key_head : head;
      const uint32_t ready = shared_address(&small.rows_ready);
      barrier_wait(shared_address(&small.rows_free), rows_round ^ 1);
      rows_round ^= 1;
      barrier_expect(ready, (Plan::kSlopes ? 2 : 1) * Plan::kTile);
      if (Plan::kSlopes) {
        bring(base + Plan::kRowValue, sides.row_value, ready, 0, Plan::kBlocks,
              record.first_row, which);
      }
      bring(base + Plan::kRow, sides.row, ready, 0, Plan::kBlocks,
            record.first_row, which);
    }
    for (Walk<Plan> walk(record); !walk.is_over(record); walk.advance(record)) {
      const int which = Plan::kByKeys ? head + walk.head : key_head;
      const auto bring_values = [&](int first, int last) {
        for (int c = first; c < last; c += Plan::kSlotBlocks) {
          const uint32_t ready = shared_address(&small.value_ready[value.slot]);
          barrier_wait(shared_address(&small.value_free[value.slot]),
                       value.round ^ 1);
          barrier_expect(ready, Plan::kSlotBlocks * Plan::kBlock);
          bring(base + Plan::kValue +
                    value.slot * Plan::kSlotBlocks * Plan::kBlock,
                sides.column_value, ready, c, c + Plan::kSlotBlocks, walk.tile,
                which);
          value.advance();
        }
      };
      constexpr int kAhead = Plan::kSlopes ? Plan::kSlots : 0;
      bring_values(0, kAhead);
      const uint32_t ready = shared_address(&small.column_ready[0]);
      barrier_wait(shared_address(&small.column_free[0]), column_round ^ 1);
      column_round ^= 1;
      barrier_expect(ready, Plan::kTile);
      bring(base + Plan::kColumn, sides.column, ready, 0, Plan::kBlocks,
            walk.tile, which);
      bring_values(kAhead, Plan::kBlocks);
      --left;
    }
    barrier_arrive(shared_address(&small.record_free[at.slot]));
    at.advance();
  }
}

// ---- Products ------------------------------------------------------------

/// pairs (+)= a b^T over one block of 64 channels: 64 rows, 32 columns.
template <ElementType kType>
__device__ __forceinline__ void issue_block(float (&pairs)[16], uint64_t a,
                                            uint64_t b, bool adds) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    wgmma<0, 0, kType>(pairs, a + (k * 32 >> 4), b + (k * 32 >> 4),
                       adds || k > 0 ? 1 : 0);
  }
}

/// sums += pairs x: 64 rows, 256 channels, over 64 columns.
template <ElementType kType>
__device__ __forceinline__ void issue_widest_sums(float (&sums)[128],
                                                  uint32_t pairs, uint32_t x) {
  const uint64_t a = along_channels(pairs);
  const uint64_t b = across_channels(x, 64 * 128);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    wgmma<0, 1, kType>(sums, a + (k * 32 >> 4), b + (k * 2048 >> 4));
  }
}

// ---- A warpgroup of arithmetic -------------------------------------------

/// What the forward pass said of the queries of a thread's pairs, which are its
/// two rows or its columns: lse in powers of two, and delta.
template <class Plan>
struct PairFacts {
  QueryFacts of_rows;
  __device__ PairFacts(const typename Plan::Params& params,
                       const typename Plan::Small& small, int slot, int row)
      : of_rows(params, small.record[slot], row) {}
  __device__ float2 operator()(const typename Plan::Small&, int, int i) const {
    return make_float2(of_rows.lse[i / 2 & 1], of_rows.delta[i / 2 & 1]);
  }
};
template <class Plan>
  requires(Plan::kByKeys)
struct PairFacts<Plan> {
  __device__ PairFacts(const typename Plan::Params&,
                       const typename Plan::Small&, int, int) {}
  __device__ float2 operator()(const typename Plan::Small& small, int column,
                               int i) const {
    const int at = column + 8 * (i / 4) + (i & 1);
    return make_float2(small.lse[0][at], small.delta[0][at]);
  }
};

/// Barriers by number: both warpgroups have written what is summed; both have
/// found what is not finite.
enum WidestMeeting { kPairsWritten = 1, kSpoiledColumnsFound };

template <class Plan>
__device__ __forceinline__ void derive_widest(
    const typename Plan::Params& params, typename Plan::Small& small,
    int group) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const int row = 16 * warp + lane / 4;
  const int column = Plan::kMyColumns * group;  // of a tile, the first of mine
  const auto arrive = [&](uint64_t& barrier) {
    if (lane == 0) barrier_arrive(shared_address(&barrier));
  };
  const uint64_t rows = along_channels(kSharedBase + Plan::kRow);
  const uint64_t row_values = along_channels(kSharedBase + Plan::kRowValue);
  const uint64_t columns =
      along_channels(kSharedBase + Plan::kColumn + column * 128);
  const uint32_t summed =
      kSharedBase + Plan::kSummed + group * (Plan::kTile / 2);
  RingPlace<Plan::kRecords> at;
  RingPlace<Plan::kSlots> value;
  RingPlace<Plan::kPairSlots> pairs;
  uint32_t rows_round = 0, column_round = 0;
  float sums[Plan::kMyDim / 2];
  float pair[16], slope[16];
  for (;;) {
    barrier_wait(shared_address(&small.record_ready[at.slot]), at.round);
    int left = small.record[at.slot].tiles;
    if (left < 0) return;
    const PairFacts<Plan> facts(params, small, at.slot, row);
    Walk<Plan> walk(small.record[at.slot]);
#pragma unroll
    for (int i = 0; i < Plan::kMyDim / 2; ++i) sums[i] = 0.f;
    if (left > 0) {
      barrier_wait(shared_address(&small.rows_ready), rows_round);
      rows_round ^= 1;
    }
    for (; left > 0; --left) {
      if (walk.is_over(small.record[at.slot])) {
        arrive(small.record_free[at.slot]);
        at.advance();
        barrier_wait(shared_address(&small.record_ready[at.slot]), at.round);
        walk = Walk<Plan>(small.record[at.slot]);
      }
      int last = 0;  // the slot of the block before
      if constexpr (Plan::kSlopes) {
#pragma unroll
        for (int c = 0; c < Plan::kBlocks; ++c) {
          barrier_wait(shared_address(&small.value_ready[value.slot]),
                       value.round);
          wgmma_fence();
          issue_block<Plan::kType>(
              slope, row_values + (c * Plan::kBlock >> 4),
              along_channels(kSharedBase + Plan::kValue +
                             value.slot * Plan::kBlock + column * 128),
              c > 0);
          wgmma_commit();
          if (c > 0) {
            wgmma_wait<1>();
            arrive(small.value_free[last]);
          }
          last = value.slot;
          value.advance();
        }
      }
      barrier_wait(shared_address(&small.column_ready[0]), column_round);
      column_round ^= 1;
      wgmma_fence();
#pragma unroll
      for (int c = 0; c < Plan::kBlocks; ++c) {
        issue_block<Plan::kType>(pair, rows + (c * Plan::kBlock >> 4),
                                 columns + (c * Plan::kBlock >> 4), c > 0);
      }
      wgmma_commit();
      if constexpr (Plan::kSlopes) {
        wgmma_wait<1>();
        pin(slope);
        arrive(small.value_free[last]);
      }
      wgmma_wait<0>();
      pin(pair);
      if (left == 1) arrive(small.rows_free);
      const bool all_see =
          WorkColumns(small.record[at.slot]).all_see(walk.tile, Plan::kColumns);
      // A column that is summed leaves its trace in scores of one warpgroup,
      // which tells the other. Of dout both have suspects.
      SuspectQueries suspects;
      if (!all_see) {
        if constexpr (Plan::kSlopes) {
          if (holds_spoiled(pair) && lane == 0) {
            small.spoiled_at[column_round] = left;
          }
        } else {
          suspects = SuspectQueries(small.lse[0], small.delta[0], lane);
        }
      }
      const float unit =
          bend(pair, params.scale, Plan::kSoftcap ? params.softcap : 0.f);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float2 fact = facts(small, column + 2 * (lane & 3), i);
        const float score = pair[i];
        pair[i] = exp2_fast(fmaf(score, unit, -fact.x));
        if constexpr (Plan::kSlopes) {
          // A bent score may exceed 1 by a last bit.
          const float bent =
              Plan::kSoftcap ? fmaxf(fmaf(-score, score, 1.f), 0.f) : 1.f;
          pair[i] *= bent * (slope[i] - fact.y);
        }
      }
      uint32_t operand[2][4];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        pack_operand<Plan::kType>(operand[k], pair, k);
      }
      if (!all_see) {
        hide_some(operand, small.record[at.slot], walk.tile + column, row,
                  lane);
      }
      const uint32_t place =
          kSharedBase + Plan::kPairs + pairs.slot * Plan::kBlock;
      pairs.advance();
      store_operand(place, operand, warp, lane, 2 * group);
      fence_for_wgmma();
      if constexpr (!Plan::kSlopes) {
        arrive(small.column_free[0]);
        barrier_wait(shared_address(&small.value_ready[0]), value.round);
      }
      meet(kPairsWritten, 256);
      if (!all_see) {
        bool spoiled;
        if constexpr (Plan::kSlopes) {
          spoiled = small.spoiled_at[column_round] == left;
        } else {
          spoiled =
              suspects.any() && finds_spoiled<Plan::kType, Plan::kHeadDim>(
                                    kSharedBase + Plan::kSummed, suspects);
        }
        if (spoiled) [[unlikely]] {
          add_seen_spoiled<Plan::kType>(sums, summed, small.record[at.slot],
                                        walk.tile, row);
          clear_spoiled_together<Plan::kType, Plan::kTile>(
              kSpoiledColumnsFound, kSharedBase + Plan::kSummed);
        }
      }
      wgmma_fence();
      issue_widest_sums<Plan::kType>(sums, place, summed);
      wgmma_commit();
      wgmma_wait<0>();
      pin(sums);
      if constexpr (Plan::kSlopes) {
        arrive(small.column_free[0]);
      } else {
        arrive(small.value_free[0]);
        value.advance();
      }
      walk.advance(small.record[at.slot]);
    }
    const auto& record = small.record[at.slot];
    const int first = Plan::kMyDim * group;  // channel
    const auto store = [&](GradientPlace place, float scale, int head) {
      place.data = static_cast<std::byte*>(place.data) +
                   first * (place.is_float ? sizeof(float) : 2);
      place.channels -= first;
      store_sums<Plan::kType>(sums, scale, place, record, head, row, lane);
    };
    if constexpr (Plan::kByKeys) {
      const int key_head =
          (record.head + params.head_offset) / params.heads_per_key_head;
      if constexpr (Plan::kSlopes) {
        store(params.dk, params.scale, key_head);
      } else {
        store(params.dv, 1.f, key_head);
      }
    } else {
      store(params.dq, params.scale, record.head);
    }
    __syncwarp();  // all lanes have read the record
    arrive(small.record_free[at.slot]);
    at.advance();
  }
}

template <class Plan>
__global__ void __launch_bounds__(Plan::kThreads, 1)
    widest_kernel(const __grid_constant__ typename Plan::Params params) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& small = *reinterpret_cast<typename Plan::Small*>(memory + Plan::kSmall);
  const uint32_t base = shared_address(memory);
  check_shared_base(base);
  if (threadIdx.x == 0) {
    const auto init = [](uint64_t& barrier, int arrivals) {
      barrier_init(shared_address(&barrier), arrivals);
    };
    init(small.rows_ready, 1);
    init(small.rows_free, Plan::kConsumerWarps);
    init(small.column_ready[0], Plan::kByKeys ? 1 + 32 : 1);
    init(small.column_free[0], Plan::kConsumerWarps);
    for (int i = 0; i < Plan::kSlots; ++i) {
      init(small.value_ready[i], 1);
      init(small.value_free[i], Plan::kConsumerWarps);
    }
    for (int i = 0; i < Plan::kRecords; ++i) {
      init(small.record_ready[i], 32);
      init(small.record_free[i],
           Plan::kConsumerWarps + (Plan::kByKeys ? 2 : 1));
    }
    small.spoiled_at[0] = small.spoiled_at[1] = 0;
    barrier_init_fence();
  }
  __syncthreads();
  const int group = threadIdx.x / 128;
  if (group == 2) {
    give_registers<24>();
    const int warp = threadIdx.x % 128 / 32;
    if (warp == 0) {
      if constexpr (Plan::kByKeys) {
        deal_keys<Plan>(params, small, threadIdx.x % 32);
      } else {
        deal<Plan>(params, small, threadIdx.x % 32);
      }
    } else if (Plan::kByKeys && warp == 1) {
      if constexpr (Plan::kByKeys) {
        fetch_numbers<Plan>(params, small, small.column_ready,
                            small.column_free, threadIdx.x % 32);
      }
    } else if (warp == 2 && threadIdx.x % 32 == 0) {
      fetch_widest<Plan>(params, small, base);
    }
  } else {
    take_registers<240>();
    // ptxas counts with these registers only behind a branch.
    if (params.block_count > 0) derive_widest<Plan>(params, small, group);
  }
}

template <class Plan>
cudaError_t launch_widest(const typename Plan::Params& params, int processors,
                          cudaStream_t stream) {
  const int64_t heads = [&] {
    if constexpr (Plan::kByKeys) {
      return params.key_heads;
    } else {
      return params.heads;
    }
  }();
  return ampere::launch(
      widest_kernel<Plan>,
      std::min<int64_t>(params.block_count * heads, processors), Plan::kThreads,
      Plan::kSharedBytes, stream, params);
}

}  // namespace longspan::hopper
