#pragma once

#include "longspan/kernels/attend_selected/hopper/forward/config.h"
#include "longspan/kernels/attend_selected/hopper/key_tiles.cuh"
#include "longspan/kernels/common/hopper/fragment.cuh"

namespace longspan::hopper {

/// Barriers by number. Both warpgroups of arithmetic are 256 threads.
enum Meeting { kReady0 = 1, kReady1, kFetchers, kSums, kScored };

/// Which query and heads a block takes next. Later queries have longer lists
/// and go first; every other round runs backwards, which evens out the blocks.
struct ForwardItem {
  int row, query, head;

  __device__ static int at(int round) {
    return round * static_cast<int>(gridDim.x) +
           static_cast<int>(round & 1 ? gridDim.x - 1 - blockIdx.x
                                      : blockIdx.x);
  }
  __device__ static int head_blocks(const ForwardParams& params) {
    return (static_cast<int>(params.heads) + 63) / 64;
  }
  __device__ static int count(const ForwardParams& params) {
    return static_cast<int>(params.rows * params.queries) * head_blocks(params);
  }
  __device__ ForwardItem(const ForwardParams& params, int item) {
    const int blocks = head_blocks(params),
              rows = static_cast<int>(params.rows);
    head = item % blocks * 64;
    item /= blocks;
    row = item % rows;
    query = static_cast<int>(params.queries) - 1 - item / rows;
  }
};

// ---- Load ----------------------------------------------------------------

/// 128 threads that bring queries and keys; 8 lanes copy 128 bytes of a row.
template <class Plan>
struct Fetcher {
  const ForwardParams& params;
  typename Plan::Small& small;
  uint32_t base;
  int thread, lane, group;  // of 8 lanes
  uint32_t place;           // of a thread's piece in a block
  uint32_t fills[2] = {0, 0};

  __device__ void query(const ForwardItem& item) const {
    const __nv_bfloat16* q =
        params.q + item.row * params.q_row + item.query * params.q_token;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int64_t head = item.head + r * 16 + group;
      const bool there = head < params.heads;
      const __nv_bfloat16* from =
          q + (there ? head : 0) * params.q_head + (lane & 7) * 8;
#pragma unroll
      for (int c = 0; c < Plan::kBlocks; ++c) {
        copy_16(base + Plan::kQuery + c * Plan::kBlockBytes + r * 2048 + place,
                from + c * 64, there);
      }
    }
    barrier_arrive_copies(shared_address(&small.query_ready));
  }

  template <int kTile, int kRight>
  __device__ void half(const KeyTile& tile, const __nv_bfloat16* kv) {
    barrier_wait(shared_address(&small.key_free[kTile][kRight]),
                 (fills[kTile] & 1) ^ 1);
    const uint32_t ready = shared_address(&small.key_ready[kTile][kRight]);
    // The half that is brought first says which slots hold keys.
    if (kTile == kRight && thread == 0) {
      small.there[kTile] = tile.there;
      barrier_arrive(ready);
    }
    constexpr int kFirst = kRight ? Plan::kLeftBlocks : 0;
    constexpr int kLast = kRight ? Plan::kBlocks : Plan::kLeftBlocks;
    const uint32_t to = base + (kTile ? Plan::kKey1 : Plan::kKey0) + place;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int32_t key = tile.key_of(r * 16 + group);
      const bool there = key >= 0;
      const __nv_bfloat16* from =
          kv + (there ? key : 0) * params.kv_token + (lane & 7) * 8;
#pragma unroll
      for (int c = kFirst; c < kLast; ++c) {
        copy_16(to + c * Plan::kBlockBytes + r * 2048, from + c * 64, there);
      }
    }
    barrier_arrive_copies(ready);
  }

  __device__ TileList list_of(int at, int turn) const {
    const ForwardItem item(params, at);
    return TileList(params.indices + item.row * params.indices_row +
                        item.query * params.indices_token,
                    static_cast<int>(params.slots), params.keys,
                    small.live[turn & 1], Plan::kMarkedTiles, thread,
                    kFetchers);
  }

  __device__ void run() {
    const int items = ForwardItem::count(params);
    int at = ForwardItem::at(0);
    TileList tiles = list_of(at, 0);
    KeyTile even = tiles.next(), odd = tiles.next();
    for (int round = 0;; ++round) {
      const ForwardItem item(params, at);
      barrier_wait(shared_address(&small.query_free), (round & 1) ^ 1);
      if (thread == 0) {
        small.tiles = tiles.count;
        barrier_arrive(shared_address(&small.query_ready));
      }
      query(item);
      const __nv_bfloat16* kv = params.kv + item.row * params.kv_row;
      int left = tiles.count;
      const auto pair = [&] {
        const bool two = left > 1;
        even.look();
        odd.look();
        const KeyTile even_now = even, odd_now = odd;
        left -= 2;
        if (left > 0) {
          even = tiles.next();  // on the way meanwhile
          odd = tiles.next();
        }
        half<0, 0>(even_now, kv);
        half<0, 1>(even_now, kv);
        if (two) half<1, 1>(odd_now, kv);
        if (two) half<1, 0>(odd_now, kv);
        ++fills[0];
        fills[1] += two;
      };
      if (left > 0) pair();
      // The next list is looked through long before it is needed.
      at = ForwardItem::at(round + 1);
      const bool ends = at >= items;
      TileList upcoming = ends ? tiles : list_of(at, round + 1);
      while (left > 0) pair();
      if (ends) break;
      tiles = upcoming;
      even = tiles.next();
      odd = tiles.next();
    }
  }
};

}  // namespace longspan::hopper
