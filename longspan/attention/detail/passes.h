#pragma once

#include <ATen/core/Tensor.h>

#include "longspan/comm/group.h"
#include "longspan/ops/attend_tiles.h"
#include "longspan/plan/plan.h"

namespace longspan {

/// This rank's part of attention, walked step by step as the plan says: while a
/// step is computed, the keys of the next one are on their way.
///
/// Inputs are [rows, tokens, heads, channels] of the team's tokens and this
/// member's heads. Memory: the share itself, one block of keys that arrives
/// and one that leaves.
///
/// `running` starts empty and holds the answer at the end.
void run_forward(const Plan& plan, const Group& group,
                 const AttentionInputs& inputs, Accumulator& running);

/// Adds dq of this rank's queries, and dk and dv of its keys. Keys travel as in
/// the forward pass; gradients of other ranks' keys go straight home in the
/// accumulation type and are added there in the order of the steps: the same
/// bits in every run.
void run_backward(const Plan& plan, const Group& group,
                  const AttentionInputs& inputs, const AttentionAnswer& answer,
                  AttentionGradients& gradients);

}  // namespace longspan
