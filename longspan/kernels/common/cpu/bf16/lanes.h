#pragma once

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "longspan/kernels/common/cpu/simd/vectors.h"

/// What the bfloat16 kernels need of a vector beyond arithmetic, in the
/// instructions of the including source or else in plain C++. As all of this
/// folder's headers but panels.h and steps.h: internal linkage, arithmetic
/// only.
namespace longspan {
namespace {

using Floats = Vector<float>;
constexpr int kWidth = kLanes<float>;

inline float widened_bits(uint32_t low_half) {
  const uint32_t bits = low_half << 16;
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

#ifndef __AVX512BF16__
/// To the nearest bfloat16, ties to even; NaN stays NaN.
inline uint32_t rounded_bits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  if (value != value) return bits >> 16 | 0x40;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#endif

/// Rounds two vectors to 2 * kWidth bfloat16 in a row.
inline void store_rounded(uint16_t* to, Floats a, Floats b) {
#ifdef __AVX512BF16__
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(b, a));
#else
  for (int i = 0; i < kWidth; ++i) {
    to[i] = static_cast<uint16_t>(rounded_bits(a[i]));
    to[kWidth + i] = static_cast<uint16_t>(rounded_bits(b[i]));
  }
#endif
}

/// kWidth pairs of bfloat16, `even` in the lower halves.
struct Pairs {
#ifdef __AVX512BF16__
  __m512i bits;
#else
  VectorTypes<float>::Bits bits;
#endif
};

inline Pairs rounded_pairs(Floats even, Floats odd) {
#ifdef __AVX512BF16__
  const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
  alignas(64) static constexpr uint16_t kOrder[32] = {
      0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return {_mm512_permutexvar_epi16(_mm512_load_si512(kOrder), halves)};
#else
  Pairs pairs;
  for (int i = 0; i < kWidth; ++i) {
    pairs.bits[i] = rounded_bits(even[i]) | rounded_bits(odd[i]) << 16;
  }
  return pairs;
#endif
}

inline void store_pairs(uint32_t* to, Pairs pairs) {
  __builtin_memcpy(to, &pairs, sizeof pairs);
}

/// sum + even + odd.
inline Floats add_pairs(Floats sum, Pairs pairs) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(0x3f803f80),
                          (__m512bh)pairs.bits);
#else
  for (int i = 0; i < kWidth; ++i) {
    sum[i] += widened_bits(pairs.bits[i] & 0xffff);
    sum[i] += widened_bits(pairs.bits[i] >> 16);
  }
  return sum;
#endif
}

/// The larger one; b where either is NaN.
inline Floats larger(Floats a, Floats b) {
#ifdef __AVX512F__
  return _mm512_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

inline bool any_of(Choice<float> choice) {
#ifdef __AVX512F__
  return _mm512_test_epi32_mask((__m512i)choice, (__m512i)choice) != 0;
#else
  int32_t any = 0;
  for (int i = 0; i < kWidth; ++i) any |= choice[i];
  return any != 0;
#endif
}

inline float sum_of_lanes(Floats x) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps(x);
#else
  float sum = 0;
  for (int i = 0; i < kWidth; ++i) sum += x[i];
  return sum;
#endif
}

/// 2^x, within 2 ulp; 0 below 2^-126, infinite above the largest float, and
/// exactly 1 for 0.
inline Floats exp2_of(Floats x) {
#ifdef __AVX512F__
  // scalef takes the floor of its exponent; what the polynomial is left with
  // lies in [0, 1).
  const __m512 r = _mm512_reduce_ps(x, 0x01);
  Floats p = all_lanes(1.8671301659e-3f);
  p = p * r + 9.0170297772e-3f;
  p = p * r + 5.5799912661e-2f;
  p = p * r + 2.4016444385e-1f;
  p = p * r + 6.9315129519e-1f;
  p = p * r + 1.0f;
  const __mmask16 normal =
      _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(normal, p, x);
#else
  for (int i = 0; i < kWidth; ++i) {
    x[i] = x[i] < -126.0f ? 0.0f : __builtin_exp2f(x[i]);
  }
  return x;
#endif
}

}  // namespace
}  // namespace longspan
