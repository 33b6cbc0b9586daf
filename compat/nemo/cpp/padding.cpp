#include "compat/nemo/cpp/padding.h"

#include <ATen/ATen.h>

#include <vector>

#include "longspan/core/detail/check.h"
#include "longspan/ops/checks.h"
#include "longspan/ops/move_tokens.h"

namespace longspan::nemo {

at::Tensor pad_tokens(const at::Tensor& tensor, int64_t axis, int64_t count,
                      const at::Scalar& value) {
  check(axis >= -tensor.dim() && axis < tensor.dim(), "pad_tokens: axis ", axis,
        " of ", describe(tensor));
  if (count <= 0) return tensor;
  if (axis < 0) axis += tensor.dim();
  const int64_t tokens = tensor.size(axis);
  return move_tokens(
      tensor, axis, Moves::of({{0, 0, tokens}}, tokens, tokens + count), value);
}

at::Tensor continue_positions(const at::Tensor& positions, int64_t axis,
                              int64_t count) {
  check(axis >= -positions.dim() && axis < positions.dim(),
        "continue_positions: axis ", axis, " of ", describe(positions));
  if (count <= 0) return positions;
  if (axis < 0) axis += positions.dim();
  const int64_t tokens = positions.size(axis);
  check(tokens > 0, "continue_positions: ", describe(positions),
        " has no last position to continue");
  auto shape =
      std::vector<int64_t>(static_cast<std::size_t>(positions.dim()), 1);
  shape[static_cast<std::size_t>(axis)] = count;
  const at::Tensor steps = at::arange(1, count + 1, positions.options());
  return at::cat(
      {positions, positions.narrow(axis, tokens - 1, 1) + steps.view(shape)},
      axis);
}

}  // namespace longspan::nemo
