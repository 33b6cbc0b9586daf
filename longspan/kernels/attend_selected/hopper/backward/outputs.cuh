#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "longspan/kernels/attend_selected/hopper/attend_selected.h"

namespace longspan::hopper {

/// How many lanes, 8 channels each, a head takes: a power of two.
__host__ __device__ constexpr int delta_lanes(int value_dim) {
  int lanes = 1;
  while (lanes < 32 && 8 * lanes < value_dim) lanes *= 2;
  return lanes;
}

__device__ __forceinline__ float2 as_floats(__nv_bfloat162 pair) {
  return __bfloat1622float2(pair);
}
__device__ __forceinline__ float2 as_floats(__half2 pair) {
  return __half22float2(pair);
}

/// A warp one head, or several narrow ones: sums out * dout over channels.
template <class Pair>
__global__ void __launch_bounds__(256)
    delta_kernel(const __grid_constant__ OutputDeltaArgs args) {
  const int lanes = delta_lanes(args.value_dim);
  const int lane = threadIdx.x % lanes, each = 256 / lanes;
  const int64_t all = args.rows * args.queries * args.heads;
  // All lanes of a warp take part in its sums, also those without a head.
  const int64_t rounds = (all + each - 1) / each;
  for (int64_t round = blockIdx.x; round < rounds; round += gridDim.x) {
    const int64_t asked = round * each + threadIdx.x / lanes;
    const int64_t i = asked < all ? asked : all - 1;
    const int64_t head = i % args.heads, token = i / args.heads;
    const int64_t query = token % args.queries, row = token / args.queries;
    const auto* out = static_cast<const uint16_t*>(args.out.data) +
                      row * args.out.row_stride +
                      query * args.out.token_stride +
                      head * args.out.head_stride;
    const auto* dout = static_cast<const uint16_t*>(args.dout.data) +
                       row * args.dout.row_stride +
                       query * args.dout.token_stride +
                       head * args.dout.head_stride;
    float sum = 0.f;
    for (int channel = lane * 8; channel < args.value_dim;
         channel += 8 * lanes) {
      const uint4 x = __ldcs(reinterpret_cast<const uint4*>(out + channel));
      const uint4 y = __ldcs(reinterpret_cast<const uint4*>(dout + channel));
      const auto* a = reinterpret_cast<const Pair*>(&x);
      const auto* b = reinterpret_cast<const Pair*>(&y);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 u = as_floats(a[k]), v = as_floats(b[k]);
        sum = fmaf(u.x, v.x, sum);
        sum = fmaf(u.y, v.y, sum);
      }
    }
    for (int step = lanes / 2; step > 0; step /= 2) {
      sum += __shfl_xor_sync(~0u, sum, step);
    }
    if (lane == 0 && asked < all) {
      args.delta
          .data[row * args.delta.row_stride + query * args.delta.token_stride +
                head * args.delta.head_stride] = sum;
    }
  }
}

}  // namespace longspan::hopper
