#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace longspan {

/// Launches a kernel with one argument. When it `follows` a launch of ours, its
/// blocks may begin before that one is done, and wait where they must.
template <class Params>
cudaError_t launch_after(void (*kernel)(Params), int blocks, int threads,
                         uint32_t shared_bytes, bool follows,
                         cudaStream_t stream, const Params& params) {
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = follows ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params);
}

/// Waits until the launch before this one is done and its writes are seen.
/// Before Hopper launches do not overlap.
__device__ __forceinline__ void after_former_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets blocks of the next launch take free processors.
__device__ __forceinline__ void let_next_launch_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace longspan
