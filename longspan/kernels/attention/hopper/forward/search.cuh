#pragma once

#include "longspan/kernels/attention/hopper/forward/config.h"
#include "longspan/kernels/attention/hopper/forward/spoiled.cuh"
#include "longspan/kernels/attention/hopper/records.cuh"

namespace longspan::hopper {

/// Two warps: look through the values of tiles that some query does not see
/// whole, each through half of the pieces, while the tile is scored. Whole
/// tiles are only counted.
template <class Plan>
__device__ void search(typename Plan::Small& small, uint32_t base, int warp,
                       int lane) {
  // As many pieces as fit the registers.
  constexpr int kAtOnce = Plan::kProducerRegisters < 32 ? 2 : 4;
  RingPlace<Plan::kRecords> at;
  RingPlace<Plan::kStages> stage;
  for (;;) {
    barrier_wait(shared_address(&small.record_ready[at.slot]), at.round);
    if (small.record[at.slot].tiles < 0) return;
    const WorkColumns columns(small.record[at.slot]);
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&small.record_free[at.slot]));
    at.advance();
    for (int tile = columns.first; tile < columns.last; tile += Plan::kKeys) {
      barrier_wait(shared_address(&small.value_ready[stage.slot]), stage.round);
      const bool found =
          !columns.all_see(tile, Plan::kKeys) &&
          finds_spoiled<Plan::kType, Plan::kValueBytes, 64, kAtOnce>(
              base + Plan::kValue + stage.slot * Plan::kValueBytes);
      const bool any = __any_sync(~0u, found);
      if (lane == 0) {
        small.spoiled[stage.slot][warp] = any;
        barrier_arrive(shared_address(&small.value_searched[stage.slot]));
      }
      stage.advance();
    }
  }
}

}  // namespace longspan::hopper
