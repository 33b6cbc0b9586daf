#pragma once

#include "longspan/kernels/common/ampere/checks.h"

namespace longspan::ampere {

/// The most shared memory that the current device lets a block have.
inline size_t block_memory() {
  int device = 0, bytes = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                         device);
  return static_cast<size_t>(bytes);
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

/// For kernels of which several blocks share a processor: as much shared memory
/// as there is, where the driver would weigh it against the L1 cache.
template <class Params>
cudaError_t prefer_shared_memory(void (*kernel)(Params)) {
  return cudaFuncSetAttribute(kernel,
                              cudaFuncAttributePreferredSharedMemoryCarveout,
                              cudaSharedmemCarveoutMaxShared);
}

/// Launches a block for every query and `block_heads` heads of a key head.
template <class Args>
cudaError_t launch_blocks(void (*kernel)(Args), const Args& args,
                          int block_heads, int threads, size_t shared_bytes,
                          cudaStream_t stream) {
  const int64_t group = args.heads / args.key_heads;
  const int64_t blocks = args.rows * args.queries * args.key_heads *
                         ((group + block_heads - 1) / block_heads);
  return launch(kernel, blocks, threads, shared_bytes, stream, args);
}

}  // namespace longspan::ampere
