#pragma once

#include <algorithm>

#include "longspan/kernels/attention/hopper/bend.cuh"
#include "longspan/kernels/attention/hopper/forward/answer.cuh"
#include "longspan/kernels/attention/hopper/forward/deal.cuh"
#include "longspan/kernels/attention/hopper/forward/spoiled.cuh"
#include "longspan/kernels/attention/hopper/forward/widest_config.h"
#include "longspan/kernels/common/ampere/launch.h"
#include "longspan/kernels/common/hopper/fragment.cuh"
#include "longspan/kernels/common/hopper/wgmma.cuh"

namespace longspan::hopper {

/// The slots of an item: keys of its tile 0; for each further tile its keys and
/// the values of the tile before; values of the last tile. Values come as 32
/// keys of the left half, of the right half, and the other 32 keys of both.

// ---- Load ----------------------------------------------------------------

/// One thread: asks for queries, keys and values in the order of their use.
template <class Plan>
struct WidestFetcher {
  const DenseForwardParams& params;
  typename Plan::Small& small;
  const uint32_t base;
  RingPlace<Plan::kSlots> slot = {};
  int row = 0, head = 0, key_head = 0;  // of the item

  /// The slot of the next piece, which warpgroup `user` waits for.
  template <class Bring>
  __device__ void fill(int user, const Bring& bring) {
    const uint32_t ready = shared_address(&small.slot_ready[user][slot.slot]);
    barrier_wait(shared_address(&small.slot_free[slot.slot]), slot.round ^ 1);
    barrier_expect(ready, Plan::kSlot);
    bring(base + Plan::kRing + slot.slot * Plan::kSlot, ready);
    slot.advance();
  }

  __device__ void bring_queries(int first, uint32_t round) {
    const uint32_t ready = shared_address(&small.query_ready);
    barrier_wait(shared_address(&small.query_free), round ^ 1);
    barrier_expect(ready, Plan::kQueryBytes);
    for (int c = 0; c < Plan::kHeadBlocks; ++c) {
      fetch_box(base + Plan::kQuery + c * Plan::kQueryBlock, &params.q, ready,
                64 * c, first, head, row);
    }
  }

  __device__ void bring_keys(int key, int scorer) {
    for (int piece = 0; piece < Plan::kKeyPieces; ++piece) {
      fill(scorer, [&](uint32_t to, uint32_t ready) {
        for (int c = 0; c < Plan::kKeyBlocks; ++c) {
          fetch_box(to + c * Plan::kKeyBlock, &params.k, ready,
                    64 * (piece * Plan::kKeyBlocks + c), key, key_head, row);
        }
      });
    }
  }

  __device__ void bring_values(int key) {
    for (int piece = 0; piece < Plan::kValuePieces; ++piece) {
      const int half = piece % 2;
      fill(half, [&](uint32_t to, uint32_t ready) {
        for (int c = 0; c < Plan::kValueBlocks; ++c) {
          fetch_box(to + c * Plan::kValueBlock, &params.v, ready,
                    half * Plan::kMyValueDim + 64 * c,
                    key + piece / 2 * Plan::kValueKeys, key_head, row);
        }
      });
    }
  }

  __device__ void run() {
    RingPlace<Plan::kRecords> at;
    uint32_t query_round = 0;
    prefetch_map(&params.q);
    prefetch_map(&params.k);
    prefetch_map(&params.v);
    int tile = 0, tiles = 0;  // of this item
    int before = 0;           // where the last tile began
    for (;;) {
      barrier_wait(shared_address(&small.record_ready[at.slot]), at.round);
      const auto& record = small.record[at.slot];
      if (record.tiles < 0) return;
      if (tile == tiles && record.tiles > 0) {
        tile = 0;
        tiles = record.tiles;
        row = record.row;
        head = record.head;
        key_head = (head + params.head_offset) / params.heads_per_key_head;
        bring_queries(record.first_row, query_round);
        query_round ^= 1;
      }
      for (int key = record.first_column; key < record.last_column;
           key += Plan::kKeys) {
        bring_keys(key, tile % 2);
        if (tile > 0) bring_values(before);
        before = key;
        if (++tile == tiles) bring_values(before);
      }
      barrier_arrive(shared_address(&small.record_free[at.slot]));
      at.advance();
    }
  }
};

// ---- A warpgroup of arithmetic -------------------------------------------

/// Barriers by number: the weights of an even tile are written, of an odd one;
/// a warpgroup by itself; both have told their sums.
enum WidestForwardMeeting { kWritten0 = 1, kWritten1, kAlone0, kAlone1, kSums };

/// What a thread holds: half of the values of two queries, the left one in
/// warpgroup 0.
template <class Plan, int kGroup>
struct WidestWorker {
  const DenseForwardParams& params;
  typename Plan::Small& small;
  const int lane, query;
  float out[Plan::kMyValueDim / 2];
  float score[Plan::kKeys / 2];
  uint32_t weight[Plan::kKeys / 16][4];
  RunningSoftmax softmax;
  int slot = 0;         // of the ring
  uint32_t rounds = 0;  // bit s: of slot s of mine
  RingPlace<Plan::kRecords> at = {};
  int tile = 0, last = 0;  // columns, of the part that is looked at

