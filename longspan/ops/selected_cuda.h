#pragma once

#include <string>

#include "longspan/ops/selected_composite.h"

namespace longspan {

/// Selected attention on CUDA: by kernels where they take it, else by the
/// composites.
PartialAttention attend_selected_cuda(const SelectedInputs& in);
SelectedSums attend_selected_backward_cuda(const SelectedInputs& in,
                                           const SelectedResult& result);

/// The sum over channels of out * dout, [B, Tq, H] in the accumulation type.
at::Tensor output_delta_cuda(const at::Tensor& out, const at::Tensor& dout);

/// Which of them takes it, and why a faster one does not: "hopper", "ampere,
/// not hopper: elements are not bfloat16", "composite, not ampere: ...".
std::string which_selected_kernel(const SelectedInputs& in);

}  // namespace longspan
