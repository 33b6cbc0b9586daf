#pragma once

#include "longspan/kernels/attention/hopper/backward/store.cuh"
#include "longspan/kernels/attention/hopper/bend.cuh"
#include "longspan/kernels/common/hopper/tma.cuh"

namespace longspan::hopper {

/// Which block of keys an item is, and for which heads.
struct KeysItem {
  int block;
  SharingHeads heads;
  __device__ KeysItem(const DenseKeysParams& params, int item)
      : block(0), heads(params, 0) {
    const int alone = params.apart * params.heads;
    if (item < alone) {
      const DenseItem what(item, params.apart, params.heads,
                           params.section_heads);
      block = what.block;
      heads.first = what.head;
      heads.last = what.head + 1;
      return;
    }
    const DenseItem what(item - alone, params.block_count - params.apart,
                         params.key_heads, params.section_key_heads);
    block = params.apart + what.block;
    heads = SharingHeads(params, what.head);
  }
};

__device__ __forceinline__ void write_turn(TurnRecord& record,
                                           const DenseKeysParams& params,
                                           int block, int still_from) {
  record.block = block;
  if (params.turns == nullptr) return;
  record.turn = params.turns[block];
  record.still_from = still_from;
  if (still_from > 0) record.turn.hands_on = WorkTurn::kNever;
}

/// One warp: takes items until there are no more, and writes their parts down.
template <class Plan>
__device__ void deal_keys(const DenseKeysParams& params,
                          typename Plan::Small& small, int lane) {
  RingPlace<Plan::kRecords> at;
  const int items = params.items();
  for (;;) {
    int item = 0;
    if (lane == 0) item = atomicAdd(params.next_item, 1);
    item = __shfl_sync(~0u, item, 0);
    if (item >= items) break;
    const KeysItem what(params, item);
    const WorkBlock block = params.blocks[what.block];
    const SharingHeads heads = what.heads;
    const int count = heads.last - heads.first;
    const int together = Plan::kWithQueries && block.tiles > 0 ? 1 : count;
    for (int head = heads.first; head < heads.last; head += together) {
      for (int i = 0; i < block.parts; ++i) {
        WorkPart part = params.parts[block.first_part + i];
        // dq is summed over all rows of a block, so those past its end, keys
        // of another one, must be hidden from every query.
        if (Plan::kWithQueries && part.queries < Plan::kKeys) {
          part.full_last = part.full_first;
        }
        barrier_wait(shared_address(&small.record_free[at.slot]), at.round ^ 1);
        if constexpr (Plan::kWithQueries) {
          const int later = block.first_part + i + 1;
          if (lane == 0) {
            write_turn(small.turn[at.slot], params, what.block,
                       i + 1 < block.parts ? params.parts[later].last_key : 0);
          }
        }
        write_record(small.record[at.slot], part, params.lines,
                     block.tiles * count, head, together, lane);
        barrier_arrive(shared_address(&small.record_ready[at.slot]));
        at.advance();
      }
    }
  }
  barrier_wait(shared_address(&small.record_free[at.slot]), at.round ^ 1);
  if (lane == 0) small.record[at.slot].tiles = -1;
  barrier_arrive(shared_address(&small.record_ready[at.slot]));
}

/// One thread: asks for keys, queries and what came back to them.
template <class Plan>
__device__ void fetch_queries(const DenseKeysParams& params,
                              typename Plan::Small& small, uint32_t base) {
  RingPlace<Plan::kRecords> at;
  RingPlace<Plan::kStages> stage;
  uint32_t keys_round = 0;
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
    if (left == 0 && record.tiles > 0) {
      left = record.tiles;
      const int key_head =
          (head + params.head_offset) / params.heads_per_key_head;
      const uint32_t ready = shared_address(&small.keys_ready);
      barrier_wait(shared_address(&small.keys_free), keys_round ^ 1);
      keys_round ^= 1;
      barrier_expect(ready, Plan::kKeyBytes + Plan::kValueBytes);
      for (int c = 0; c < Plan::kHeadBlocks; ++c) {
        fetch_box(base + Plan::kKey + c * Plan::kKeyBlock, &params.k, ready,
                  64 * c, record.first_row, key_head, row);
      }
      for (int c = 0; c < Plan::kValueBlocks; ++c) {
        fetch_box(base + Plan::kValue + c * Plan::kKeyBlock, &params.v, ready,
                  64 * c, record.first_row, key_head, row);
      }
    }
    const int first = record.first_column;
    int each = 0;
    for (int query = last_tile(record, Plan::kQueries); query >= first;) {
      const auto bring = [&](const CUtensorMap& map, uint64_t& free_at,
                             uint64_t& ready_at, uint32_t to, int blocks) {
        const uint32_t ready = shared_address(&ready_at);
        barrier_wait(shared_address(&free_at), stage.round ^ 1);
        barrier_expect(ready, blocks * Plan::kQueryBlock);
        for (int c = 0; c < blocks; ++c) {
          fetch_box(base + to + c * Plan::kQueryBlock, &map, ready, 64 * c,
                    query, head + each, row);
        }
      };
      bring(params.q, small.query_free[stage.slot],
            small.query_ready[stage.slot],
            Plan::kQuery + stage.slot * Plan::kQueryBytes, Plan::kHeadBlocks);
      bring(params.dout, small.dout_free[stage.slot],
            small.dout_ready[stage.slot],
            Plan::kDout + stage.slot * Plan::kDoutBytes, Plan::kValueBlocks);
      stage.advance();
      --left;
      if (++each == record.heads) {
        each = 0;
        query -= Plan::kQueries;
      }
    }
    barrier_arrive(shared_address(&small.record_free[at.slot]));
    at.advance();
  }
}

