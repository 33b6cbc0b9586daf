#pragma once

#include "longspan/core/detail/check.h"

namespace longspan {

/// Whose keys rank `rank` holds at step `step` of a ring of `ranks` ranks: its
/// own first, then those of the rank before it, and so on around.
inline int ring_owner(int rank, int step, int ranks) {
  check(ranks >= 1 && rank >= 0 && rank < ranks && step >= 0 && step < ranks,
        "ring_owner: rank ", rank, " at step ", step, " of a ring of ", ranks);
  return rank >= step ? rank - step : rank - step + ranks;
}

/// The step at which `rank` holds the keys of `owner`. The ring is symmetric:
/// ring_owner(rank, ring_step(rank, owner, ranks), ranks) == owner.
inline int ring_step(int rank, int owner, int ranks) {
  return ring_owner(rank, owner, ranks);
}

}  // namespace longspan
