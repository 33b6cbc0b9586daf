#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "longspan/kernels/common/ampere/lanes.cuh"
#include "longspan/kernels/common/hopper/ptx.cuh"

namespace longspan::hopper {

/// A tile of 64 rows is kept as blocks of 64 channels, as wgmma wants them.
constexpr int kBlockChannels = 64;
constexpr int kRowBytes = 128;

/// Where 16 bytes of a row stand inside its block.
__device__ __forceinline__ uint32_t piece_place(int row, int piece) {
  return static_cast<uint32_t>(row * kRowBytes + ((piece ^ (row & 7)) << 4));
}

/// Words x[j] of the four lanes of a quad, turned: lane c gets word c of lanes
/// 0, 1, 2, 3.
__device__ __forceinline__ void turn_quad(uint32_t (&x)[4], int lane) {
  const bool odd = lane & 1, high = lane & 2;
  const uint32_t a = __shfl_xor_sync(~0u, odd ? x[0] : x[1], 1);
  const uint32_t b = __shfl_xor_sync(~0u, odd ? x[2] : x[3], 1);
  if (odd) {
    x[0] = a, x[2] = b;
  } else {
    x[1] = a, x[3] = b;
  }
  const uint32_t c = __shfl_xor_sync(~0u, high ? x[0] : x[2], 2);
  const uint32_t d = __shfl_xor_sync(~0u, high ? x[1] : x[3], 2);
  if (high) {
    x[0] = c, x[1] = d;
  } else {
    x[2] = c, x[3] = d;
  }
}

/// Writes an accumulator of 64 rows as bfloat16, 64 bytes of a row at a time.
/// `row_0` and `row_1` point at the thread's two rows, null: not wanted.
template <int kCount>
__device__ __forceinline__ void store_rows(const float (&d)[kCount],
                                           float scale_0, float scale_1,
                                           __nv_bfloat16* row_0,
                                           __nv_bfloat16* row_1, int lane) {
#pragma unroll
  for (int j = 0; j < kCount / 4; j += 4) {
    uint32_t x[4], y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* value = d + 4 * (j + i);
      x[i] = pack_pair(value[0] * scale_0, value[1] * scale_0);
      y[i] = pack_pair(value[2] * scale_1, value[3] * scale_1);
    }
    turn_quad(x, lane);
    turn_quad(y, lane);
    const int column = 8 * (j + (lane & 3));
    if (row_0 != nullptr) {
      __stcs(reinterpret_cast<uint4*>(row_0 + column),
             make_uint4(x[0], x[1], x[2], x[3]));
    }
    if (row_1 != nullptr) {
      __stcs(reinterpret_cast<uint4*>(row_1 + column),
             make_uint4(y[0], y[1], y[2], y[3]));
    }
  }
}

/// Columns 16 k to 16 k + 15 of an accumulator as an operand in registers.
template <ElementType kType = ElementType::bfloat16, int kCount>
__device__ __forceinline__ void pack_operand(uint32_t (&a)[4],
                                             const float (&d)[kCount], int k) {
  a[0] = pack_pair<kType>(d[8 * k], d[8 * k + 1]);
  a[1] = pack_pair<kType>(d[8 * k + 2], d[8 * k + 3]);
  a[2] = pack_pair<kType>(d[8 * k + 4], d[8 * k + 5]);
  a[3] = pack_pair<kType>(d[8 * k + 6], d[8 * k + 7]);
}

/// Stores such operands as a block of 64 rows, from column 16 `first` on.
/// `warp` is that of the warpgroup.
template <int kCount>
__device__ __forceinline__ void store_operand(uint32_t block,
                                              const uint32_t (&a)[kCount][4],
                                              int warp, int lane,
                                              int first = 0) {
  const int row = 16 * warp + (lane & 15);
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    store_tiles(block + piece_place(row, 2 * (first + k) + (lane >> 4)), a[k]);
  }
}

}  // namespace longspan::hopper
