#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <vector>

namespace longspan {

/// What operators take and return.
using OptionalTensor = std::optional<at::Tensor>;
using Tensors = std::vector<at::Tensor>;
using Tensors2 = std::tuple<at::Tensor, at::Tensor>;
using Tensors3 = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Tensors4 = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

inline OptionalTensor optional(const at::Tensor& t) {
  return t.defined() ? std::optional(t) : std::nullopt;
}

}  // namespace longspan
