#pragma once

#include <cstdint>

namespace longspan::ampere {

constexpr int kMarkedTiles = 512;

/// A list in tiles of kKeys slots, of which those without any key are left out.
template <int kThreads, int kKeys>
struct ListedTiles {
  const int32_t* list;
  int slots, keys;
  const uint8_t* live;  // of the first kMarkedTiles; others count as live
  int tiles;

  /// `marks` is shared memory, ready after a barrier. empty(tile) is called by
  /// the warp that finds a tile without keys.
  template <class Empty>
  __device__ ListedTiles(const int32_t* list, int slots, int keys,
                         uint8_t* marks, const Empty& empty)
      : list(list),
        slots(slots),
        keys(keys),
        live(marks),
        tiles((slots + kKeys - 1) / kKeys) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 4
    for (int tile = warp; tile < min(tiles, kMarkedTiles);
         tile += kThreads / 32) {
      bool any = false;
#pragma unroll
      for (int i = 0; i < kKeys; i += 32) {
        any |= key_at(tile * kKeys + i + lane) >= 0;
      }
      any = __any_sync(~0u, any);
      if (lane == 0) marks[tile] = any;
      if (!any) empty(tile);
    }
  }

  /// The key in a slot, -1: none.
  __device__ int32_t key_at(int slot) const {
    if (slot >= slots) return -1;
    const int32_t key = __ldg(list + slot);
    return static_cast<uint32_t>(key) < static_cast<uint32_t>(keys) ? key : -1;
  }

  __device__ int after(int tile) const {
    ++tile;
    while (tile < min(tiles, kMarkedTiles) && live[tile] == 0) ++tile;
    return tile;
  }
};

}  // namespace longspan::ampere
