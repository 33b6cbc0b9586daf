#pragma once

#include <string>

#include "longspan/ops/attend_selected/composite.h"

namespace longspan {

/// Selected attention on CUDA: by kernels where they take it, else by the
/// composites.
PartialAttention attend_selected_cuda(const SelectedInputs& in);
SelectedSums attend_selected_backward_cuda(const SelectedInputs& in,
                                           const SelectedResult& result);

at::Tensor selected_weights_cuda(const SelectedInputs& in,
                                 const at::Tensor& lse);

/// What which_selected_kernel says of tensors on CUDA.
std::string which_selected_kernel_cuda(const SelectedInputs& in,
                                       SelectedWork work);

}  // namespace longspan
