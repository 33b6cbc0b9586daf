#include "longspan/ops/cuda_stream.h"

#include <c10/cuda/CUDAStream.h>

namespace longspan {

void* current_stream(const at::Tensor& tensor) {
  return c10::cuda::getCurrentCUDAStream(tensor.device().index()).stream();
}

}  // namespace longspan
