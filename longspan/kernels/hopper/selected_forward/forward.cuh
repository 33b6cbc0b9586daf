#pragma once

#include <algorithm>

#include "longspan/kernels/hopper/fragment.cuh"
#include "longspan/kernels/hopper/key_tiles.cuh"
#include "longspan/kernels/hopper/selected_forward/config.h"
#include "longspan/kernels/hopper/wgmma.cuh"

namespace longspan::hopper {

/// Barriers by number. Both warpgroups of arithmetic are 256 threads.
enum Meeting { kHigh0 = 1, kHigh1, kReady0, kReady1, kFetchers, kSums };

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
    return static_cast<int>(params.rows * params.queries) *
           head_blocks(params);
  }
  __device__ ForwardItem(const ForwardParams& params, int item) {
    const int blocks = head_blocks(params), rows = static_cast<int>(params.rows);
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
        if (two) half<1, 1>(odd_now, kv);
        half<0, 1>(even_now, kv);
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

// ---- Score, softmax, accumulate, store -----------------------------------

/// What a thread of arithmetic holds: half of the output of two heads.
template <class Plan>
struct Worker {
  const ForwardParams& params;
  typename Plan::Small& small;
  uint32_t base;
  int warp, lane;
  float out[128];
  float score[32];
  uint32_t weight[4][4];
  float high[2], sum[2];

  __device__ void begin() {
#pragma unroll
    for (int i = 0; i < 128; ++i) out[i] = 0.f;
    high[0] = high[1] = -INFINITY;
    sum[0] = sum[1] = 0.f;
  }

  /// score (+)= q k^T over half of the channels.
  template <int kRight>
  __device__ void add_scores(uint32_t key, bool fresh) {
    constexpr int kFirst = kRight ? Plan::kLeftBlocks : 0;
    constexpr int kLast = kRight ? Plan::kBlocks : Plan::kLeftBlocks;
    const uint64_t a = along_channels(kSharedBase + Plan::kQuery);
    const uint64_t b = along_channels(kSharedBase + key);
#pragma unroll
    for (int c = kFirst; c < kLast; ++c) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint64_t step = (c * Plan::kBlockBytes + k * 32) >> 4;
        wgmma<0, 0>(score, a + step, b + step,
                    fresh && c == kFirst && k == 0 ? 0 : 1);
      }
    }
  }

  /// Scales and masks the scores, and gives the greatest of each head.
  __device__ void finish_scores(uint64_t there, float (&greatest)[2]) {
    if (there == ~0ull) {
#pragma unroll
      for (int i = 0; i < 32; ++i) score[i] *= params.scale;
    } else {
      there >>= 2 * (lane & 3);
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const bool listed = there >> (8 * (i / 4) + (i & 1)) & 1;
        score[i] = listed ? score[i] * params.scale : -INFINITY;
      }
    }
    greatest[0] = greatest[1] = -INFINITY;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      greatest[i / 2 & 1] = fmaxf(greatest[i / 2 & 1], score[i]);
    }
    greatest[0] = quad_max(greatest[0]);
    greatest[1] = quad_max(greatest[1]);
  }

  /// Moves everything that was summed to new maxima.
  __device__ void rescale(const float (&to)[2]) {
    if (__any_sync(~0u, to[0] != high[0] || to[1] != high[1])) {
      float factor[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        factor[i] = to[i] == high[i] ? 1.f : exp2_fast(high[i] - to[i]);
        sum[i] *= factor[i];
        high[i] = to[i];
      }
#pragma unroll
      for (int i = 0; i < 128; ++i) out[i] *= factor[i / 2 & 1];
    }
  }

  /// Scores become weights, and an operand.
  __device__ void weigh() {
    const float shift[2] = {high[0] == -INFINITY ? 0.f : high[0],
                            high[1] == -INFINITY ? 0.f : high[1]};
    float more[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      score[i] = exp2_fast(score[i] - shift[i / 2 & 1]);
      more[i / 2 & 1] += score[i];
    }
    sum[0] += more[0];
    sum[1] += more[1];
#pragma unroll
    for (int k = 0; k < 4; ++k) pack_operand(weight[k], score, k);
  }

  /// Lays the weights out for the other warpgroup.
  __device__ void publish(uint32_t place) {
    store_operand(base + place, weight, warp, lane);
    fence_for_wgmma();
  }

  /// The same, relative to other maxima.
  __device__ void publish_rescaled(uint32_t place, const float (&to)[2]) {
    const int row = 16 * warp + (lane & 15);
    const float factor[2] = {
        to[0] == high[0] ? 1.f : exp2_fast(high[0] - to[0]),
        to[1] == high[1] ? 1.f : exp2_fast(high[1] - to[1])};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      float part[8];
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 8; ++i) part[i] = score[8 * k + i] * factor[i / 2 & 1];
      pack_operand(a, part, 0);
      store_tiles(base + place + piece_place(row, 2 * k + (lane >> 4)), a);
    }
    fence_for_wgmma();
  }

  /// out += own weights v, the weights from registers.
  __device__ void add_own(uint32_t value) {
    const uint64_t b = across_channels(kSharedBase + value, Plan::kBlockBytes);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      wgmma<1>(out, weight[k], b + (k * 2048 >> 4));
    }
  }

  /// out += the other's weights v.
  __device__ void add_other(uint32_t place, uint32_t value) {
    const uint64_t a = along_channels(kSharedBase + place);
    const uint64_t b = across_channels(kSharedBase + value, Plan::kBlockBytes);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      wgmma<0, 1>(out, a + (k * 32 >> 4), b + (k * 2048 >> 4));
    }
  }

  __device__ void tell(float (&board)[64], const float (&value)[2]) {
    if ((lane & 3) == 0) {
      board[16 * warp + lane / 4] = value[0];
      board[16 * warp + lane / 4 + 8] = value[1];
    }
  }

  __device__ void read(const float (&board)[64], float (&value)[2]) {
    value[0] = board[16 * warp + lane / 4];
    value[1] = board[16 * warp + lane / 4 + 8];
  }

  __device__ void release(uint64_t& barrier) {
    if (lane == 0) barrier_arrive(shared_address(&barrier));
  }

  __device__ static float raised(float high, float greatest) {
    return greatest > high + kSlack ? greatest : high;
  }

  template <int kGroup>
  __device__ void store(const ForwardItem& item, int tiles) {
    if (tiles > 0) {
      sum[0] = quad_sum(sum[0]);
      sum[1] = quad_sum(sum[1]);
      tell(small.sum[kGroup], sum);
      meet(kSums, 256);
      float other[2];
      read(small.sum[1 - kGroup], other);
      sum[0] += other[0];
      sum[1] += other[1];
    }
    constexpr float kLog2e = 1.4426950408889634f;
    constexpr float kLn2 = 0.6931471805599453f;
    float scale[2];
    __nv_bfloat16* to[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t head = item.head + 16 * warp + lane / 4 + 8 * i;
      const bool there = head < params.heads;
      to[i] = there ? params.out + item.row * params.out_row +
                          item.query * params.out_token +
                          head * params.out_head + 256 * kGroup
                    : nullptr;
      float total = sum[i];
      if (params.sink != nullptr && there) {
        total += exp2_fast(params.sink[head] * kLog2e - high[i]);
      }
      scale[i] = high[i] == -INFINITY ? 0.f : 1.f / total;
      if (kGroup == 0 && there && (lane & 3) == 0) {
        params.lse[item.row * params.lse_row + item.query * params.lse_token +
                   head * params.lse_head] =
            high[i] == -INFINITY ? -INFINITY
                                 : (high[i] + log2f(sum[i])) * kLn2;
      }
    }
    store_rows(out, scale[0], scale[1], to[0], to[1], lane);
  }
};

