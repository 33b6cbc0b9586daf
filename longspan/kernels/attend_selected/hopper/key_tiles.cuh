#pragma once

#include <cstdint>

#include "longspan/kernels/common/hopper/ptx.cuh"

namespace longspan::hopper {

/// 64 slots of a list, seen by a warp: lane l holds slots l and l + 32.
struct KeyTile {
  int32_t keys = 0;            // that exist
  int32_t slot[2] = {-1, -1};  // as listed
  uint64_t there = 0;          // bit j: slot j holds a key

  /// Waits for the list, and turns slots that hold no key into -1.
  __device__ void look() {
    const bool low = static_cast<uint32_t>(slot[0]) < keys;
    const bool high = static_cast<uint32_t>(slot[1]) < keys;
    if (!low) slot[0] = -1;
    if (!high) slot[1] = -1;
    there = __ballot_sync(~0u, low) |
            static_cast<uint64_t>(__ballot_sync(~0u, high)) << 32;
  }
  /// The key in a slot, -1: none. For all lanes of a warp together; slots of a
  /// call lie in one half of the tile.
  __device__ int32_t key_of(int j) const {
    return __shfl_sync(~0u, j < 32 ? slot[0] : slot[1], j & 31);
  }
};

/// The tiles of a list that hold any key, in order, seen by 128 threads.
struct TileList {
  const int32_t* list;
  int slots, keys;
  const uint8_t* live;
  int marked, lane;
  int count = 0;  // of them
  int first = 0;  // of 32 tiles that are looked at
  uint32_t waiting = 0;

  /// `live` is shared memory for `marked` tiles, a multiple of 32; those past
  /// it count as live. The threads meet at `meeting`.
  __device__ TileList(const int32_t* list, int slots, int keys, uint8_t* live,
                      int marked, int thread, int meeting)
      : list(list),
        slots(slots),
        keys(keys),
        live(live),
        marked(marked),
        lane(thread % 32) {
    const int tiles = (slots + 63) / 64;
    meet(meeting, 128);  // nobody looks at the former list any more
    for (int first = thread / 32; first < min(tiles, marked); first += 16) {
      KeyTile some[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) some[i] = at(first + 4 * i);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        some[i].look();
        if (lane == 0 && first + 4 * i < marked) {
          live[first + 4 * i] = some[i].there != 0;
        }
      }
    }
    meet(meeting, 128);
    for (int i = 0; i < tiles; i += 32) count += __popc(those_of(i));
    waiting = those_of(0);
  }

  __device__ uint32_t those_of(int first) const {
    const int tile = first + lane;
    return __ballot_sync(
        ~0u, tile * 64ll < slots && (tile >= marked || live[tile] != 0));
  }

  __device__ KeyTile at(int tile) const {
    KeyTile result;
    result.keys = keys;
    const int64_t slot = tile * 64ll + lane;
    if (slot < slots) result.slot[0] = __ldg(list + slot);
    if (slot + 32 < slots) result.slot[1] = __ldg(list + slot + 32);
    return result;
  }

  /// An empty one when there is none left.
  __device__ KeyTile next() {
    while (waiting == 0 && first * 64ll < slots) {
      first += 32;
      waiting = those_of(first);
    }
    if (waiting == 0) return at(0x2000000);
    const int tile = first + __ffs(waiting) - 1;
    waiting &= waiting - 1;
    return at(tile);
  }
};

}  // namespace longspan::hopper
