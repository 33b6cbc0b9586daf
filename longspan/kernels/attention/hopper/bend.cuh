#pragma once

#include "longspan/kernels/common/ampere/lanes.cuh"

namespace longspan::hopper {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

/// Scores become what `unit` turns into powers of two.
template <int kCount>
__device__ __forceinline__ float bend(float (&score)[kCount], float scale,
                                      float softcap) {
  if (softcap > 0.f) {
    // tanh x = 1 - 2 / (1 + e^2x), which keeps its precision where tanh.approx
    // is off by 2^-11.
    const float twice = 2.f * kLog2e * scale / softcap;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float grown = 1.f + exp2_fast(twice * score[i]);
      score[i] = 1.f - __fdividef(2.f, grown);
    }
    return softcap * kLog2e;
  }
  if (scale > 0.f) return scale * kLog2e;
#pragma unroll
  for (int i = 0; i < kCount; ++i) score[i] *= scale;
  return kLog2e;
}

/// The same for many tiles: most calls bend nothing.
struct Bending {
  float scale, softcap, unit;
  bool none;
  __device__ Bending(float scale, float softcap)
      : scale(scale),
        softcap(softcap),
        unit(scale * kLog2e),
        none(softcap == 0.f && scale > 0.f) {}
  template <int kCount>
  __device__ __forceinline__ float of(float (&score)[kCount]) const {
    return none ? unit : bend(score, scale, softcap);
  }
};

}  // namespace longspan::hopper
