#include "longspan/ops/pool_listed.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace longspan {
namespace {

struct PoolingCase {
  int64_t pools, slots, rows, channels;
  bool with_bias = true;
  at::ScalarType dtype = at::kDouble;
};

struct PoolingInputs {
  at::Tensor values, gates;
  OptionalTensor bias;
  at::Tensor lists, dout, dlse;

  /// Some slots are empty or wild, some rows in several pools.
  explicit PoolingInputs(const PoolingCase& c) {
    at::manual_seed(3);
    const at::TensorOptions options(c.dtype);
    const auto sums =
        options.dtype(c.dtype == at::kDouble ? at::kDouble : at::kFloat);
    values = at::randn({c.rows, c.channels}, options);
    gates = at::randn({c.rows, c.channels}, options);
    if (c.with_bias) bias = at::randn({c.slots, c.channels}, sums);
    lists = at::randint(-2, c.rows + 2, {c.pools, c.slots}, at::kInt);
    if (c.pools > 2) lists.select(0, 1).fill_(-1);
    dout = at::randn({c.pools, c.channels}, sums);
    dlse = at::randn({c.pools, c.channels}, sums);
  }
};

std::vector<PoolingCase> poolings() {
  return {{1, 1, 1, 1}, {5, 4, 9, 70}, {3, 8, 40, 3, false},
          {4, 3, 0, 2}, {0, 3, 5, 2},  {6, 4, 12, 8, true, at::kBFloat16}};
}

TEST(PoolListed, TorchsOperationsGiveTheKernelsAnswer) {
  for (const PoolingCase& c : poolings()) {
    const PoolingInputs in(c);
    const Pooled kernel = pool_listed(in.values, in.gates, in.bias, in.lists);
    const Pooled plain =
        pool_listed_by_torch(in.values, in.gates, in.bias, in.lists);
    const double bound = c.dtype == at::kDouble ? 1e-13 : 1e-5;
    EXPECT_TRUE(at::allclose(kernel.out, plain.out, bound, bound));
    EXPECT_TRUE(at::allclose(kernel.lse, plain.lse, bound, bound));
  }
}

TEST(PoolListed, TorchsOperationsGiveTheKernelsGradients) {
  for (const PoolingCase& c : poolings()) {
    const PoolingInputs in(c);
    const auto leaf = [](const at::Tensor& t) {
      return t.detach().clone().set_requires_grad(true);
    };
    const at::Tensor values = leaf(in.values), gates = leaf(in.gates);
    const OptionalTensor bias =
        in.bias ? OptionalTensor(leaf(*in.bias)) : std::nullopt;
    const Pooled kernel = pool_listed(values, gates, bias, in.lists);
    const at::Tensor seen = kernel.lse.isneginf().logical_not();
    ((kernel.out * in.dout).sum() +
     at::where(seen, kernel.lse * in.dlse, 0).sum())
        .backward();
    const auto [dvalues, dgates, dbias] = pool_listed_backward_by_torch(
        in.dout, at::where(seen, in.dlse, 0), in.values, in.gates, in.bias,
        in.lists, {kernel.out.detach(), kernel.lse.detach()});
    const double bound = c.dtype == at::kDouble ? 1e-12 : 2e-2;
    EXPECT_TRUE(at::allclose(values.grad(), dvalues, bound, bound));
    EXPECT_TRUE(at::allclose(gates.grad(), dgates, bound, bound));
    if (bias) {
      EXPECT_TRUE(at::allclose(bias->grad(), dbias, bound, bound));
    }
  }
}

}  // namespace
}  // namespace longspan
