#include "longspan/ops/linear_cross_entropy.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <optional>
#include <string>
#include <vector>

#include "longspan/ops/token_losses_by_torch.h"

namespace longspan {
namespace {

struct LossCase {
  int64_t tokens, words;
  CrossEntropyOptions options = {};
  bool with_bias = true;
  at::ScalarType dtype = at::kDouble;
};

std::vector<LossCase> losses_to_try() {
  const CrossEntropyOptions all{.scale = 1.7,
                                .softcap = 2.0,
                                .label_smoothing = 0.2,
                                .z_loss = 0.01,
                                .tile = 3};
  return {{1, 1},
          {7, 40},
          {7, 40, all},
          {20, 1030, {.tile = 6}, false},
          {9, 17, all, true, at::kFloat},
          {0, 5}};
}

struct LossInputsOf {
  at::Tensor hidden, weight, labels;
  std::optional<at::Tensor> bias;

  explicit LossInputsOf(const LossCase& c) {
    at::manual_seed(5);
    const auto leaf = [&](at::IntArrayRef sizes) {
      return at::randn(sizes, at::TensorOptions(c.dtype))
          .set_requires_grad(true);
    };
    hidden = leaf({c.tokens, 6});
    weight = leaf({c.words, 6});
    if (c.with_bias) bias = leaf({c.words});
    labels = at::randint(0, c.words, {c.tokens}, at::kLong);
    if (c.tokens > 2) labels[1] = -100;
  }
};

/// Logits whole, by torch's operations.
LossesOfTile whole(const LossCase& c, const LossInputsOf& in) {
  const at::NoGradGuard guard;
  return token_losses_by_torch(at::mm(in.hidden, in.weight.t()),
                               in.bias.value_or(at::Tensor()), in.labels,
                               at::Tensor(),
                               {.scale = c.options.scale,
                                .softcap = c.options.softcap,
                                .smoothing = c.options.label_smoothing,
                                .z_loss = c.options.z_loss,
                                .ignored = c.options.ignore_index});
}

TEST(LinearCrossEntropy, TorchsOperationsGiveTheKernelsAnswer) {
  for (const LossCase& c : losses_to_try()) {
    const LossInputsOf in(c);
    const double bound = c.dtype == at::kDouble ? 1e-12 : 1e-5;
    const TokenLosses ours = linear_cross_entropy(
        in.hidden, in.weight, in.labels, in.bias, c.options);
    const LossesOfTile plain = whole(c, in);
    EXPECT_TRUE(at::allclose(ours.losses, plain.losses, bound, bound));
    EXPECT_TRUE(at::allclose(ours.lse, plain.lse, bound, bound));
    EXPECT_TRUE(at::allclose(ours.entropy, plain.entropy, bound, bound));
    EXPECT_TRUE(ours.right.equal(plain.right));
    EXPECT_TRUE(at::allclose(ours.loss.detach(), plain.losses.sum(), bound));

    const auto gradients =
        torch::autograd::grad({ours.loss}, {in.hidden, in.weight});
    EXPECT_TRUE(at::allclose(gradients[0], at::mm(plain.dlogits, in.weight),
                             10 * bound, 10 * bound));
    EXPECT_TRUE(at::allclose(gradients[1], at::mm(plain.dlogits.t(), in.hidden),
                             10 * bound, 10 * bound));
  }
}

TEST(LinearCrossEntropy, EveryTokensLossMayHaveItsOwnGradient) {
  for (const LossCase& c : losses_to_try()) {
    const LossInputsOf in(c);
    const double bound = c.dtype == at::kDouble ? 1e-12 : 1e-4;
    const TokenLosses ours = linear_token_losses(in.hidden, in.weight,
                                                 in.labels, in.bias, c.options);
    const at::Tensor weights = at::randn_like(ours.losses.detach());
    const auto gradients =
        torch::autograd::grad({ours.losses}, {in.hidden, in.weight}, {weights});
    const at::Tensor d = whole(c, in).dlogits * weights.unsqueeze(1);
    EXPECT_TRUE(at::allclose(gradients[0], at::mm(d, in.weight), bound, bound));
    EXPECT_TRUE(
        at::allclose(gradients[1], at::mm(d.t(), in.hidden), bound, bound));
  }
}

TEST(LinearCrossEntropy, MakesNoGradientThatNobodyAsksFor) {
  const LossInputsOf in({.tokens = 4, .words = 9});
  const at::NoGradGuard guard;
  EXPECT_FALSE(linear_cross_entropy(in.hidden, in.weight, in.labels)
                   .loss.requires_grad());
}

TEST(LinearCrossEntropy, NamesALabelThatIsNoWord) {
  const LossInputsOf in({.tokens = 4, .words = 9});
  in.labels[2] = 9;
  try {
    linear_cross_entropy(in.hidden, in.weight, in.labels);
    FAIL();
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find("label 9 of token 2"),
              std::string::npos);
  }
}

}  // namespace
}  // namespace longspan
