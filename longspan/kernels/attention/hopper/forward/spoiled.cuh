#pragma once

#include "longspan/kernels/attention/hopper/records.cuh"
#include "longspan/kernels/attention/hopper/spoiled.cuh"
#include "longspan/kernels/common/element.h"
#include "longspan/kernels/common/hopper/fragment.cuh"

namespace longspan::hopper {

/// Values that are infinite or NaN, in a tile that some query does not see
/// whole. A weight of 0 hides finite values alone: 0 * NaN is NaN. So before
/// the products of such a tile its values are looked through. What is not
/// finite is added to the sums of who sees it, by hand, and is 0 afterwards.
///
/// Values are blocks of 64 channels, kKeys rows each, one after another.

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

}  // namespace longspan::hopper
