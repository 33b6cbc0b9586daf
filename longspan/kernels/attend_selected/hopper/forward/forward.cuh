#pragma once

#include <algorithm>

#include "longspan/kernels/attend_selected/hopper/forward/fetch.cuh"
#include "longspan/kernels/attend_selected/hopper/forward/worker.cuh"

namespace longspan::hopper {

/// Tiles are weighed in turn, even ones by the first warpgroup and odd ones by
/// the second. Each starts from the maximum of the tile before, and hands its
/// own on with the weights; so nobody waits for a later tile, and the second
/// adds the even tile's values while it weighs the odd one.

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
      my.template store<0>(ForwardItem(my.params, at), tiles, round);
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
      // Weights go where other warps may still be reading keys.
      if constexpr (Plan::kWeights0 < Plan::kKey1) meet(kScored, 128);
      high[0] = my.raised(my.high[0], greatest[0]);
      high[1] = my.raised(my.high[1], greatest[1]);
      my.tell(small.high[0], high);
      my.rescale(high);
      my.weigh();
      my.publish(Plan::kWeights0);
      announce(kReady0, 256);
      pin(my.out);
      wgmma_fence();
      my.add_own(Plan::kKey0);
      wgmma_commit();
      wgmma_wait<0>();
      pin(my.out);
      my.release(small.key_free[0][0]);
      if (!two) break;
      meet(kReady1, 256);
      my.read(small.high[1], high);
      my.rescale(high);
      pin(my.out);
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
    my.template store<0>(ForwardItem(my.params, at), tiles, round);
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
      float greatest[2], high[2];
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
        my.finish_scores(small.there[1], greatest);
      }
      meet(kReady0, 256);
      my.read(small.high[0], high);
      my.rescale(high);
      pin(my.out);
      wgmma_fence();
      my.add_other(Plan::kWeights0, Plan::kKey0 + kRight);
      wgmma_commit();
      if (!two) {
        wgmma_wait<0>();
        my.release(small.key_free[0][1]);
        break;
      }
      // The even tile's values go under the odd tile's weights.
      high[0] = my.raised(high[0], greatest[0]);
      high[1] = my.raised(high[1], greatest[1]);
      my.tell(small.high[1], high);
      if (__any_sync(~0u, high[0] != my.high[0] || high[1] != my.high[1])) {
        // Rare: the odd tile has a far greater score.
        wgmma_wait<0>();
        pin(my.out);
        my.rescale(high);
        my.weigh();
        my.publish(Plan::kWeights1);
        announce(kReady1, 256);
      } else {
        my.weigh();
        my.publish(Plan::kWeights1);
        announce(kReady1, 256);
        wgmma_wait<0>();
      }
      pin(my.out);
      my.release(small.key_free[0][1]);
      wgmma_fence();
      my.add_own(Plan::kKey1 + kRight);
      wgmma_commit();
      wgmma_wait<0>();
      my.release(small.key_free[1][1]);
      pin(my.out);
    }
    pin(my.out);
    my.template store<1>(ForwardItem(my.params, at), tiles, round);
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
    Fetcher<Plan> fetcher{params,
                          small,
                          base,
                          thread,
                          lane,
                          thread / 8,
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