  __device__ WidestWorker(const DenseForwardParams& params,
                          typename Plan::Small& small, int warp, int lane)
      : params(params), small(small), lane(lane), query(16 * warp + lane / 4) {}

  __device__ void arrive(uint64_t& barrier) {
    if (lane == 0) barrier_arrive(shared_address(&barrier));
  }

  // ---- Records: a walk over all tiles of an item, of both warpgroups.

  __device__ const auto& look() {
    barrier_wait(shared_address(&small.record_ready[at.slot]), at.round);
    tile = small.record[at.slot].first_column;
    last = small.record[at.slot].last_column;
    return small.record[at.slot];
  }

  __device__ void leave() {
    arrive(small.record_free[at.slot]);
    at.advance();
  }

  __device__ void walk() {
    tile += Plan::kKeys;
    if (tile < last) return;
    leave();
    look();
  }

  // ---- Slots

  /// The slot that many pieces further.
  __device__ int ahead(int pieces) const {
    const int sum = slot + pieces;
    return sum >= Plan::kSlots ? sum - Plan::kSlots : sum;
  }

  /// Waits for what arrives in a slot of mine, and says where that is.
  __device__ uint32_t look_at(int slot) const {
    barrier_wait(shared_address(&small.slot_ready[kGroup][slot]),
                 rounds >> slot & 1);
    return kSharedBase + Plan::kRing + slot * Plan::kSlot;
  }

  /// The same, once for each fill.
  __device__ uint32_t arrived(int slot) {
    const uint32_t place = look_at(slot);
    rounds ^= 1u << slot;
    return place;
  }

  __device__ void skip_keys() { slot = ahead(Plan::kKeyPieces); }

  /// Slots of values: mine of a tile.
  struct Pieces {
    int slot[2];
  };

  __device__ void release(Pieces values) {
    arrive(small.slot_free[values.slot[0]]);
    arrive(small.slot_free[values.slot[1]]);
  }

  // ---- Products

  /// score = q k^T of the next keys. Where products with values are under way,
  /// they end under the first of these, and their slots are given back.
  template <bool kAfterValues>
  __device__ void make_scores(Pieces values) {
    const uint64_t a = along_channels(kSharedBase + Plan::kQuery);
    int before = 0;
#pragma unroll
    for (int piece = 0; piece < Plan::kKeyPieces; ++piece) {
      const uint64_t b = along_channels(arrived(slot));
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4 * Plan::kKeyBlocks; ++k) {
        const int c = piece * Plan::kKeyBlocks + k / 4;
        wgmma<0, 0, Plan::kType>(
            score, a + ((c * Plan::kQueryBlock + k % 4 * 32) >> 4),
            b + ((k / 4 * Plan::kKeyBlock + k % 4 * 32) >> 4),
            piece == 0 && k == 0 ? 0 : 1);
      }
      wgmma_commit();
      if (piece > 0 || kAfterValues) wgmma_wait<1>();
      if (piece > 0) {
        arrive(small.slot_free[before]);
      } else if (kAfterValues) {
        release(values);
      }
      before = slot;
      slot = ahead(1);
    }
    wgmma_wait<0>();
    pin(score);
    pin(out);
    arrive(small.slot_free[before]);
  }

