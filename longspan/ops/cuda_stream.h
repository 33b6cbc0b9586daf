#pragma once

#include <ATen/core/Tensor.h>

namespace longspan {

/// The current stream (a cudaStream_t) of the device of a CUDA tensor.
void* current_stream(const at::Tensor& tensor);

}  // namespace longspan
