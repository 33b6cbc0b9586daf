#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "longspan/kernels/common/ampere/lanes.cuh"

namespace longspan::ampere {

/// Small tiles of 16-bit elements: into shared memory, from there into
/// registers, multiplied. A lane holds of each 16 x 8 product rows lane / 4 and
/// lane / 4 + 8, columns lane % 4 * 2 and the next.

__device__ __forceinline__ void load_tiles(uint32_t (&x)[4], const void* from) {
  asm volatile(
      "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
      : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(from)))
      : "memory");
}

__device__ __forceinline__ void load_turned_tiles(uint32_t (&x)[4],
                                                  const void* from) {
  asm volatile(
      "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
      : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(from)))
      : "memory");
}

/// d += a b, 16 x 8 from 16 x 16 and 16 x 8.
template <class Element>
__device__ __forceinline__ void multiply(float* d, const uint32_t (&a)[4],
                                         uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

template <class Element>
__device__ __forceinline__ Element narrowed(float x) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    return __float2bfloat16(x);
  } else {
    return __float2half(x);
  }
}

/// Two in a word, `low` in the lower half.
template <class Element>
__device__ __forceinline__ uint32_t packed(float low, float high) {
  uint32_t y;
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  }
  return y;
}

/// 16 bytes to shared memory, zeros when not `there`.
__device__ __forceinline__ void copy_16(void* to, const void* from,
                                        bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from), "r"(there ? 16 : 0)
               : "memory");
}

/// The greatest of all threads, for a block of kWarps warps.
template <int kWarps>
__device__ inline float block_max(float x, float* scratch) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  }
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) x = fmaxf(x, scratch[warp]);
  __syncthreads();
  return x;
}

/// A power of two that brings the greatest of some derivatives close to 2^to:
/// float16 has few exponents.
__device__ inline float scale_to(int to, float greatest) {
  if (!(greatest > 0.f) || isinf(greatest)) return 1.f;
  return ldexpf(1.f, min(100, max(-100, to - ilogbf(greatest))));
}

}  // namespace longspan::ampere
