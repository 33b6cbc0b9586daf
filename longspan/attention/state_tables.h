#pragma once

#include "longspan/comm/carry_states.h"
#include "longspan/plan/state_plan.h"

namespace longspan {

/// A plan's lists as the tensors that carry_states takes.
StateTables state_tables(const StatePlan& plan);

}  // namespace longspan