/// One warp: brings the two numbers of each query of a tile, with the barriers
/// of the queries.
template <class Plan>
__device__ void fetch_numbers(const DenseKeysParams& params,
                              typename Plan::Small& small, uint64_t* ready,
                              uint64_t* free, int lane) {
  RingPlace<Plan::kRecords> at;
  RingPlace<Plan::kStages> stage;
  for (;;) {
    barrier_wait(shared_address(&small.record_ready[at.slot]), at.round);
    const auto& record = small.record[at.slot];
    if (record.tiles < 0) return;
    const int64_t row = record.row, head = record.head;
    const float* lse =
        params.lse.data + row * params.lse.row + head * params.lse.head;
    const float* delta =
        params.delta.data + row * params.delta.row + head * params.delta.head;
    const int end = record.first_column;
    int each = 0;
    for (int first = last_tile(record, Plan::kQueries); first >= end;) {
      float found[2][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t query = first + lane + 32 * i;
        const bool there = query < params.queries;
        const float sum =
            there ? lse[query * params.lse.token + each * params.lse.head]
                  : 0.f;
        // Weights of a query that saw nothing, or only infinities, are 0; of
        // one that is not there it does not matter: its dout is 0, and its q.
        found[i][0] = isinf(sum) ? INFINITY : sum * kLog2e;
        found[i][1] =
            there ? delta[query * params.delta.token + each * params.delta.head]
                  : 0.f;
      }
      barrier_wait(shared_address(&free[stage.slot]), stage.round ^ 1);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        small.lse[stage.slot][lane + 32 * i] = found[i][0];
        small.delta[stage.slot][lane + 32 * i] =
            Plan::kWithQueries ? params.scale * found[i][1] : found[i][1];
      }
      barrier_arrive(shared_address(&ready[stage.slot]));
      stage.advance();
      if (++each == record.heads) {
        each = 0;
        first -= Plan::kQueries;
      }
    }
    if (lane == 0) barrier_arrive(shared_address(&small.record_free[at.slot]));
    at.advance();
  }
}

/// The columns of a block and a head to which a thread adds, from the last one
/// on, when it is their turn. Whom a block waits for was dealt before it.
struct ColumnsInTurn {
  const TurnRecord& record;
  int *mine, *before;
  int seen = 0;  // of those before

  __device__ ColumnsInTurn(const DenseKeysParams& params,
                           const TurnRecord& record, int head)
      : record(record), mine(nullptr), before(nullptr) {
    if (params.turns == nullptr) return;
    int* const of_head =
        params.added + static_cast<int64_t>(head) * params.block_count;
    mine = of_head + record.block;
    if (record.turn.before >= 0) before = of_head + record.turn.before;
  }

  __device__ void wait_for(int column) {
    const int wanted = WorkTurn::kNever - column;
    if (before == nullptr || seen >= wanted ||
        column >= record.turn.alone_from) {
      return;
    }
    seen = wait_for_number(before, wanted);
  }
  /// All copies of the thread are done first.
  __device__ void tell(int column) const {
    if (mine == nullptr) return;
    boxes_wait();
    tell_number(mine, WorkTurn::kNever - max(column, record.still_from));
  }
  /// After the last tile.
  __device__ void hand_on() {
    if (mine == nullptr || record.turn.hands_on == WorkTurn::kNever) return;
    wait_for(record.turn.hands_on);
    tell(record.turn.hands_on);
  }
};

/// One thread: has the copy engine add dq of a tile, which all warps wrote
/// down. Queries past the part get zeros from these keys.
template <class Plan>
__device__ void add_queries(const DenseKeysParams& params,
                            typename Plan::Small& small, uint32_t base) {
  RingPlace<Plan::kRecords> at;
  uint32_t round = 0;
  prefetch_map(&params.dq);
  for (;;) {
    barrier_wait(shared_address(&small.record_ready[at.slot]), at.round);
    const auto& record = small.record[at.slot];
    if (record.tiles < 0) break;
    ColumnsInTurn turn(params, small.turn[at.slot], record.head);
    for (int tile = last_tile(record, Plan::kQueries);
         tile >= record.first_column; tile -= Plan::kQueries) {
      barrier_wait(shared_address(&small.sums_ready), round);
      round ^= 1;
      turn.wait_for(tile);
      for (int c = 0; c < Plan::kBoxes; ++c) {
        add_box(&params.dq, base + Plan::kSums + c * Plan::kBoxBytes, 32 * c,
                tile, record.head, record.row);
      }
      boxes_commit();
      boxes_wait_read();
      barrier_arrive(shared_address(&small.sums_free));
      turn.tell(tile);
    }
    turn.hand_on();
    barrier_arrive(shared_address(&small.record_free[at.slot]));
    at.advance();
  }
  boxes_wait();
}

}  // namespace longspan::hopper
