#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "longspan/kernels/element.h"

namespace longspan {

/// What launches of CUDA kernels ask of a device and of their arguments.

inline int processor_count() {
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

inline void check_launch(const char* who, cudaError_t error) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();  // it is told here, and not to the next caller
  throw std::runtime_error(std::string(who) + ": " + cudaGetErrorString(error));
}

inline bool fits_32_bits(int64_t count) {
  return count <= (1 << 30);
}

/// Whether elements of two bytes start, for every token and head, at a multiple
/// of 16 bytes.
template <class Pointer>
bool is_aligned(const TokenArray<Pointer>& array) {
  return reinterpret_cast<uintptr_t>(array.data) % 16 == 0 &&
         array.row_stride % 8 == 0 && array.token_stride % 8 == 0 &&
         array.head_stride % 8 == 0;
}

}  // namespace longspan
