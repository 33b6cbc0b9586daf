#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "longspan/kernels/common/device.h"
#include "longspan/kernels/common/element.h"

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

/// Why code for cards since a generation does not run on the current device, or
/// nothing.
inline std::optional<std::string> why_not_since(int oldest) {
  const int generation = device_generation();
  if (generation >= oldest) return std::nullopt;
  return "the device is of generation " + std::to_string(generation) +
         ", below " + std::to_string(oldest);
}

inline bool fits_32_bits(int64_t count) {
  return count <= (1 << 30);
}

/// Whether elements of so many bytes start, for every token and head, at a
/// multiple of 16 bytes.
template <class Pointer>
bool is_aligned(const TokenArray<Pointer>& array, int element_bytes = 2) {
  const int step = 16 / element_bytes;
  return reinterpret_cast<uintptr_t>(array.data) % 16 == 0 &&
         array.row_stride % step == 0 && array.token_stride % step == 0 &&
         array.head_stride % step == 0;
}

}  // namespace longspan
