#pragma once

#include "longspan/kernels/attention/hopper/records.cuh"
#include "longspan/kernels/attention/hopper/spoiled.cuh"
#include "longspan/kernels/common/element.h"
#include "longspan/kernels/common/hopper/fragment.cuh"

namespace longspan::hopper {

/// NaNs and infinities in what is summed over the columns of a tile that some
/// row does not see whole. A weight of 0 hides what is finite: 0 * NaN is NaN.
/// So what is not finite is added by hand to the sums of who sees it, and is 0
/// in the tile from then on. Who looks for it has met its traces in registers:
/// scores of a spoiled row are not finite either.
///
/// Tiles are blocks of 64 channels and 64 columns, one after another. Functions
/// that few tiles come to ask anew which thread they are: nothing is kept in
/// registers for them.

/// Whether anything that a warp holds is not finite.
template <int kCount>
__device__ __forceinline__ bool holds_spoiled(const float (&x)[kCount]) {
  float nothing[2] = {};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    nothing[i & 1] = fmaf(x[i], 0.f, nothing[i & 1]);
  }
  return __any_sync(~0u, nothing[0] + nothing[1] != 0.f);
}

/// Queries of a tile whose dout may be spoiled, a bit each: then delta is not
/// finite, or 0 for a query that saw nothing, whose lse is infinite.
struct SuspectQueries {
  uint32_t bits[2] = {};
  __device__ SuspectQueries() {}
  __device__ __forceinline__ SuspectQueries(const float* lse,
                                            const float* delta, int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = lane + 32 * i;
      const float nothing = fmaf(lse[at], 0.f, 0.f * delta[at]);
      bits[i] = __ballot_sync(~0u, nothing != 0.f);
    }
  }
  __device__ bool any() const { return (bits[0] | bits[1]) != 0; }
};

/// Of any 16 bits.
template <ElementType kType>
__device__ __forceinline__ float float_of(uint32_t bits) {
  if (is_spoiled<kType>(bits)) return spoiled_value<kType>(bits);
  if constexpr (kType == ElementType::float16) {
    const float sized = __uint_as_float((bits & 0x7FFF) << 13) * 0x1p112f;
    return (bits & 0x8000) != 0 ? -sized : sized;
  } else {
    return __uint_as_float(bits << 16);
  }
}

/// Whether there are any in kBytes. Each warp looks through all of them: it may
/// be the only one here, and then there are none.
template <ElementType kType, uint32_t kBytes>
__device__ __forceinline__ bool finds_spoiled(uint32_t tile) {
  const int lane = thread_anew() % 32;
  uint32_t differ = 0;
#pragma unroll 1
  for (uint32_t i = lane * 16; i < kBytes; i += 32 * 16) {
    const uint4 x = load_piece(tile + i);
    differ |= (x.x ^ cleared<kType>(x.x)) | (x.y ^ cleared<kType>(x.y)) |
              (x.z ^ cleared<kType>(x.z)) | (x.w ^ cleared<kType>(x.w));
  }
  return __any_sync(~0u, differ != 0);
}

/// The same of rows of kDim channels, those of the suspects.
template <ElementType kType, int kDim>
__device__ __forceinline__ bool finds_spoiled(uint32_t tile,
                                              const SuspectQueries& suspects) {
  const int lane = thread_anew() % 32;
  uint32_t differ = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll 1
    for (uint32_t left = suspects.bits[i]; left != 0; left &= left - 1) {
      const int row = 32 * i + __ffs(static_cast<int>(left)) - 1;
#pragma unroll
      for (int word = lane; word < kDim / 2; word += 32) {
        const uint32_t pair = load_word(tile + word_place(row, word));
        differ |= pair ^ cleared<kType>(pair);
      }
    }
  }
  return __any_sync(~0u, differ != 0);
}

