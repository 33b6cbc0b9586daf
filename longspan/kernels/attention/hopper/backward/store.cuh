#pragma once

#include "longspan/kernels/attention/hopper/backward/config.h"
#include "longspan/kernels/common/hopper/fragment.cuh"

namespace longspan::hopper {

/// Writes or adds 64 rows of sums.
template <ElementType kType, int kCount, class Record>
__device__ __forceinline__ void store_sums(const float (&sums)[kCount],
                                           float scale,
                                           const GradientPlace& place,
                                           const Record& record, int head,
                                           int first, int lane) {
  int64_t at[2];
  bool there[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    there[i] = first + 8 * i < record.rows;
    at[i] = record.row * place.row +
            (record.first_row + first + 8 * i) * place.token +
            head * place.head;
  }
  if (place.is_float) {
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      const int column = 8 * j + 2 * (lane & 3);
      if (column >= place.channels) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (!there[i]) continue;
        auto* to = reinterpret_cast<float2*>(static_cast<float*>(place.data) +
                                             at[i] + column);
        const float2 sum = make_float2(sums[4 * j + 2 * i] * scale,
                                       sums[4 * j + 2 * i + 1] * scale);
        if (place.is_shared) {
          add_to(&to->x, sum.x, sum.y);
          continue;
        }
        const float2 before = place.adds ? *to : make_float2(0.f, 0.f);
        *to = make_float2(before.x + sum.x, before.y + sum.y);
      }
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < kCount / 4; j += 4) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t x[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float* value = sums + 4 * (j + n) + 2 * i;
        x[n] = pack_pair<kType>(value[0] * scale, value[1] * scale);
      }
      turn_quad(x, lane);
      const int column = 8 * (j + (lane & 3));
      if (there[i] && column < place.channels) {
        *reinterpret_cast<uint4*>(static_cast<uint16_t*>(place.data) + at[i] +
                                  column) = make_uint4(x[0], x[1], x[2], x[3]);
      }
    }
  }
}

}  // namespace longspan::hopper