/// The first warpgroup: scores even tiles, holds the left half of the output.
template <class Plan>
__device__ void lead(Worker<Plan>& my) {
  auto& small = my.small;
  const int items = ForwardItem::count(my.params);
  uint32_t fill = 0;
  const auto score = [&] {
    barrier_wait(shared_address(&small.key_ready[0][0]), fill & 1);
    fence_for_wgmma();
    wgmma_fence();
    my.template add_scores<0>(Plan::kKey0, true);
    wgmma_commit();
  };
  const auto score_rest = [&] {
    barrier_wait(shared_address(&small.key_ready[0][1]), fill & 1);
    fence_for_wgmma();
    wgmma_fence();
    my.template add_scores<1>(Plan::kKey0, false);
    wgmma_commit();
    ++fill;
  };
  for (int round = 0; round * static_cast<int>(gridDim.x) < items; ++round) {
    const int at = ForwardItem::at(round);
    if (at >= items) continue;
    barrier_wait(shared_address(&small.query_ready), round & 1);
    fence_for_wgmma();
    const int tiles = small.tiles;
    my.begin();
    if (tiles == 0) {
      my.release(small.query_free);
      my.template store<0>(ForwardItem(my.params, at), tiles);
      continue;
    }
    score();
    score_rest();
    for (int left = tiles;; left -= 2) {
      const bool two = left > 1, more = left > 2;
      wgmma_wait<0>();
      pin(my.score);
      pin(my.out);
      if (!more) my.release(small.query_free);
      float greatest[2], high[2];
      my.finish_scores(small.there[0], greatest);
      high[0] = my.raised(my.high[0], greatest[0]);
      high[1] = my.raised(my.high[1], greatest[1]);
      my.tell(small.high[0], high);
      announce(kHigh0, 256);
      my.rescale(high);
      my.weigh();
      pin(my.out);
      wgmma_fence();
      my.add_own(Plan::kKey0);
      wgmma_commit();
      if (two) {
        meet(kHigh1, 256);
        my.read(small.high[1], high);
      }
      if (__any_sync(~0u, high[0] != my.high[0] || high[1] != my.high[1])) {
        // Rare: the odd tile has a far greater score.
        wgmma_wait<0>();
        pin(my.out);
        my.publish_rescaled(Plan::kWeights0, high);
        my.rescale(high);
        pin(my.out);
        announce(kReady0, 256);
      } else {
        my.publish(Plan::kWeights0);
        announce(kReady0, 256);
        wgmma_wait<0>();
      }
      my.release(small.key_free[0][0]);
      if (!two) break;
      meet(kReady1, 256);
      wgmma_fence();
      my.add_other(Plan::kWeights1, Plan::kKey1);
      wgmma_commit();
      if (!more) {
        wgmma_wait<0>();
        my.release(small.key_free[1][0]);
        break;
      }
      score();
      wgmma_wait<1>();
      my.release(small.key_free[1][0]);
      score_rest();
    }
    pin(my.out);
    my.template store<0>(ForwardItem(my.params, at), tiles);
  }
}

