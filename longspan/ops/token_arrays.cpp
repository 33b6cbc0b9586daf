#include "longspan/ops/token_arrays.h"

#include <ATen/ATen.h>

#include <cstdint>

namespace longspan {

at::Tensor with_contiguous_channels(const at::Tensor& tensor) {
  return tensor.stride(-1) == 1 || tensor.size(-1) <= 1 ? tensor
                                                        : tensor.contiguous();
}

at::Tensor with_aligned_rows(const at::Tensor& tensor) {
  constexpr int64_t kBytes = 16;
  const auto element = static_cast<int64_t>(tensor.element_size());
  if (tensor.size(-1) * element % kBytes != 0) return tensor;  // a copy neither
  bool aligned =
      reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kBytes == 0 &&
      (tensor.size(-1) <= 1 || tensor.stride(-1) == 1);
  for (int64_t i = 0; i + 1 < tensor.dim(); ++i) {
    aligned = aligned && tensor.stride(i) * element % kBytes == 0;
  }
  return aligned ? tensor : tensor.clone(at::MemoryFormat::Contiguous);
}

at::Tensor join_ranges(const at::Tensor& tensor,
                       const std::vector<TokenRange>& ranges) {
  std::vector<at::Tensor> pieces;
  for (TokenRange range : ranges) {
    pieces.push_back(tensor.narrow(0, range.begin, range.size()));
  }
  return pieces.size() == 1 ? pieces[0] : at::cat(pieces);
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
