#pragma once

#include <cstdint>

#include "longspan/kernels/select_keys/ampere/key_scores.cuh"

namespace longspan::ampere {

/// Sums of 16 keys and 32 channels, added to device memory in whole lines of
/// 128 bytes. Products leave a lane two neighbours of every 8 channels; so the
/// factor that has the channels is kept in another order, which makes them four
/// neighbours of every 16: of 8 pairs of channels the even ones come first. Two
/// halves of a warp then trade 16 channels for 4 keys.

/// Rows of kDepth channels in that order.
template <int kThreads, int kDepth, int kRows, class Element>
__device__ void turn_channels(Element* to, const Element* from) {
  constexpr int kPairs = kDepth / 2, kRowPairs = (kDepth + 8) / 2;
  for (int i = threadIdx.x; i < kRows * kPairs; i += kThreads) {
    const int row = i / kPairs, pair = i % kPairs;
    const int source = pair / 8 * 8 + pair % 4 * 2 + pair / 4 % 2;
    reinterpret_cast<uint32_t*>(to)[row * kRowPairs + pair] =
        reinterpret_cast<const uint32_t*>(from)[row * kRowPairs + source];
  }
}

/// Adds without a branch.
__device__ __forceinline__ void add_four_if(bool does, float* to,
                                            const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .pred p;\n"
      "setp.ne.b32 p, %5, 0;\n"
      "@p red.global.add.v4.f32 [%0], {%1, %2, %3, %4}; }" ::"l"(to),
      "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(static_cast<int>(does))
      : "memory");
#else
  if (!does) return;
  for (int i = 0; i < 4; ++i) atomicAdd(to + i, x[i]);
#endif
}

/// Where a lane's four channels of keys r, r + 4, r + 8 and r + 12 of its warp
/// start, r = lane / 4 % 4.
struct KeyPlaces {
  float* row[4];
  bool there[4];

  __device__ KeyPlaces(const int32_t* key, float* to, int64_t stride,
                       int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int32_t at = key[lane / 4 % 4 + 4 * i];
      there[i] = at >= 0;
      row[i] =
          to +
          static_cast<uint64_t>(max(at, 0)) * static_cast<uint32_t>(stride) +
          channel(lane);
    }
  }

  __device__ static int channel(int lane) { return (lane & 16) + lane % 4 * 4; }

  /// `d[part]` are 16 channels of a product; `first` is the first of all 32,
  /// those past `dim` are left out.
  __device__ __forceinline__ void add(const float (&d)[2][8], int first,
                                      int dim, int lane) const {
    const bool upper = lane & 16, in_row = first + channel(lane) < dim;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float near[4], far[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int at = e / 2 * 4 + 2 * i + e % 2;
        const float other =
            __shfl_xor_sync(~0u, either(upper, d[0][at], d[1][at]), 16);
        near[e] = either(upper, other, d[0][at]);
        far[e] = either(upper, d[1][at], other);
      }
      add_four_if(in_row && there[2 * i], row[2 * i] + first, near);
      add_four_if(in_row && there[2 * i + 1], row[2 * i + 1] + first, far);
    }
  }
};

}  // namespace longspan::ampere
