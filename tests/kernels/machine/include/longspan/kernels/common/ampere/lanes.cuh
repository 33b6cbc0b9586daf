#pragma once

#include <cuda_runtime.h>

/// Stands before longspan/kernels/common/ampere/lanes.cuh.
namespace longspan {

inline float exp2_fast(float x) {
  return std::exp2(x);
}

inline float quad_max(float x) {
  x = std::fmax(x, __shfl_xor_sync(~0u, x, 1));
  return std::fmax(x, __shfl_xor_sync(~0u, x, 2));
}

inline float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

}  // namespace longspan
