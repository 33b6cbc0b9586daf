#pragma once

#include <algorithm>

#include "longspan/kernels/attention/hopper/bend.cuh"
#include "longspan/kernels/attention/hopper/forward/deal.cuh"
#include "longspan/kernels/common/ampere/launch.h"
#include "longspan/kernels/common/hopper/fragment.cuh"
#include "longspan/kernels/common/hopper/wgmma.cuh"

namespace longspan::hopper {

/// Scores may exceed the subtracted maximum by so many powers of two before
/// sums are rescaled: float and bfloat16 keep their precision there.
constexpr float kDenseSlack = 8.f;
// ---- Score ---------------------------------------------------------------

/// score = q k^T of 64 queries and a tile of keys.
template <class Plan>
__device__ __forceinline__ void issue_scores(float (&score)[Plan::kKeys / 2],
                                             uint32_t query, uint32_t key) {
  const uint64_t a = along_channels(query), b = along_channels(key);
#pragma unroll
  for (int c = 0; c < Plan::kHeadBlocks; ++c) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      wgmma<0, 0>(score, a + ((c * Plan::kQueryBlock + k * 32) >> 4),
                  b + ((c * Plan::kKeyBlock + k * 32) >> 4),
                  c == 0 && k == 0 ? 0 : 1);
    }
  }
}

// ---- Softmax -------------------------------------------------------------

/// The running softmax of a thread's two queries, in powers of two.
struct RunningSoftmax {
  float high[2], sum[2];
  float factor[2];  // what sums so far must be multiplied with

  /// Scores become weights; `factor` says what the sums before need.
  template <int kCount>
  __device__ __forceinline__ void weigh(float (&score)[kCount], float unit) {
    float greatest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      greatest[i / 2 & 1] = fmaxf(greatest[i / 2 & 1], score[i]);
    }
    float shift[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float top = quad_max(greatest[i]) * unit;
      const bool raised = top > high[i] + kDenseSlack;
      const float before = high[i];
      high[i] = raised ? top : before;
      factor[i] = raised ? exp2_fast(before - top) : 1.f;
      shift[i] = high[i] == -INFINITY ? 0.f : high[i];
    }
    float more[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      score[i] = exp2_fast(fmaf(score[i], unit, -shift[i / 2 & 1]));
      more[i / 2 & 1] += score[i];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) sum[i] = fmaf(sum[i], factor[i], more[i]);
  }

  template <int kCount>
  __device__ __forceinline__ void rescale(float (&out)[kCount]) const {
    if (!__any_sync(~0u, factor[0] != 1.f || factor[1] != 1.f)) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i) out[i] *= factor[i / 2 & 1];
  }
};

// ---- Accumulate ----------------------------------------------------------

template <class Plan>
__device__ __forceinline__ void pack_weights(
    uint32_t (&weight)[Plan::kKeys / 16][4],
    const float (&score)[Plan::kKeys / 2]) {
#pragma unroll
  for (int k = 0; k < Plan::kKeys / 16; ++k) pack_operand(weight[k], score, k);
}

/// out += weights v.
template <class Plan>
__device__ __forceinline__ void issue_values(
    float (&out)[Plan::kMyValueDim / 2],
    const uint32_t (&weight)[Plan::kKeys / 16][4], uint32_t value) {
  const uint64_t b = across_channels(value, Plan::kKeyBlock);
#pragma unroll
  for (int k = 0; k < Plan::kKeys / 16; ++k) {
    wgmma<1>(out, weight[k], b + (k * 2048 >> 4));
  }
}

// ---- Store ---------------------------------------------------------------

/// Where the answer of one row of a thread lies, a query of a head: strides are
/// multiplied when it is asked for, so that little is remembered while products
/// run.
template <class Plan>
struct AnswerPlace {
  int row, first_head, first_query, queries;

  __device__ explicit AnswerPlace(const WorkRecordOf<Plan::kQueries>& record)
      : row(record.row),
        first_head(record.head),
        first_query(record.first_row),
        queries(record.rows) {}

  __device__ static int token(const DenseForwardParams& params, int at) {
    return Plan::kNarrow ? at & ((1 << params.token_bits) - 1) : at;
  }
  __device__ int head(const DenseForwardParams& params, int at) const {
    return Plan::kNarrow ? first_head + (at >> params.token_bits) : first_head;
  }
  __device__ bool has(const DenseForwardParams& params, int at) const {
    return token(params, at) < queries;
  }
  __device__ int64_t out(const DenseForwardParams& params, int at) const {
    return row * params.out_row +
           (first_query + token(params, at)) * params.out_token +
           head(params, at) * params.out_head;
  }
  __device__ float* lse(const DenseForwardParams& params, int at) const {
    return params.lse + row * params.lse_row +
           (first_query + token(params, at)) * params.lse_token +
           head(params, at) * params.lse_head;
  }
};

