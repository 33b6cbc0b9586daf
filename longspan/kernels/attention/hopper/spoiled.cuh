#pragma once

#include "longspan/kernels/common/element.h"
#include "longspan/kernels/common/hopper/fragment.cuh"

namespace longspan::hopper {

/// Elements of 16 bits in shared memory that are NaN or infinite.

template <ElementType kType>
__device__ __forceinline__ bool is_spoiled(uint32_t bits) {
  constexpr uint32_t kExponent =
      kType == ElementType::float16 ? 0x7C00 : 0x7F80;
  return (bits & kExponent) == kExponent;
}

/// Of 16 bits that are no finite number, the float.
template <ElementType kType>
__device__ __forceinline__ float spoiled_value(uint32_t bits) {
  const bool is_infinite =
      (bits & (kType == ElementType::float16 ? 0x3FF : 0x7F)) == 0;
  if (!is_infinite) return NAN;
  return (bits & 0x8000) != 0 ? -INFINITY : INFINITY;
}

/// Two elements, without those that are not finite.
template <ElementType kType>
__device__ __forceinline__ uint32_t cleared(uint32_t pair) {
  if (is_spoiled<kType>(pair)) pair &= 0xFFFF0000;
  if (is_spoiled<kType>(pair >> 16)) pair &= 0x0000FFFF;
  return pair;
}

/// Where a word of two channels of a row stands, in blocks of 64 rows.
__device__ __forceinline__ uint32_t word_place(int row, int word) {
  return word / 32 * (64 * kRowBytes) + piece_place(row, word % 32 / 4) +
         4 * (word % 4);
}

/// Whether one of kThreads finds any in its share of kBytes, pieces that
/// neighbours read at once. It asks for kAtOnce of them at a time.
template <ElementType kType, uint32_t kBytes, int kThreads, int kAtOnce = 8>
__device__ __forceinline__ bool finds_spoiled(uint32_t at) {
  constexpr uint32_t kStep = kThreads * 16;
  static_assert(kBytes % kStep == 0);
  uint32_t sum[4] = {};
  at += thread_anew() % kThreads * 16;
#pragma unroll kAtOnce
  for (uint32_t i = 0; i < kBytes; i += kStep) {
    const uint4 piece = load_piece(at + i);
    sum[0] = add_nothing_of<kType>(piece.x, sum[0]);
    sum[1] = add_nothing_of<kType>(piece.y, sum[1]);
    sum[2] = add_nothing_of<kType>(piece.z, sum[2]);
    sum[3] = add_nothing_of<kType>(piece.w, sum[3]);
  }
  return ((sum[0] | sum[1] | sum[2] | sum[3]) & 0x7FFF7FFF) != 0;
}

/// Sets those that are to 0, and shows it to products; each of kThreads has a
/// share of kBytes.
template <ElementType kType, uint32_t kBytes, int kThreads>
__device__ __forceinline__ void clear_spoiled(uint32_t at) {
#pragma unroll 1
  for (uint32_t i = thread_anew() % kThreads * 16; i < kBytes;
       i += kThreads * 16) {
    const uint4 x = load_piece(at + i);
    store_piece(at + i, make_uint4(cleared<kType>(x.x), cleared<kType>(x.y),
                                   cleared<kType>(x.z), cleared<kType>(x.w)));
  }
  fence_for_wgmma();
}

}  // namespace longspan::hopper
