#include "longspan/ops/token_arrays.h"

namespace longspan {

at::Tensor with_contiguous_channels(const at::Tensor& tensor) {
  return tensor.stride(-1) == 1 || tensor.size(-1) <= 1 ? tensor
                                                        : tensor.contiguous();
}

std::optional<ElementType> element_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return ElementType::float32;
    case at::kBFloat16:
      return ElementType::bfloat16;
    case at::kHalf:
      return ElementType::float16;
    case at::kDouble:
      return ElementType::float64;
    default:
      return std::nullopt;
  }
}

}  // namespace longspan