  /// Adds values of a tile that are not finite to the sums of who sees them,
  /// and sets them to 0; nobody else reads these.
  __device__ void add_spoiled_values(Pieces values) {
    bool found = false;
#pragma unroll
    for (int piece = 0; piece < 2; ++piece) {
      const uint32_t at_slot = look_at(values.slot[piece]);
      found |= finds_spoiled<Plan::kType, Plan::kSlot, 128, 8>(at_slot);
    }
    if (!meet_any(kAlone0 + kGroup, 128, found)) return;
#pragma unroll 1
    for (int piece = 0; piece < 2; ++piece) {
      const uint32_t at_slot =
          look_at(piece == 0 ? values.slot[0] : values.slot[1]);
      add_spoiled<Plan::kType, Plan::kValueKeys>(
          out, at_slot, small.record[at.slot], tile + piece * Plan::kValueKeys,
          query);
      meet(kAlone0 + kGroup, 128);
      clear_spoiled<Plan::kType, Plan::kSlot, 128>(at_slot);
    }
    meet(kAlone0 + kGroup, 128);
  }

  /// out += weights v of the next values, weights from registers or as the
  /// other warpgroup has written them. No product is under way.
  template <bool kOwn>
  __device__ Pieces issue_values() {
    const uint64_t a = along_channels(kSharedBase + Plan::kWeights);
    const Pieces values{ahead(kGroup), ahead(kGroup + 2)};
    slot = ahead(Plan::kValuePieces);
    if (!WorkColumns(small.record[at.slot]).all_see(tile, Plan::kKeys)) {
      add_spoiled_values(values);
    }
#pragma unroll
    for (int piece = 0; piece < 2; ++piece) {
      const uint64_t b =
          across_channels(arrived(values.slot[piece]), Plan::kValueBlock);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < Plan::kValueKeys / 16; ++i) {
        const int k = piece * (Plan::kValueKeys / 16) + i;
        if constexpr (kOwn) {
          wgmma<1, Plan::kType>(out, weight[k], b + (i * 2048 >> 4));
        } else {
          wgmma<0, 1, Plan::kType>(out, a + (k * 32 >> 4), b + (i * 2048 >> 4));
        }
      }
    }
    wgmma_commit();
    return values;
  }

  __device__ void finish_values(Pieces values) {
    wgmma_wait<0>();
    pin(out);
    release(values);
  }

  // ---- Weights

  __device__ void weigh() {
    const float unit = bend(score, params.scale, params.softcap);
    hide(score, small.record[at.slot], tile, query, lane);
    softmax.weigh(score, unit);
#pragma unroll
    for (int k = 0; k < Plan::kKeys / 16; ++k) {
      pack_operand<Plan::kType>(weight[k], score, k);
    }
  }

  __device__ void tell(float (&board)[Plan::kQueries], const float (&x)[2]) {
    if ((lane & 3) == 0) {
      board[query] = x[0];
      board[query + 8] = x[1];
    }
  }

  /// To the other warpgroup, whose weights lay there before and were used.
  __device__ void publish() {
    meet(kAlone0 + kGroup, 128);
    // Where these go would take registers from tile to tile.
    const int thread = thread_anew();
    store_operand(kSharedBase + Plan::kWeights, weight, thread % 128 / 32,
                  thread % 32);
    fence_for_wgmma();
    tell(small.high[kGroup], softmax.high);
    announce(kWritten0 + kGroup, 256);
  }

  /// out += the other's weights v, once they are there.
  __device__ Pieces issue_others() {
    meet(kWritten0 + 1 - kGroup, 256);
    const float(&board)[Plan::kQueries] = small.high[1 - kGroup];
    softmax.move_to({board[query], board[query + 8]});
    softmax.rescale(out);
    return issue_values<false>();
  }

  // ---- An item

  /// A tile of mine, from its scores on; values of the other's tile before,
  /// where the walk is, are multiplied while it is weighed.
  template <bool kAfterOthers>
  __device__ void add_tile(int left) {
    Pieces others;
    if constexpr (kAfterOthers) {
      others = issue_others();
      walk();
    }
    weigh();
    if constexpr (kAfterOthers) finish_values(others);
    publish();
    softmax.rescale(out);
    if (left > 1) skip_keys();
  }

  /// All tiles, each scored by the warpgroup whose turn it is.
  __device__ void attend(int tiles, uint32_t query_round) {
    int left = tiles - kGroup;  // from mine on
    if (kGroup == 1) skip_keys();
    if (left <= 0) {
      arrive(small.query_free);
    } else {
      barrier_wait(shared_address(&small.query_ready), query_round);
      make_scores<false>({});
      if (left <= 2) arrive(small.query_free);
      add_tile<kGroup == 1>(left);
      Pieces mine = issue_values<true>();
      for (; left > 2; left -= 2) {
        make_scores<true>(mine);
        if (left <= 4) arrive(small.query_free);
        walk();
        add_tile<true>(left - 2);
        mine = issue_values<true>();
      }
      finish_values(mine);
      if (left == 2) walk();
    }
    if ((tiles - 1) % 2 != kGroup) finish_values(issue_others());
  }

  /// Each warpgroup has summed the weights of its own tiles.
  __device__ void add_sums(float (&board)[2][Plan::kQueries]) {
    const float mine[2] = {quad_sum(softmax.sum[0]), quad_sum(softmax.sum[1])};
    tell(board[kGroup], mine);
    meet(kSums, 256);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float all = board[0][query + 8 * i] + board[1][query + 8 * i];
      softmax.sum[i] = (lane & 3) == 0 ? all : 0.f;
    }
  }

  __device__ void run() {
    uint32_t query_round = 0, turn = 0;
    const int channel = kGroup * Plan::kMyValueDim;
    for (;;) {
      const auto& record = look();
      const int tiles = record.tiles;
      if (tiles < 0) return;
      const AnswerPlace<false> place(record);
      begin_sums<Plan::kType>(params, place, query, channel, softmax, out,
                              lane);
      if (kGroup == 1) softmax.sum[0] = softmax.sum[1] = 0.f;
      if (tiles > 0) {
        attend(tiles, query_round);
        query_round ^= 1;
      }
      leave();
      add_sums(small.sum[turn]);
      turn ^= 1;
      store_answer<Plan::kType>(params, place, query, channel, softmax, out,
                                lane);
    }
  }
};

