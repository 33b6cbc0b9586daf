#pragma once

#include <ATen/core/Tensor.h>

#include "longspan/comm/group.h"

namespace longspan {

/// The tables of a StatePlan, as carry_states takes them: int64 on the CPU.
struct StateTables {
  at::Tensor sends;       ///< [n, 5] = (round, from, to, place, transition)
  at::Tensor steps;       ///< [m, 5] = (round, gives, keeps, place, transition)
  at::Tensor back_sends;  ///< the same, for the backward pass
  at::Tensor back_steps;
};

/// The state that comes into each run of this rank, where a run makes
/// `transition * incoming + state` of it and the next run of the document gets
/// that. A document's first run gets zeros.
///
/// state [runs, .., K, V] of this rank's chained runs (see StatePlan);
/// transition is one number for each of its matrices, [runs, ..], a number for
/// each of their rows, [runs, .., K], or a matrix, [runs, .., K, K]. The
/// result is like state, in float32, or float64 where either is float64; so is
/// what travels, and what is added up.
///
/// With runs 0, 1 and 2 of a document on three ranks, where run i has (M_i,
/// S_i):
///
///   rank 0 gets 0
///   rank 1 gets S_0
///   rank 2 gets M_1 S_0 + S_1
///
/// Rank 0 sends S_0 to both, rank 1 sends M_1 and S_1 to rank 2: one exchange,
/// and every rank folds by itself, in the order of the document. In a plan of
/// rounds pairs are combined on their way, which multiplies transitions with
/// each other; there is one exchange a round. The tables fix the order either
/// way, so results repeat bit for bit.
///
/// Derivative: with the gradients G_i of what came in, the state that run i
/// added is worth G_{i+1} + M_{i+1}' G_{i+2} + .. (' transposes). That is this
/// operator again, over documents read from their ends, with transposed
/// transitions: as many exchanges. The transition of run i is worth that times
/// what came in, transposed.
///
/// torch.ops.longspan.carry_states(transition, state, sends, steps, back_sends,
/// back_steps, group)
at::Tensor carry_states(const at::Tensor& transition, const at::Tensor& state,
                        const StateTables& tables, const Group& group);

}  // namespace longspan
