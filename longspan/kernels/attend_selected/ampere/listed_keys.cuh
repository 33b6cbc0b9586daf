#pragma once

#include <cstdint>

#include "longspan/kernels/attend_selected/attend_selected.h"
#include "longspan/kernels/common/ampere/tiles.cuh"

namespace longspan::ampere {

/// How rows of channels stand in shared memory: as many as a multiple of 32,
/// zeros past the last, and 16 bytes more, so that eight rows touch all banks.
__host__ __device__ constexpr int row_depth(int channels) {
  return (channels + 31) / 32 * 32;
}
__host__ __device__ constexpr int row_pitch(int channels) {
  return row_depth(channels) + 8;
}

/// Which query and heads a block takes. Later queries have longer lists and go
/// first.
struct BlockItem {
  int64_t row, query, key_head;
  int64_t head;  // the first
  int heads;     // of the block

  __device__ BlockItem(const SelectedAttentionArgs& args, int most_heads) {
    const int group = static_cast<int>(args.heads / args.key_heads);
    const int blocks = (group + most_heads - 1) / most_heads;
    int64_t item = blockIdx.x;
    const int first = static_cast<int>(item % blocks) * most_heads;
    item /= blocks;
    key_head = item % args.key_heads;
    item /= args.key_heads;
    row = item % args.rows;
    query = args.queries - 1 - item / args.rows;
    head = key_head * group + first;
    heads = min(most_heads, group - first);
  }

  template <class T, class Pointer>
  __device__ T* of_query(const TokenArray<Pointer>& array) const {
    return static_cast<T*>(array.data) + row * array.row_stride +
           query * array.token_stride + head * array.head_stride;
  }
  template <class T, class Pointer>
  __device__ T* of_keys(const TokenArray<Pointer>& array) const {
    return static_cast<T*>(array.data) + row * array.row_stride +
           key_head * array.head_stride;
  }
  __device__ const int32_t* list(const SelectedAttentionArgs& args) const {
    return args.indices.data + row * args.indices.row_stride +
           query * args.indices.token_stride +
           key_head * args.indices.head_stride;
  }
};

/// Goes through the tiles of kKeys slots of a list that hold any key. All
/// threads of a block go together; the first kKeys of them look, one tile
/// ahead.
template <int kKeys>
struct TileWalk {
  /// Shared memory for three tiles: while the next is looked for, some threads
  /// may still be at the one before this.
  static constexpr int kRing = 3 * kKeys;

  const int32_t* list;
  int64_t slots, keys;
  int32_t* ring;
  int place = 0;     // in the ring, of the tile found next
  int64_t from = 0;  // of the tile that is looked at next
  int32_t ahead;     // its slot of this thread

  __device__ TileWalk(const int32_t* list, const SelectedAttentionArgs& args,
                      int32_t* ring)
      : list(list),
        slots(args.slots),
        keys(args.keys),
        ring(ring),
        ahead(slot(0)) {}

  __device__ int32_t slot(int64_t first) const {
    const int64_t at = first + threadIdx.x;
    return threadIdx.x < kKeys && at < slots ? __ldg(list + at) : -1;
  }

  /// The keys of the next such tile, -1 for an empty slot; null when there is
  /// none left. All threads have met then, unless it is null.
  __device__ const int32_t* next() {
    int32_t* const to = ring + place;
    while (from < slots) {
      const int32_t key = ahead >= 0 && ahead < keys ? ahead : -1;
      from += kKeys;
      ahead = slot(from);
      if (threadIdx.x < kKeys) to[threadIdx.x] = key;
      if (__syncthreads_or(key >= 0)) {
        place = place == 2 * kKeys ? 0 : place + kKeys;
        return to;
      }
    }
    return nullptr;
  }
};

/// Starts to copy rows to shared memory, 128 bytes of a row by eight lanes.
/// `row_at(row)` is where a row starts, null for zeros; `any` may be read.
template <int kThreads, int kRows, class Element, class RowAt>
__device__ __forceinline__ void fetch_rows(Element* to, int channels,
                                           const Element* any,
                                           const RowAt& row_at) {
  const int depth = row_depth(channels), pitch = row_pitch(channels);
  const int first = threadIdx.x % 8 * 8;
#pragma unroll
  for (int i = 0; i < (kRows + kThreads / 8 - 1) / (kThreads / 8); ++i) {
    const int row = i * (kThreads / 8) + static_cast<int>(threadIdx.x) / 8;
    if (row >= kRows) break;
    const Element* from = row_at(row);
    for (int c = first; c < depth; c += 64) {
      const bool there = from != nullptr && c < channels;
      copy_16(to + row * pitch + c, there ? from + c : any, there);
    }
  }
}

/// The heads of a block, zeros past the last.
template <int kThreads, int kHeads, class Element, class Pointer>
__device__ __forceinline__ void fetch_heads(Element* to, int channels,
                                            const TokenArray<Pointer>& array,
                                            const BlockItem& item, int heads) {
  const auto* from = item.of_query<const Element>(array);
  fetch_rows<kThreads, kHeads>(to, channels, from, [&](int head) {
    return head < heads ? from + head * array.head_stride : nullptr;
  });
}

/// The keys of a tile, zeros in empty slots.
template <int kThreads, int kKeys, class Element>
__device__ __forceinline__ void fetch_keys(Element* to,
                                           const SelectedAttentionArgs& args,
                                           const Element* kv,
                                           const int32_t* slots) {
  fetch_rows<kThreads, kKeys>(to, args.head_dim, kv, [&](int j) {
    const int32_t key = slots[j];
    return key >= 0 ? kv + key * args.kv.token_stride : nullptr;
  });
}

/// 32 channels of 8 * kTiles keys, from rows of shared memory: operand [i][n]
/// is channels from 16 i on of keys from 8 n on.
template <int kTiles>
struct KeyOperand {
  uint32_t b[2][kTiles][2];

  /// Where a lane reads in a tile whose first key is `keys`.
  template <class Element>
  __device__ static const Element* place(const Element* keys, int pitch,
                                         int lane) {
    return kTiles == 1
               ? keys + lane % 8 * pitch + lane / 8 * 8
               : keys + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 8;
  }
  template <class Element>
  __device__ explicit KeyOperand(const Element* from) {
    static_assert(kTiles == 1 || kTiles == 2);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      uint32_t x[4];
      load_tiles(x, from + 16 * i);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if constexpr (kTiles == 1) {
          b[k / 2][0][k % 2] = x[k];
        } else {
          b[i][k / 2][k % 2] = x[k];
        }
      }
    }
  }
};

}  // namespace longspan::ampere
