#include "longspan/ops/token_arrays.h"

namespace longspan {

at::Tensor with_contiguous_channels(const at::Tensor& tensor) {
  return tensor.stride(-1) == 1 || tensor.size(-1) <= 1 ? tensor
                                                        : tensor.contiguous();
}

at::Tensor with_aligned_rows(const at::Tensor& tensor) {
  constexpr int64_t kBytes = 16;
  const auto element = static_cast<int64_t>(tensor.element_size());
  bool aligned =
      reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kBytes == 0 &&
      (tensor.size(-1) <= 1 || tensor.stride(-1) == 1);
  for (int64_t i = 0; i + 1 < tensor.dim(); ++i) {
    aligned = aligned && tensor.stride(i) * element % kBytes == 0;
  }
  return aligned ? tensor : tensor.clone(at::MemoryFormat::Contiguous);
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