/// Sets the sums to nothing, or to what earlier calls found: out and lse are a
/// sum of one key whose score was the lse.
template <class Place, int kCount>
__device__ __forceinline__ void begin_sums(const DenseForwardParams& params,
                                           const Place& place, int query,
                                           int channel, RunningSoftmax& softmax,
                                           float (&out)[kCount], int lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    softmax.high[i] = -INFINITY;
    softmax.sum[i] = 0.f;
    softmax.factor[i] = 1.f;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) out[i] = 0.f;
  if (!params.goes_on) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!place.has(params, query + 8 * i)) continue;
    const float before = *place.lse(params, query + 8 * i);
    if (before == -INFINITY) continue;
    softmax.high[i] = before * kLog2e;
    // Sums are added up over the four lanes of a query at the end.
    softmax.sum[i] = (lane & 3) == 0 ? 1.f : 0.f;
    const float* from = static_cast<const float*>(params.out) +
                        place.out(params, query + 8 * i) + channel;
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      const int column = 8 * j + 2 * (lane & 3);
      if (channel + column < params.value_dim) {
        const float2 pair = *reinterpret_cast<const float2*>(from + column);
        out[4 * j + 2 * i] = pair.x;
        out[4 * j + 2 * i + 1] = pair.y;
      }
    }
  }
}

template <class Place, int kCount>
__device__ __forceinline__ void store_answer(const DenseForwardParams& params,
                                             const Place& place, int query,
                                             int channel,
                                             const RunningSoftmax& softmax,
                                             const float (&out)[kCount],
                                             int lane) {
  float scale[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float sum = quad_sum(softmax.sum[i]);
    const bool empty = sum == 0.f;  // NaN where a score is
    float total = sum;
    if (params.sink != nullptr) {
      total +=
          exp2_fast(params.sink[place.head(params, query + 8 * i)] * kLog2e -
                    softmax.high[i]);
    }
    scale[i] = empty ? 0.f : 1.f / total;
    if (place.has(params, query + 8 * i) && (lane & 3) == 0 && channel == 0) {
      *place.lse(params, query + 8 * i) =
          empty ? -INFINITY : (softmax.high[i] + log2f(sum)) * kLn2;
    }
  }
  const int64_t at[2] = {place.out(params, query) + channel,
                         place.out(params, query + 8) + channel};
  const bool there[2] = {place.has(params, query),
                         place.has(params, query + 8)};
  if (params.out_is_float) {
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      const int column = 8 * j + 2 * (lane & 3);
      if (channel + column >= params.value_dim) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (!there[i]) continue;
        *reinterpret_cast<float2*>(static_cast<float*>(params.out) + at[i] +
                                   column) =
            make_float2(out[4 * j + 2 * i] * scale[i],
                        out[4 * j + 2 * i + 1] * scale[i]);
      }
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < kCount / 4; j += 4) {
    uint32_t x[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float* value = out + 4 * (j + n) + 2 * i;
        x[i][n] = pack_bf16(value[0] * scale[i], value[1] * scale[i]);
      }
      turn_quad(x[i], lane);
      const int column = 8 * (j + (lane & 3));
      if (there[i] && channel + column < params.value_dim) {
        __stcs(reinterpret_cast<uint4*>(
                   static_cast<__nv_bfloat16*>(params.out) + at[i] + column),
               make_uint4(x[i][0], x[i][1], x[i][2], x[i][3]));
      }
    }
  }
}

// ---- A warpgroup of arithmetic -------------------------------------------

/// Barriers by number: whose turn it is to ask for products.
enum DenseMeeting { kTurn0 = 1, kTurn1 = 2 };