/// The second: scores odd tiles, holds the right half.
template <class Plan>
__device__ void follow(Worker<Plan>& my) {
  constexpr uint32_t kRight = Plan::kLeftBlocks * Plan::kBlockBytes;
  auto& small = my.small;
  const int items = ForwardItem::count(my.params);
  uint32_t fill = 0;
  for (int round = 0; round * static_cast<int>(gridDim.x) < items; ++round) {
    const int at = ForwardItem::at(round);
    if (at >= items) continue;
    barrier_wait(shared_address(&small.query_ready), round & 1);
    fence_for_wgmma();
    const int tiles = small.tiles;
    my.begin();
    if (tiles < 2) my.release(small.query_free);
    for (int left = tiles; left > 0; left -= 2) {
      const bool two = left > 1;
      float high[2];
      if (two) {
        barrier_wait(shared_address(&small.key_ready[1][1]), fill & 1);
        fence_for_wgmma();
        wgmma_fence();
        my.template add_scores<1>(Plan::kKey1, true);
        barrier_wait(shared_address(&small.key_ready[1][0]), fill & 1);
        fence_for_wgmma();
        wgmma_fence();
        my.template add_scores<0>(Plan::kKey1, false);
        wgmma_commit();
        ++fill;
        wgmma_wait<0>();
        pin(my.score);
        if (left < 4) my.release(small.query_free);
        float greatest[2];
        my.finish_scores(small.there[1], greatest);
        meet(kHigh0, 256);
        my.read(small.high[0], high);
        high[0] = my.raised(high[0], greatest[0]);
        high[1] = my.raised(high[1], greatest[1]);
        my.tell(small.high[1], high);
        announce(kHigh1, 256);
        my.rescale(high);
        my.weigh();
        my.publish(Plan::kWeights1);
        announce(kReady1, 256);
        pin(my.out);
        wgmma_fence();
        my.add_own(Plan::kKey1 + kRight);
        wgmma_commit();
      } else {
        meet(kHigh0, 256);
        my.read(small.high[0], high);
        my.rescale(high);
        pin(my.out);
      }
      meet(kReady0, 256);
      wgmma_fence();
      my.add_other(Plan::kWeights0, Plan::kKey0 + kRight);
      wgmma_commit();
      if (two) {
        wgmma_wait<1>();
        my.release(small.key_free[1][1]);
      }
      wgmma_wait<0>();
      my.release(small.key_free[0][1]);
      pin(my.out);
    }
    my.template store<1>(ForwardItem(my.params, at), tiles);
  }
}

