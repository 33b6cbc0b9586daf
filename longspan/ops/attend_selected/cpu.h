#pragma once

#include "longspan/ops/attend_selected/composite.h"

namespace longspan {

/// Selected attention by the kernels of this CPU; the same answers as the
/// composites, `out` and `dq` already in the type of q.
PartialAttention attend_selected_cpu(const SelectedInputs& in);
SelectedSums attend_selected_backward_cpu(const SelectedInputs& in,
                                          const SelectedResult& result);
at::Tensor selected_weights_cpu(const SelectedInputs& in,
                                const at::Tensor& lse);

}  // namespace longspan
