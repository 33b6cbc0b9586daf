#pragma once

#include "longspan/kernels/attend_selected/hopper/forward/config.h"
#include "longspan/kernels/attend_selected/hopper/forward/fetch.cuh"
#include "longspan/kernels/common/hopper/fragment.cuh"
#include "longspan/kernels/common/hopper/wgmma.cuh"

namespace longspan::hopper {

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
  float unit;  // of the scores, in powers of two
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

  /// Masks the scores, and gives the greatest of each head in powers of two.
  __device__ void finish_scores(uint64_t there, float (&greatest)[2]) {
    if (there == ~0ull && params.scale > 0.f) {
      unit = params.scale;
    } else {
      unit = 1.f;
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
    greatest[0] = quad_max(greatest[0]) * unit;
    greatest[1] = quad_max(greatest[1]) * unit;
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
      score[i] = exp2_fast(fmaf(score[i], unit, -shift[i / 2 & 1]));
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
  __device__ void store(const ForwardItem& item, int tiles, int round) {
    if (tiles > 0) {
      sum[0] = quad_sum(sum[0]);
      sum[1] = quad_sum(sum[1]);
      auto& board = small.sum[round & 1];
      tell(board[kGroup], sum);
      meet(kSums, 256);
      float other[2];
      read(board[1 - kGroup], other);
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
      const bool empty = sum[i] == 0.f;  // NaN where a score is
      float total = sum[i];
      if (params.sink != nullptr && there) {
        total += exp2_fast(params.sink[head] * kLog2e - high[i]);
      }
      scale[i] = empty ? 0.f : 1.f / total;
      if (kGroup == 0 && there && (lane & 3) == 0) {
        params.lse[item.row * params.lse_row + item.query * params.lse_token +
                   head * params.lse_head] =
            empty ? -INFINITY : (high[i] + log2f(sum[i])) * kLn2;
      }
    }
    store_rows(out, scale[0], scale[1], to[0], to[1], lane);
  }
};

}  // namespace longspan::hopper