template <int kHeadDim>
__global__ void __launch_bounds__(ForwardPlan<kHeadDim>::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams params) {
  using Plan = ForwardPlan<kHeadDim>;
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& small = *reinterpret_cast<typename Plan::Small*>(memory + Plan::kSmall);
  if (threadIdx.x == 0) {
    barrier_init(shared_address(&small.query_ready), 129);
    barrier_init(shared_address(&small.query_free), 8);
    for (int tile = 0; tile < 2; ++tile) {
      for (int half = 0; half < 2; ++half) {
        barrier_init(shared_address(&small.key_ready[tile][half]),
                     tile == half ? 129 : 128);
        barrier_init(shared_address(&small.key_free[tile][half]), 4);
      }
    }
    barrier_init_fence();
  }
  __syncthreads();
  const uint32_t base = shared_address(memory);
  check_shared_base(base);
  const int thread = threadIdx.x % 128, lane = threadIdx.x % 32;
  const int group = threadIdx.x / 128;
  if (group == 2) {
    give_registers<72>();
    Fetcher<Plan> fetcher{params, small, base, thread, lane, thread / 8,
                          piece_place(thread / 8, lane & 7)};
    fetcher.run();
  } else {
    take_registers<216>();
    Worker<Plan> worker{params, small, base, thread / 32, lane};
    if (group == 0) {
      lead(worker);
    } else {
      follow(worker);
    }
  }
}

template <int kHeadDim>
cudaError_t launch_forward(const ForwardParams& params, int processors,
                           cudaStream_t stream) {
  using Plan = ForwardPlan<kHeadDim>;
  const int64_t items =
      params.rows * params.queries * ((params.heads + 63) / 64);
  const cudaError_t error = cudaFuncSetAttribute(
      forward_kernel<kHeadDim>, cudaFuncAttributeMaxDynamicSharedMemorySize,
      Plan::kSharedBytes);
  if (error != cudaSuccess) return error;
  const auto blocks =
      static_cast<unsigned>(std::min<int64_t>(items, processors));
  forward_kernel<kHeadDim>
      <<<blocks, Plan::kThreads, Plan::kSharedBytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace longspan::hopper
