#pragma once

#include <cstdint>
#include <vector>

#include "longspan/core/ownership.h"
#include "longspan/core/packing.h"
#include "longspan/draw/picture.h"
#include "longspan/plan/plan.h"
#include "longspan/plan/state_plan.h"

namespace longspan {

class Mask;

/// How much a picture shows before it is reduced.
///
/// A stream of more tokens than cells is drawn in cells of several tokens, cut
/// at the borders of owners and documents while those fit. Of more ranks than
/// rows, evenly spaced ones are shown. Captions say so. What is shown is exact,
/// and size and time of a picture do not grow with tokens or ranks.
struct DrawOptions {
  int strip_cells = 64;
  int grid_cells = 64;
  int rows = 16;
};

/// The largest inputs that are drawn: pairs are counted in 64 bits.
inline constexpr int64_t kMostDrawnTokens = int64_t{1} << 31;
inline constexpr int kMostDrawnRanks = 1 << 20;

/// Throws unless the stream and the ranks are small enough to draw. The
/// functions below call it. Where the input is not yours, call it first: in a
/// larger stream, counting the pairs of a Mask already overflows.
void check_drawable(const Packing& packing, int ranks);

/// Strips: who owns which token, where documents and pads are.
Picture draw_ownership(const Ownership& ownership, const Packing& packing,
                       const DrawOptions& options = {});

/// The stream alone: where documents and their pads lie.
Picture draw_packing(const Packing& packing, const DrawOptions& options = {});

/// Query x key: who computes what at which ring step. A compressed mask has no
/// ring steps, since its keys are not tokens.
Picture draw_mask(const Mask& mask, const Ownership& ownership,
                  const DrawOptions& options = {});

/// Rank x ring step: how many pairs. Not for compressed masks.
Picture draw_steps(const Mask& mask, const Ownership& ownership,
                   const DrawOptions& options = {});

/// Bars: visible pairs of each rank.
Picture draw_work(const Mask& mask, const Ownership& ownership,
                  const DrawOptions& options = {});

/// All these panels, stacked.
Picture draw(const Mask& mask, const Ownership& ownership,
             const DrawOptions& options = {});

/// Two ways to own one stream side by side: stream, mask and work of each.
Picture draw_comparison(const Mask& mask, const Ownership& left,
                        const Ownership& right,
                        const DrawOptions& options = {});

/// What every rank computes, sends and receives at each step of a strategy,
/// and bars: pairs, and bytes sent forward and backward. The strategy need not
/// be over() the group yet; it keeps the name it was asked for. Plans of very
/// many ranks or ranges are left out, and the caption says so.
Picture draw_plan(const AttentionLayout& layout, const Strategy& strategy,
                  const AttentionShape& shape, const DrawOptions& options = {});

/// The plan of one rank, drawn as draw_plan draws all.
Picture draw_plan_of(const AttentionLayout& layout, const Strategy& strategy,
                     int rank, const AttentionShape& shape,
                     const DrawOptions& options = {});

/// The same of a plan by itself, which knows tokens but no bytes.
Picture draw_plan_of(const Plan& plan, const DrawOptions& options = {});

/// What a recurrent layer hands over the borders of runs, in bytes. Without
/// bytes of a state it is a convolution alone.
struct StateShape {
  int64_t rows = 0;  ///< tokens that its convolution looks back at
  int64_t row_bytes = 0;
  int64_t transition_bytes = 4;
  int64_t state_bytes = 4;
  StateWay way = StateWay::direct;
};

/// Runs and states: which run of a document is whose, where documents begin
/// anew, and which rank sends what to which for the borders between them,
/// forward and backward (StatePlan, HaloPlan). Bytes are those of all rows of
/// the batch, and of all rounds of a scan, which the caption counts; the runs
/// drawn are those of the first. Streams of very many ranks or runs are left
/// out, and the caption says so.
Picture draw_states(const AttentionLayout& layout, const StateShape& shape = {},
                    const DrawOptions& options = {});

/// One line a strategy: steps, hops, pairs, balance and bytes.
Picture draw_strategies(const AttentionLayout& layout,
                        const std::vector<Strategy>& strategies,
                        const AttentionShape& shape,
                        const DrawOptions& options = {});

}  // namespace longspan
