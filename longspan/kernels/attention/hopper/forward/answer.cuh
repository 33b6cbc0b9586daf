#pragma once

#include "longspan/kernels/attention/hopper/bend.cuh"
#include "longspan/kernels/attention/hopper/forward/config.h"
#include "longspan/kernels/attention/hopper/forward/softmax.cuh"
#include "longspan/kernels/common/hopper/fragment.cuh"

namespace longspan::hopper {

/// Where the answer of one row of a thread lies, a query of a head: strides are
/// multiplied when it is asked for, so that little is remembered while products
/// run.
template <bool kPacksHeads>
struct AnswerPlace {
  int row, first_head, first_query, queries;

  template <class Record>
  __device__ explicit AnswerPlace(const Record& record)
      : row(record.row),
        first_head(record.head),
        first_query(record.first_row),
        queries(record.rows) {}

  __device__ static int token(const DenseForwardParams& params, int at) {
    return kPacksHeads ? at & ((1 << params.token_bits) - 1) : at;
  }
  __device__ int head(const DenseForwardParams& params, int at) const {
    return kPacksHeads ? first_head + (at >> params.token_bits) : first_head;
  }
  __device__ bool has(const DenseForwardParams& params, int at) const {
    return token(params, at) < queries;
  }
  __device__ const float* before(const DenseForwardParams& params,
                                 int at) const {
    return params.before + row * params.before_row +
           (first_query + token(params, at)) * params.before_token +
           head(params, at) * params.before_head;
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
/// sum of one key whose score was the lse, all of it multiplied with its
/// weight.
template <ElementType kType, class Place, int kCount>
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
  if (params.before == nullptr) return;
  constexpr float kBits = kEarlierBits<kType>;
  constexpr float kWeight = static_cast<float>(1 << static_cast<int>(kBits));
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!place.has(params, query + 8 * i)) continue;
    const float lse = *place.lse(params, query + 8 * i);
    if (lse == -INFINITY) continue;
    softmax.high[i] = lse * kLog2e - kBits;
    // Sums are added up over the four lanes of a query at the end.
    softmax.sum[i] = (lane & 3) == 0 ? kWeight : 0.f;
    const float* from = place.before(params, query + 8 * i) + channel;
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      const int column = 8 * j + 2 * (lane & 3);
      if (channel + column < params.value_dim) {
        const float2 pair = *reinterpret_cast<const float2*>(from + column);
        out[4 * j + 2 * i] = pair.x * kWeight;
        out[4 * j + 2 * i + 1] = pair.y * kWeight;
      }
    }
  }
}

template <ElementType kType, class Place, int kCount>
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
        x[i][n] = pack_pair<kType>(value[0] * scale[i], value[1] * scale[i]);
      }
      turn_quad(x[i], lane);
      const int column = 8 * (j + (lane & 3));
      if (there[i] && channel + column < params.value_dim) {
        __stcs(reinterpret_cast<uint4*>(static_cast<uint16_t*>(params.out) +
                                        at[i] + column),
               make_uint4(x[i][0], x[i][1], x[i][2], x[i][3]));
      }
    }
  }
}

}  // namespace longspan::hopper
