#pragma once

#include "longspan/kernels/common/ampere/checks.h"

/// Stands before longspan/kernels/common/ampere/launch.h.
namespace longspan::ampere {

template <class Params>
cudaError_t launch(void (*kernel)(Params), int64_t blocks, int threads,
                   size_t shared_bytes, cudaStream_t, const Params& params) {
  machine::run(static_cast<int>(blocks), threads, shared_bytes,
               [&] { kernel(params); });
  return cudaSuccess;
}

template <class Params>
cudaError_t prefer_shared_memory(void (*)(Params)) {
  return cudaSuccess;
}

}  // namespace longspan::ampere
