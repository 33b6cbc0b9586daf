#pragma once

#include <cstdint>

#include "longspan/kernels/common/ampere/tiles.cuh"
#include "longspan/kernels/common/element.h"

namespace longspan::ampere {

/// Rows of kDepth channels in shared memory, 16 bytes longer than a multiple of
/// 32, so that eight of them touch all banks. Channels past the last are 0.
template <int kDepth>
constexpr int kPitch = kDepth + 8;

/// One of two without a branch, which would stand between lanes that trade.
__device__ __forceinline__ float either(bool which, float yes, float no) {
  float y;
  asm("{ .reg .pred p;\n"
      "setp.ne.b32 p, %3, 0;\n"
      "selp.f32 %0, %1, %2, p; }"
      : "=f"(y)
      : "f"(yes), "f"(no), "r"(static_cast<int>(which)));
  return y;
}

/// kThreads threads bring rows of `dim` channels, `stride` elements apart:
/// row_at(i) is the one that comes to place i, negative: zeros.
template <int kThreads, int kDepth, class Element>
struct RowCopies {
  static constexpr int kPieces = kDepth / 8, kStep = kThreads / kPieces;
  int first = threadIdx.x / kPieces, channel = threadIdx.x % kPieces * 8;
  bool there;
  const Element* from;
  uint32_t stride_bytes;

  __device__ RowCopies(const Element* rows, int64_t stride, int dim)
      : there(channel < dim),
        from(rows + (there ? channel : 0)),
        stride_bytes(static_cast<uint32_t>(stride) * sizeof(Element)) {}

  __device__ __forceinline__ void one(Element* to, int i, int row) const {
    const auto offset = static_cast<uint64_t>(max(row, 0)) * stride_bytes;
    copy_16(to + i * kPitch<kDepth> + channel,
            reinterpret_cast<const char*>(from) + offset, there && row >= 0);
  }
  template <int kRows, class RowAt>
  __device__ __forceinline__ void tile(Element* to, const RowAt& row_at) const {
#pragma unroll
    for (int i = 0; i < kRows; i += kStep) {
      one(to, first + i, row_at(first + i));
    }
  }
};

__host__ __device__ constexpr int padded_heads(int64_t heads) {
  return static_cast<int>((heads + 15) / 16 * 16);
}

/// 16 * kRows keys as a warp holds them, all channels in registers, and their
/// scores with a query: heads in order, 16 at a time, every pair alike.
template <class Element, int kDepth>
struct ScoredKeys {
  static constexpr int kRows = kDepth <= 128 ? 2 : 1;
  static constexpr int kKeys = 16 * kRows;
  int lane;
  uint32_t key[kRows][kDepth / 16][4];

  __device__ void load(const Element* keys) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Element* from =
          keys + (16 * r + lane % 16) * kPitch<kDepth> + lane / 16 * 8;
#pragma unroll
      for (int k = 0; k < kDepth / 16; ++k) {
        load_tiles(key[r][k], from + 16 * k);
      }
    }
  }

  /// Which of the keys score() answers for, in this lane; with one row every
  /// second pair of lanes repeats the other.
  __device__ int own() const {
    const int which = lane % (2 * kRows);
    return which / 2 * 16 + which % 2 * 8 + lane / 4;
  }
  __device__ bool answers() const { return lane % 4 < 2 * kRows; }

  /// `q` are padded_heads(heads) rows, `weights` as many.
  __device__ float score(const Element* q, const float* weights, int heads) {
    float sum[kRows][2] = {};
    const Element* from =
        q + (lane % 8 + lane / 16 * 8) * kPitch<kDepth> + lane / 8 % 2 * 8;
    for (int head = 0; head < heads; head += 16) {
      float product[kRows][8] = {};
#pragma unroll
      for (int k = 0; k < kDepth / 16; ++k) {
        uint32_t b[4];
        load_tiles(b, from + head * kPitch<kDepth> + 16 * k);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          multiply<Element>(product[r], key[r][k], b[0], b[1]);
          multiply<Element>(product[r] + 4, key[r][k], b[2], b[3]);
        }
      }
      const int column = head + lane % 4 * 2;
      if (head + 16 > heads) {
        // Zeros times an infinite key are not 0.
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (column + i / 4 * 8 + i % 2 < heads) continue;
#pragma unroll
          for (int r = 0; r < kRows; ++r) product[r][i] = 0.f;
        }
      }
      const auto low = *reinterpret_cast<const float2*>(weights + column);
      const auto high = *reinterpret_cast<const float2*>(weights + column + 8);
      const float weight[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          sum[r][i / 2 % 2] =
              fmaf(positive_part(product[r][i]), weight[i / 4 * 2 + i % 2],
                   sum[r][i / 2 % 2]);
        }
      }
    }
    // Over the four lanes of a quad, in one order for all: a lane is left with
    // what own() says.
    const bool odd = lane & 1;
    float left[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      left[r] = either(odd, sum[r][1], sum[r][0]) +
                __shfl_xor_sync(~0u, either(odd, sum[r][0], sum[r][1]), 1);
    }
    float all;
    if constexpr (kRows == 2) {
      const bool high = lane & 2;
      all = either(high, left[1], left[0]) +
            __shfl_xor_sync(~0u, either(high, left[0], left[1]), 2);
    } else {
      all = left[0] + __shfl_xor_sync(~0u, left[0], 2);
    }
    return all + 0.f;  // no -0
  }
};

/// Queries and weights of one token, padded to whole tiles of heads.
template <int kThreads, int kDepth, class Element>
__device__ void copy_heads(Element* to, float* weights_to, const Element* q,
                           int64_t q_head, const float* weights,
                           int64_t weights_head, int heads, int dim) {
  const int padded = padded_heads(heads);
  const RowCopies<kThreads, kDepth, Element> rows(q, q_head, dim);
  for (int i = rows.first; i < padded; i += rows.kStep) {
    rows.one(to, i, i < heads ? i : -1);
  }
  for (int i = threadIdx.x; i < padded; i += kThreads) {
    weights_to[i] = i < heads ? weights[i * weights_head] : 0.f;
  }
}

}  // namespace longspan::ampere
