#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace longspan::nemo {

/// Right padding along one axis; the argument itself when count <= 0.
at::Tensor pad_tokens(const at::Tensor& tensor, int64_t axis, int64_t count,
                      const at::Scalar& value);

/// Right padding of positions with last + 1, last + 2, ... as values.
at::Tensor continue_positions(const at::Tensor& positions, int64_t axis,
                              int64_t count);

}  // namespace longspan::nemo
