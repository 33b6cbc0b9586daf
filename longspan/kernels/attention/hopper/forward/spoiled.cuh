#pragma once

#include "longspan/kernels/attention/hopper/records.cuh"
#include "longspan/kernels/common/element.h"
#include "longspan/kernels/common/hopper/fragment.cuh"

namespace longspan::hopper {

/// Values that are infinite or NaN, in a tile that some query does not see
/// whole. A weight of 0 hides finite values alone: 0 * NaN is NaN. So before
/// the products of such a tile its values are looked through. What is not
/// finite is added to the sums of who sees it, by hand, and is 0 afterwards.
///
/// Values are blocks of 64 channels, kKeys rows each, one after another.

/// Whether one of kThreads finds any in its share of kBytes, pieces that
/// neighbours read at once. It asks for kAtOnce of them at a time.
template <ElementType kType, uint32_t kBytes, int kThreads, int kAtOnce>
__device__ __forceinline__ bool finds_spoiled(uint32_t values) {
  constexpr uint32_t kStep = kThreads * 16;
  static_assert(kBytes % kStep == 0);
  uint32_t sum[4] = {};
  values += thread_anew() % kThreads * 16;
#pragma unroll kAtOnce
  for (uint32_t i = 0; i < kBytes; i += kStep) {
    const uint4 piece = load_piece(values + i);
    sum[0] = add_nothing_of<kType>(piece.x, sum[0]);
    sum[1] = add_nothing_of<kType>(piece.y, sum[1]);
    sum[2] = add_nothing_of<kType>(piece.z, sum[2]);
    sum[3] = add_nothing_of<kType>(piece.w, sum[3]);
  }
  return ((sum[0] | sum[1] | sum[2] | sum[3]) & 0x7FFF7FFF) != 0;
}

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

/// Adds those that a thread's two rows see, of keys from column `first` on.
template <ElementType kType, int kKeys, int kCount, class Record>
__device__ __forceinline__ void add_spoiled(float (&out)[kCount],
                                            uint32_t values,
                                            const Record& record, int first,
                                            int row) {
  const int lane = thread_anew() % 32;
  int begin[2], end[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    begin[i] = record.begin[row + 8 * i] - first;
    end[i] = record.end[row + 8 * i] - first;
  }
  // Sums go round, so that four of them are named here and not all: the loop
  // over keys would else be there once for each eight channels.
#pragma unroll 1
  for (int j = 0; j < kCount / 4; ++j) {
    float sum[4] = {out[0], out[1], out[2], out[3]};
    const uint32_t block = values + j / 8 * (kKeys * kRowBytes);
#pragma unroll 1
    for (int key = 0; key < kKeys; ++key) {
      const uint32_t pair =
          load_word(block + piece_place(key, j % 8) + 4 * (lane & 3));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t bits = i % 2 == 0 ? pair & 0xFFFF : pair >> 16;
        const bool is_seen = key >= begin[i / 2] && key < end[i / 2];
        if (is_seen && is_spoiled<kType>(bits)) {
          sum[i] += spoiled_value<kType>(bits);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      out[i] = i + 4 < kCount ? out[i + 4] : sum[i + 4 - kCount];
    }
  }
}

/// Sets them to 0; each of kThreads has a share of kBytes.
template <ElementType kType, uint32_t kBytes, int kThreads>
__device__ __forceinline__ void clear_spoiled(uint32_t values) {
  const auto cleared = [](uint32_t pair) {
    if (is_spoiled<kType>(pair)) pair &= 0xFFFF0000;
    if (is_spoiled<kType>(pair >> 16)) pair &= 0x0000FFFF;
    return pair;
  };
#pragma unroll 1
  for (uint32_t i = thread_anew() % kThreads * 16; i < kBytes;
       i += kThreads * 16) {
    const uint4 x = load_piece(values + i);
    store_piece(values + i, make_uint4(cleared(x.x), cleared(x.y), cleared(x.z),
                                       cleared(x.w)));
  }
  fence_for_wgmma();
}

}  // namespace longspan::hopper