template <class Plan>
__device__ __forceinline__ void attend(const DenseForwardParams& params,
                                       typename Plan::Small& small, int group) {
  const int lane = threadIdx.x % 32;
  // Which queries and which channels of the answer are this warpgroup's.
  constexpr bool kSplits = Plan::kSplitsValues;
  constexpr bool kTurns = !Plan::kNarrow;
  const int query =
      (kSplits ? 0 : 64 * group) + 16 * (threadIdx.x % 128 / 32) + lane / 4;
  const int channel = kSplits ? group * Plan::kMyValueDim : 0;
  const auto arrive = [&](uint64_t& barrier) {
    if (lane == 0) barrier_arrive(shared_address(&barrier));
  };
  const uint32_t my_query =
      kSharedBase + Plan::kQuery + (kSplits ? 0 : group * 64 * 128);
  const uint32_t my_value =
      kSharedBase + Plan::kValue + channel / 64 * Plan::kKeyBlock;
  RingPlace<Plan::kRecords> at;
  RingPlace<Plan::kQueryStages> query_at;
  RingPlace<Plan::kStages> key_at, value_at;
  float out[Plan::kMyValueDim / 2];
  float score[Plan::kKeys / 2];
  uint32_t weight[Plan::kKeys / 16][4];
  RunningSoftmax softmax;
  if (kTurns && group == 1) announce(kTurn0, 256);
  for (;;) {
    barrier_wait(shared_address(&small.record_ready[at.slot]), at.round);
    int left = small.record[at.slot].tiles;
    if (left < 0) return;
    const AnswerPlace<Plan> place(small.record[at.slot]);
    int tile = small.record[at.slot].first_column;
    int last = small.record[at.slot].last_column;
    begin_sums(params, place, query, channel, softmax, out, lane);
    if (left > 0) {
      const uint32_t q = my_query + query_at.slot * Plan::kQueryBytes;
      barrier_wait(shared_address(&small.query_ready[query_at.slot]),
                   query_at.round);
      barrier_wait(shared_address(&small.key_ready[key_at.slot]), key_at.round);
      wgmma_fence();
      issue_scores<Plan>(
          score, q, kSharedBase + Plan::kKey + key_at.slot * Plan::kKeyBytes);
      wgmma_commit();
      wgmma_wait<0>();
      pin(score);
      arrive(small.key_free[key_at.slot]);
      key_at.advance();
      float unit = bend(score, params.scale, params.softcap);
      hide(score, small.record[at.slot], tile, query, lane);
      softmax.weigh(score, unit);
      softmax.rescale(out);
      pack_weights<Plan>(weight, score);
      while (--left > 0) {
        tile += Plan::kKeys;
        if (tile >= last) {
          arrive(small.record_free[at.slot]);
          at.advance();
          barrier_wait(shared_address(&small.record_ready[at.slot]), at.round);
          tile = small.record[at.slot].first_column;
          last = small.record[at.slot].last_column;
        }
        barrier_wait(shared_address(&small.key_ready[key_at.slot]),
                     key_at.round);
        barrier_wait(shared_address(&small.value_ready[value_at.slot]),
                     value_at.round);
        if (kTurns) meet(kTurn0 + group, 256);
        wgmma_fence();
        issue_scores<Plan>(
            score, q, kSharedBase + Plan::kKey + key_at.slot * Plan::kKeyBytes);
        wgmma_commit();
        issue_values<Plan>(out, weight,
                           my_value + value_at.slot * Plan::kValueBytes);
        wgmma_commit();
        if (kTurns) announce(kTurn1 - group, 256);
        wgmma_wait<1>();
        pin(score);
        arrive(small.key_free[key_at.slot]);
        key_at.advance();
        unit = bend(score, params.scale, params.softcap);
        hide(score, small.record[at.slot], tile, query, lane);
        softmax.weigh(score, unit);
        wgmma_wait<0>();
        pin(out);
        arrive(small.value_free[value_at.slot]);
        value_at.advance();
        softmax.rescale(out);
        pack_weights<Plan>(weight, score);
      }
      arrive(small.query_free[query_at.slot]);
      query_at.advance();
      barrier_wait(shared_address(&small.value_ready[value_at.slot]),
                   value_at.round);
      wgmma_fence();
      issue_values<Plan>(out, weight,
                         my_value + value_at.slot * Plan::kValueBytes);
      wgmma_commit();
      wgmma_wait<0>();
      pin(out);
      arrive(small.value_free[value_at.slot]);
      value_at.advance();
    }
    arrive(small.record_free[at.slot]);
    at.advance();
    store_answer(params, place, query, channel, softmax, out, lane);
  }
}

template <class Plan>
__global__ void __launch_bounds__(Plan::kThreads, Plan::kBlocks)
    dense_forward_kernel(const __grid_constant__ DenseForwardParams params) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& small = *reinterpret_cast<typename Plan::Small*>(memory + Plan::kSmall);
  const uint32_t base = shared_address(memory);
  check_shared_base(base);
  if (threadIdx.x == 0) {
    const auto init = [](uint64_t& barrier, int arrivals) {
      barrier_init(shared_address(&barrier), arrivals);
    };
    for (int i = 0; i < Plan::kQueryStages; ++i) {
      init(small.query_ready[i], 1);
      init(small.query_free[i], Plan::kConsumerWarps);
    }
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
  if (group == Plan::kWarpgroups) {
    give_registers<Plan::kProducerRegisters>();
    const int warp = threadIdx.x % 128 / 32;
    if (warp == 0) {
      deal<Plan>(params, small, threadIdx.x % 32,
                 Plan::kNarrow ? params.packed_heads : 1);
    } else if (warp == 1 && threadIdx.x % 32 == 0) {
      fetch<Plan>(params, small, base);
    }
  } else {
    take_registers<Plan::kConsumerRegisters>();
    // ptxas counts with these registers only behind a branch.
    if (params.block_count > 0) attend<Plan>(params, small, group);
  }
}

template <class Plan>
cudaError_t launch_dense_forward(const DenseForwardParams& params,
                                 int processors, cudaStream_t stream) {
  const int64_t items =
      int64_t{params.block_count} * (params.heads / params.packed_heads);
  if (Plan::kBlocks > 1) {
    const auto error = ampere::prefer_shared_memory(dense_forward_kernel<Plan>);
    if (error != cudaSuccess) return error;
  }
  return ampere::launch(
      dense_forward_kernel<Plan>,
      std::min<int64_t>(items, int64_t{processors} * Plan::kBlocks),
      Plan::kThreads, Plan::kSharedBytes, stream, params);
}

}  // namespace longspan::hopper
