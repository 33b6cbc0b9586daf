#pragma once

#include <optional>
#include <string>

#include "longspan/kernels/cuda/checks.h"
#include "longspan/kernels/cuda/device.h"
#include "longspan/kernels/key_selection.h"

namespace longspan::ampere {

/// Why code for cards since Ampere does not run on the current device, or
/// nothing.
inline std::optional<std::string> why_not_here() {
  const int generation = device_generation();
  if (generation >= 80) return std::nullopt;
  return "the device is of generation " + std::to_string(generation) +
         ", below 80";
}

/// Why a block cannot have that much shared memory, or nothing.
inline std::optional<std::string> why_not_shared(size_t bytes) {
  int device = 0, most = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                         device);
  if (bytes <= static_cast<size_t>(most)) return std::nullopt;
  return "so many heads and channels take " + std::to_string(bytes) +
         " bytes of shared memory, the device has " + std::to_string(most);
}

/// What all kernels of the indexer ask.
inline std::optional<std::string> why_not_score(const KeyScoreArgs& args) {
  if (args.type != ElementType::bfloat16 && args.type != ElementType::float16) {
    return "elements are neither bfloat16 nor float16";
  }
  if (args.head_dim % 8 != 0 || args.head_dim > 256) {
    return "no kernel for " + std::to_string(args.head_dim) +
           " channels (has multiples of 8 up to 256)";
  }
  if (!fits_32_bits(args.rows * args.queries) || !fits_32_bits(args.keys) ||
      !fits_32_bits(args.slots) || !fits_32_bits(args.heads)) {
    return "more than 2^30 queries, keys, slots or heads";
  }
  if (!fits_32_bits(args.q.head_stride) || !fits_32_bits(args.k.token_stride)) {
    return "more than 2^30 elements from one head or key to the next";
  }
  if (!is_aligned(args.q) || !is_aligned(args.k)) {
    return "q or k is not aligned to 16 bytes";
  }
  return why_not_here();
}

template <class Params>
cudaError_t launch(void (*kernel)(Params), int64_t blocks, int threads,
                   size_t shared_bytes, cudaStream_t stream,
                   const Params& params) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, stream>>>(
      params);
  return cudaGetLastError();
}

}  // namespace longspan::ampere
