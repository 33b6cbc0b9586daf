#include "longspan/comm/reduce_loss.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include "longspan/comm/collectives.h"
#include "longspan/core/detail/check.h"
#include "longspan/ops/checks.h"

namespace longspan {

at::Tensor reduce_loss(const at::Tensor& sum, const at::Tensor& count,
                       const Group& group) {
  check(sum.is_floating_point() && sum.sym_numel() == 1,
        "reduce_loss: `sum` is ", describe(sum),
        "; expected one floating number");
  check(count.sym_numel() == 1, "reduce_loss: `count` is ", describe(count),
        "; expected one number");
  const auto total = [&](const at::Tensor& mine) {
    const std::vector<int64_t> sizes(static_cast<std::size_t>(group.size()), 1);
    return all_gather_tokens(mine.detach().reshape({1}), 0, sizes, group).sum();
  };
  // Counts above 2^24 are no floats: add them up as doubles.
  const at::Tensor counted = total(count.to(sum.device(), at::kDouble));
  // No tokens anywhere is no mean of 0 / 0; weighted ones may be less than one.
  const at::Tensor share = at::where(counted.gt(0), counted, 1.0);
  const at::Tensor mean =
      (total(sum.to(at::kDouble)) / share).to(sum.scalar_type());
  // Adds nothing to the value (not even where it is infinite), and all there is
  // to the derivative.
  const at::Tensor nothing = (sum - sum.detach()).nan_to_num(0.0, 0.0, 0.0);
  return mean.reshape_as(sum) + nothing / share.to(sum.scalar_type());
}

TORCH_LIBRARY_FRAGMENT(longspan, m) {
  m.def("reduce_loss(Tensor sum, Tensor count, str group) -> Tensor",
        {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(longspan, CompositeImplicitAutograd, m) {
  m.impl("reduce_loss", [](const at::Tensor& sum, const at::Tensor& count,
                           const std::string& group) {
    return reduce_loss(sum, count, Group::named(group));
  });
}

}  // namespace longspan