/// Adds them to those of a thread's two rows that see them; `first` is the
/// first column.
template <ElementType kType, int kCount, class Record>
__device__ __forceinline__ void add_seen_spoiled(float (&sums)[kCount],
                                                 uint32_t tile,
                                                 const Record& record,
                                                 int first, int row) {
  const int lane = thread_anew() % 32;
#pragma unroll 1
  for (int column = 0; column < 64; ++column) {
    bool seen[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      seen[i] = first + column >= record.begin[row + 8 * i] &&
                first + column < record.end[row + 8 * i];
    }
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      const uint32_t pair =
          load_word(tile + j / 8 * (64 * kRowBytes) +
                    piece_place(column, j % 8) + 4 * (lane & 3));
      if (pair == cleared<kType>(pair)) continue;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const uint32_t bits = pair >> (16 * e) & 0xFFFF;
        if (!is_spoiled<kType>(bits)) continue;
        const float value = spoiled_value<kType>(bits);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (seen[i]) sums[4 * j + 2 * i + e] += value;
        }
      }
    }
  }
}

/// Whether a thread of both warpgroups finds any in its share of a tile of
/// queries and dout, and of their numbers: a query that saw nothing has an
/// infinite lse.
template <class Plan>
__device__ __forceinline__ bool finds_spoiled_queries(uint32_t query,
                                                      uint32_t dout,
                                                      const float* lse,
                                                      const float* delta) {
  const int row = thread_anew() % 64;
  return finds_spoiled<Plan::kType, Plan::kQueryBytes, 256>(query) |
         finds_spoiled<Plan::kType, Plan::kDoutBytes, 256>(dout) |
         (lse[row] != lse[row]) | (0.f * delta[row] != 0.f);
}

/// Sets those of a warp's eight rows to 0, and the numbers of such rows to NaN.
template <ElementType kType, int kDim>
__device__ __forceinline__ void clear_spoiled_rows(uint32_t tile,
                                                   float* number) {
  const int lane = thread_anew() % 32, first = thread_anew() / 32 * 8;
#pragma unroll 1
  for (int row = first; row < first + 8; ++row) {
    bool found = false;
#pragma unroll 1
    for (int word = lane; word < kDim / 2; word += 32) {
      const uint32_t at = tile + word_place(row, word);
      const uint32_t pair = load_word(at), rest = cleared<kType>(pair);
      if (pair == rest) continue;
      store_word(at, rest);
      found = true;
    }
    if (__any_sync(~0u, found) && lane == 0) number[row] = NAN;
  }
}

/// Both warpgroups: clears a tile of queries and dout. A query whose lse is NaN
/// has weights that are, one whose delta is, slopes: so who sees it knows.
template <class Plan>
__device__ __forceinline__ void clear_spoiled_queries(int meeting,
                                                      uint32_t query,
                                                      uint32_t dout, float* lse,
                                                      float* delta) {
  meet(meeting, 256);
  clear_spoiled_rows<Plan::kType, Plan::kHeadDim>(query, lse);
  clear_spoiled_rows<Plan::kType, Plan::kValueDim>(dout, delta);
  fence_for_wgmma();
  meet(meeting, 256);
}

/// Both warpgroups, when all of a warp's products that read the tiles are
/// made, and it has added its sums.
template <ElementType kType, uint32_t kBytes, uint32_t kOtherBytes = 0>
__device__ __forceinline__ void clear_spoiled_together(int meeting,
                                                       uint32_t tile,
                                                       uint32_t other = 0) {
  meet(meeting, 256);
  clear_spoiled<kType, kBytes, 256>(tile);
  if constexpr (kOtherBytes > 0) {
    clear_spoiled<kType, kOtherBytes, 256>(other);
  }
  meet(meeting, 256);
}

/// Whether q or dout of a tile of queries is spoiled, where scores are not
/// finite or there are suspects. All warps say the same: a query leaves its
/// trace in scores of each of them.
template <class Plan>
__device__ __forceinline__ bool finds_spoiled_queries(
    const float (&scores)[32], uint32_t query, uint32_t dout,
    const SuspectQueries& suspects) {
  const bool found =
      finds_spoiled<Plan::kType, Plan::kValueDim>(dout, suspects);
  return (holds_spoiled(scores) &&
          finds_spoiled<Plan::kType, Plan::kQueryBytes>(query)) ||
         found;
}

}  // namespace longspan::hopper
