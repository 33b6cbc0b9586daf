#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "longspan/comm/carry_states.h"
#include "longspan/models/layer_share.h"
#include "longspan/plan/state_plan.h"

namespace longspan {

/// The runs of a rank cut into chunks of `length` tokens, the last of each run
/// filled with nothing: what is done inside of chunks is done for all of them
/// at once, and states go from chunk to chunk of all runs side by side.
///
/// Runs are ordered by their number of chunks, the longest first, and chunks by
/// their place in their run: chunk number k of all runs that have one lie next
/// to each other. Chained runs (see StatePlan) come before all others.
///
/// Always true: a run lies in whole chunks, and every real token in one chunk.
struct RunChunks {
  /// Runs that are read together: their first chunk is `first`, and counts[k]
  /// of them have a chunk number k.
  struct Side {
    int64_t first = 0;
    int64_t runs = 0;
    std::vector<int64_t> counts;
  };

  int64_t length = 1;
  int64_t chunks = 0;
  Side chained, others;
  at::Tensor tokens;    ///< int64 [chunks * length]: local token, or `blank`
  at::Tensor places;    ///< int64 [tokens]: the inverse; pads: behind the last
  bool filled = false;  ///< whether some place has no token
  bool pads = false;    ///< whether some token has no place
  at::Tensor to_plan, from_plan;  ///< int64 [chained runs]: orders of runs
  StateTables tables;
  bool carries = false;  ///< whether any rank carries anything

  static RunChunks of(const StatePlan& plan, int64_t most, int64_t tokens,
                      at::Device device);

  /// [tokens, ..] -> [chunks, length, ..], zeros where there is no token.
  at::Tensor take(const at::Tensor& x) const;

  /// [chunks, length, ..] -> [tokens, ..], zeros for pads.
  at::Tensor give(const at::Tensor& y) const;
};

/// A recurrence over chunks: chunk c makes transition_c * state + addition_c
/// of a state [.., K, V]. Everything here has an axis of runs in front.
struct ChunkRecurrence {
  /// What the chunks [first, first + states.size(0)) make of the states before
  /// them; without their additions where `adds` is false, and of transitions
  /// in the same way.
  std::function<at::Tensor(const at::Tensor& states, int64_t first, bool adds)>
      step;
  at::Tensor state;       ///< nothing: zeros [.., K, V], in the type of sums
  at::Tensor transition;  ///< of no tokens: ones [..], or [.., K, K]
};

/// The state before each chunk, [chunks, .., K, V]: carried from chunk to chunk
/// of a run, over the borders of runs and ranks, and begun with nothing by
/// every document. Exchanges where some document lies in several runs.
///
/// `tie` is 0 and depends on all inputs of the layer, so that ranks that have
/// nothing to carry take part in the way back of what travels.
at::Tensor states_before(const RunChunks& chunks,
                         const ChunkRecurrence& recurrence,
                         const at::Tensor& tie, const Group& group);

/// What is left at token i of what token j of its chunk left behind: from the
/// logs of decays up to each token, [.., length] -> [.., length, length] of
/// exp(left_i - left_j), and 0 where j comes later.
at::Tensor left_between(const at::Tensor& left);

/// 0, depending on all of them; undefined ones are left out.
at::Tensor tie_of(const std::vector<at::Tensor>& inputs, at::ScalarType type);

/// What sums are taken in: float32, or float64 for float64.
at::ScalarType sum_type(const at::Tensor& x);

/// What a pair of so many numbers of a type weighs.
StatePair pair_of(at::ScalarType type, int64_t transition, int64_t state,
                  int64_t matrix_rows = 1);

}  // namespace longspan
