#pragma once

#include "longspan/kernels/common/cpu/simd/pack.h"

/// Rounds sums to the elements of callers: to the nearest, ties to even. NaN
/// stays NaN.
namespace longspan {
namespace {

inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline void narrow(float value, float& to) {
  to = value;
}
inline void narrow(double value, double& to) {
  to = value;
}

inline void narrow(float value, Bfloat16& to) {
  const uint32_t bits = bits_of_float(value);
  const uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  to.bits = static_cast<uint16_t>(value != value ? bits >> 16 | 0x40 : nearest);
}

/// Numbers below 2^-14 are rounded by adding 1/2, whose last bit is theirs.
inline void narrow(float value, Float16& to) {
  const uint32_t bits = bits_of_float(value), size = bits & 0x7fffffffu;
  const uint32_t normal =
      (size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13;
  const uint32_t tiny =
      bits_of_float(float_of_bits(size) + 0.5f) - (126u << 23);
  const uint32_t large = size > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t half = size < 0x38800000u   ? tiny
                        : size < 0x47800000u ? normal
                                             : large;
  to.bits = static_cast<uint16_t>(half | (bits >> 16 & 0x8000u));
}

/// to = from * factor.
template <class Element>
void narrow_row(const Accumulator<Element>* from, int n,
                Accumulator<Element> factor, Element* to) {
  for (int i = 0; i < n; ++i) narrow(from[i] * factor, to[i]);
}

template <class Element>
void clear_row(int n, Element* to) {
  for (int i = 0; i < n; ++i) to[i] = Element{};
}

}  // namespace
}  // namespace longspan
