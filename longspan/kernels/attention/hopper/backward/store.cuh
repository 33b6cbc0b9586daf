#pragma once

#include "longspan/kernels/attention/hopper/backward/config.h"
#include "longspan/kernels/common/hopper/fragment.cuh"

namespace longspan::hopper {

/// The heads that use a key head.
struct SharingHeads {
  int first, last;
  __device__ SharingHeads(const DenseKeysParams& params, int key_head) {
    first = max(key_head * params.heads_per_key_head - params.head_offset, 0);
    last = min((key_head + 1) * params.heads_per_key_head - params.head_offset,
               params.heads);
  }
};

/// Heads that add to the same keys, one after another: those before were dealt
/// before.
struct HeadsInTurn {
  static constexpr int kWarps = 8;
  int* added = nullptr;
  int heads_before = 0;

  __device__ HeadsInTurn(const DenseKeysParams& params, int block, int head,
                         int key_head) {
    if (params.turns == nullptr || block >= params.apart) return;
    added = params.heads_added + static_cast<int64_t>(key_head) * params.apart +
            block;
    heads_before = head - SharingHeads(params, key_head).first;
  }
  __device__ void wait(int lane) const {
    if (added == nullptr) return;
    if (lane == 0) wait_for_number(added, heads_before * kWarps);
    __syncwarp();
  }
  /// All lanes have added.
  __device__ void pass_on(int lane) const {
    if (added != nullptr && lane == 0) count_up(added);
  }
};

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
