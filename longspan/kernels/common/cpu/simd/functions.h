#pragma once

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "longspan/kernels/common/cpu/simd/vectors.h"

/// exp, tanh and log. NaN stays NaN.
namespace longspan {
namespace {

/// Within 2 ulp; results below 2^-125 are 0, those above the largest float
/// infinite.
inline Vector<float> exp_of(Vector<float> x) {
  constexpr float kLowest = -86.64f, kHighest = 88.7228f;
  const Vector<float> low = all_lanes(kLowest);
#ifdef __AVX512F__
  // A little more than the largest, which overflows below.
  const Vector<float> high = all_lanes(kHighest + 1);
  const Vector<float> clamped = high < x ? high : x;
#else
  const Vector<float> high = all_lanes(kHighest);
  Vector<float> clamped = x < low ? low : x;
  clamped = clamped > high ? high : clamped;
#endif
  // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
  constexpr float kMagic = 12582912.0f;
  const Vector<float> shifted = clamped * 1.44269504f + kMagic;
  const Vector<float> n = shifted - kMagic;
  const Vector<float> r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  // (exp(r) - 1 - r) / r^2, fitted over |r| <= ln 2 / 2: exp is off by 3e-9.
  Vector<float> p = all_lanes(1.381454058e-3f);
  p = p * r + 8.368745446e-3f;
  p = p * r + 4.166838899e-2f;
  p = p * r + 1.666652113e-1f;
  p = p * r + 4.999999404e-1f;
  p = p * (r * r) + r + 1.0f;
#ifdef __AVX512F__
  const __mmask16 kept = _mm512_cmp_ps_mask(x, low, _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(kept, p, n);
#else
  // 2^(n - 1), then twice that: 2^128 has no float.
  using Bits = VectorTypes<float>::Bits;
  const Bits exponent = (Bits(shifted) + 126u) << 23;
  const Vector<float> y = p * Vector<float>(exponent) * 2.0f;
  const Vector<float> zero = {}, infinite = all_lanes(kInfinity<float>);
  return x < low ? zero : x > high ? infinite : y;
#endif
}

inline Vector<float> tanh_of(Vector<float> x) {
  const Vector<float> zero = {};
  const Vector<float> size = x < zero ? -x : x;
  const Vector<float> z = x * x;
  Vector<float> p = all_lanes(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const Vector<float> near = p * z * x + x;
  const Vector<float> far = 1.0f - 2.0f / (exp_of(size + size) + 1.0f);
  const Vector<float> signed_far = x < zero ? -far : far;
  return size < all_lanes(0.625f) ? near : signed_far;
}

inline Vector<double> exp_of(Vector<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = __builtin_exp(x[i]);
  return x;
}

inline Vector<double> tanh_of(Vector<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = __builtin_tanh(x[i]);
  return x;
}

inline float exp_of(float x) {
  return __builtin_expf(x);
}
inline double exp_of(double x) {
  return __builtin_exp(x);
}
inline float log_of(float x) {
  return __builtin_logf(x);
}
inline double log_of(double x) {
  return __builtin_log(x);
}

}  // namespace
}  // namespace longspan
