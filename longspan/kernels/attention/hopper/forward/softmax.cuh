#pragma once

#include "longspan/kernels/common/ampere/lanes.cuh"
#include "longspan/kernels/common/element.h"

namespace longspan::hopper {

/// Scores may exceed the subtracted maximum by so many powers of two before
/// sums are rescaled: float and both half types keep their precision there.
constexpr float kDenseSlack = 8.f;

/// Earlier keys go on as one key of this weight, a power of two. After a
/// million alike one more weighs a millionth of them, which is next to nothing
/// in float16; so there they start with all the weight that a key may have.
template <ElementType kType>
constexpr float kEarlierBits = kType == ElementType::float16 ? kDenseSlack : 0;

/// The running softmax of a thread's two queries, in powers of two.
struct RunningSoftmax {
  float high[2], sum[2];
  float factor[2];  // what sums so far must be multiplied with

  /// Scores become weights; `factor` says what the sums before need.
  template <int kCount>
  __device__ __forceinline__ void weigh(float (&score)[kCount], float unit) {
    // Of even and odd columns, so that fewer wait for the one before.
    float greatest[2][2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float& most = greatest[i / 2 & 1][i & 1];
      most = fmaxf(most, score[i]);
    }
    float shift[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float top = quad_max(fmaxf(greatest[i][0], greatest[i][1])) * unit;
      const bool raised = top > high[i] + kDenseSlack;
      const float before = high[i];
      high[i] = raised ? top : before;
      factor[i] = raised ? exp2_fast(before - top) : 1.f;
      shift[i] = high[i] == -INFINITY ? 0.f : high[i];
    }
    float more[2][2] = {};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      score[i] = exp2_fast(fmaf(score[i], unit, -shift[i / 2 & 1]));
      more[i / 2 & 1][i & 1] += score[i];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] = fmaf(sum[i], factor[i], more[i][0] + more[i][1]);
    }
  }

  /// What stands behind this begins when the weights are made. ptxas asks for
  /// the end of products as early as it can, and weights would wait for it; but
  /// not before a branch on them. No sum of weights is negative.
  __device__ __forceinline__ void settle() const {
    if (sum[0] < 0.f || sum[1] < 0.f) __trap();
  }

  /// To a maximum that was found elsewhere.
  __device__ __forceinline__ void move_to(const float (&other)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      factor[i] = other[i] == high[i] ? 1.f : exp2_fast(high[i] - other[i]);
      sum[i] *= factor[i];
      high[i] = other[i];
    }
  }

  template <int kCount>
  __device__ __forceinline__ void rescale(float (&out)[kCount]) const {
    if (!__any_sync(~0u, factor[0] != 1.f || factor[1] != 1.f)) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i) out[i] *= factor[i / 2 & 1];
  }
};

}  // namespace longspan::hopper
