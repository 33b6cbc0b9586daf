#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "tests/kernels/machine/machine.h"

/// As much of CUDA as the kernels for Hopper use, for the machine on paper.

#define __device__
#define __host__
#define __global__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
inline dim3 threadIdx, blockIdx, blockDim, gridDim;

struct int2 {
  int x, y;
};
struct float2 {
  float x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
inline int2 make_int2(int x, int y) {
  return {x, y};
}
inline float2 make_float2(float x, float y) {
  return {x, y};
}
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  return {x, y, z, w};
}

inline int min(int x, int y) {
  return x < y ? x : y;
}
inline int max(int x, int y) {
  return x > y ? x : y;
}
using std::isinf;
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline float __fdividef(float x, float y) {
  return x / y;
}
template <class T>
void __stcs(T* to, const T& x) {
  *to = x;
}
template <class T>
T atomicAdd(T* to, T x) {
  const T before = *to;
  *to += x;
  return before;
}
[[noreturn]] inline void __trap() {
  longspan::machine::fail("a thread traps");
}

inline uint32_t __cvta_generic_to_shared(const void* p) {
  return longspan::machine::address_of(p);
}

// ---- Warps and blocks ----------------------------------------------------

template <class T>
T __shfl_sync(unsigned, T x, int from) {
  static_assert(sizeof(T) <= 8);
  longspan::machine::Words mine{};
  std::memcpy(mine.word, &x, sizeof x);
  std::memcpy(&x, longspan::machine::meet_lanes(mine)[from].word, sizeof x);
  return x;
}
template <class T>
T __shfl_xor_sync(unsigned all, T x, int other) {
  return __shfl_sync(all, x, longspan::machine::lane() ^ other);
}
inline uint32_t __ballot_sync(unsigned, bool x) {
  const auto* words = longspan::machine::meet_lanes({{x}});
  uint32_t all = 0;
  for (int i = 0; i < 32; ++i) {
    all |= static_cast<uint32_t>(words[i].word[0]) << i;
  }
  return all;
}
inline int __ffs(int x) {
  return std::countr_zero(static_cast<uint32_t>(x)) + 1;  // of none: not asked
}
inline bool __any_sync(unsigned, bool x) {
  const auto* words = longspan::machine::meet_lanes({{x}});
  bool any = false;
  for (int i = 0; i < 32; ++i) any = any || words[i].word[0] != 0;
  return any;
}
inline void __syncwarp() {
  longspan::machine::meet_lanes({});
}
inline void __syncthreads() {
  longspan::machine::meet(0, static_cast<int>(blockDim.x), true);
}

// ---- The host ------------------------------------------------------------

enum cudaError_t { cudaSuccess };
using cudaStream_t = struct CUstream_st*;
enum { cudaDevAttrMultiProcessorCount, cudaEnableDefault };
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) {
  *value = longspan::machine::kProcessors;
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes,
                                   cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
inline const char* cudaGetErrorString(cudaError_t) {
  return "no error";
}
