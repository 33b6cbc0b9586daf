#pragma once

#include "longspan/kernels/attention/hopper/forward/config.h"
#include "longspan/kernels/attention/hopper/records.cuh"
#include "longspan/kernels/common/hopper/tma.cuh"

namespace longspan::hopper {

// ---- Deal ----------------------------------------------------------------

/// One warp: takes items until there are no more, and writes their parts down.
/// An item is a block and `together` heads.
/// Asks for the next one before it writes: the answer takes some 700 cycles.
template <class Plan, class Params>
__device__ void deal(const Params& params, typename Plan::Small& small,
                     int lane, int together = 1) {
  RingPlace<Plan::kRecords> at;
  const int items = params.block_count * (params.heads / together);
  int next = lane == 0 ? atomicAdd(params.next_item, 1) : 0;
  for (;;) {
    const int item = __shfl_sync(~0u, next, 0);
    if (item >= items) break;
    if (lane == 0) next = atomicAdd(params.next_item, 1);
    const DenseItem what(item, params.block_count, params.heads / together,
                         params.section_heads / together);
    const WorkBlock block = params.blocks[what.block];
    for (int i = 0; i < block.parts; ++i) {
      const WorkPart part = params.parts[block.first_part + i];
      barrier_wait(shared_address(&small.record_free[at.slot]), at.round ^ 1);
      write_record(small.record[at.slot], part, params.lines, block.tiles,
                   what.head * together, together, lane,
                   Plan::kQueries / together);
      barrier_arrive(shared_address(&small.record_ready[at.slot]));
      at.advance();
    }
  }
  barrier_wait(shared_address(&small.record_free[at.slot]), at.round ^ 1);
  if (lane == 0) small.record[at.slot].tiles = -1;
  barrier_arrive(shared_address(&small.record_ready[at.slot]));
}

// ---- Load ----------------------------------------------------------------

/// One thread: asks for queries, keys and values in the order of their use.
template <class Plan>
__device__ void fetch(const DenseForwardParams& params,
                      typename Plan::Small& small, uint32_t base) {
  RingPlace<Plan::kRecords> at;
  RingPlace<Plan::kQueryStages> query;
  RingPlace<Plan::kStages> stage;
  prefetch_map(&params.q);
  prefetch_map(&params.k);
  prefetch_map(&params.v);
  int left = 0;  // tiles of this item
  for (;;) {
    barrier_wait(shared_address(&small.record_ready[at.slot]), at.round);
    const auto& record = small.record[at.slot];
    if (record.tiles < 0) return;
    const int row = record.row, head = record.head;
    const int key_head =
        (head + params.head_offset) / params.heads_per_key_head;
    if (left == 0 && record.tiles > 0) {
      left = record.tiles;
      const uint32_t ready = shared_address(&small.query_ready[query.slot]);
      barrier_wait(shared_address(&small.query_free[query.slot]),
                   query.round ^ 1);
      barrier_expect(ready, Plan::kQueryBytes);
      for (int c = 0; c < Plan::kHeadBlocks; ++c) {
        fetch_box(base + Plan::kQuery + query.slot * Plan::kQueryBytes +
                      c * Plan::kQueryBlock,
                  &params.q, ready, 64 * c, record.first_row, head, row);
      }
      query.advance();
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
      // So that who searches misses none.
      barrier_wait(shared_address(&small.value_searched[stage.slot]),
                   stage.round ^ 1);
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

}  // namespace longspan::hopper