template <class Plan>
__global__ void __launch_bounds__(Plan::kThreads, 1)
    widest_forward_kernel(const __grid_constant__ DenseForwardParams params) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& small = *reinterpret_cast<typename Plan::Small*>(memory + Plan::kSmall);
  const uint32_t base = shared_address(memory);
  check_shared_base(base);
  if (threadIdx.x == 0) {
    const auto init = [](uint64_t& barrier, int arrivals) {
      barrier_init(shared_address(&barrier), arrivals);
    };
    init(small.query_ready, 1);
    init(small.query_free, 8);
    for (int i = 0; i < Plan::kSlots; ++i) {
      init(small.slot_ready[0][i], 1);
      init(small.slot_ready[1][i], 1);
      init(small.slot_free[i], 4);
    }
    for (int i = 0; i < Plan::kRecords; ++i) {
      init(small.record_ready[i], 32);
      init(small.record_free[i], 8 + 1);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const int group = threadIdx.x / 128;
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  if (group == 2) {
    give_registers<Plan::kProducerRegisters>();
    if (warp == 0) {
      deal<Plan>(params, small, lane);
    } else if (warp == 1 && lane == 0) {
      WidestFetcher<Plan>{params, small, base}.run();
    }
  } else {
    take_registers<Plan::kConsumerRegisters>();
    // ptxas counts with these registers only behind a branch.
    if (params.block_count > 0) {
      if (group == 0) {
        WidestWorker<Plan, 0>(params, small, warp, lane).run();
      } else {
        WidestWorker<Plan, 1>(params, small, warp, lane).run();
      }
    }
  }
}

template <class Plan>
cudaError_t launch_widest_forward(const DenseForwardParams& params,
                                  int processors, cudaStream_t stream) {
  const int64_t items = int64_t{params.block_count} * params.heads;
  return ampere::launch(widest_forward_kernel<Plan>,
                        std::min<int64_t>(items, processors), Plan::kThreads,
                        Plan::kSharedBytes, stream, params);
}

}  // namespace longspan::hopper
