#include <ATen/ATen.h>

#include "longspan/core/detail/check.h"
#include "longspan/ops/checks.h"
#include "longspan/ops/registering.h"
#include "longspan/ops/select_keys.h"

namespace longspan {

namespace {

void check_loss(const at::Tensor& scores, const at::Tensor& target) {
  const auto type = scores.scalar_type();
  check(scores.dim() >= 1 && (type == at::kFloat || type == at::kDouble),
        "index_loss: `scores` is ", describe(scores),
        "; expected float32 or float64 [.., slots]");
  check(target.scalar_type() == type &&
            target.sym_sizes() == scores.sym_sizes() &&
            target.device() == scores.device(),
        "index_loss: `target` is ", describe(target), " on ", target.device(),
        " but `scores` ", describe(scores), " on ", scores.device(),
        "; they are alike");
}

/// Log of the softmax over the slots, 0 where one is empty.
at::Tensor log_shares(const at::Tensor& scores) {
  return at::log_softmax(scores, -1).masked_fill(at::isneginf(scores), 0);
}

struct IndexLossBackward {
  at::Tensor dloss, scores, target;

  using Result = at::Tensor;
  static constexpr auto kDerivativeOf = "index_loss";
  static constexpr auto kSchema =
      "index_loss_backward(Tensor dloss, Tensor scores, Tensor target) "
      "-> Tensor";
  template <class Self>
  static auto fields(Self& self) {
    return std::tie(self.dloss, self.scores, self.target);
  }

  Result run() const {
    check_loss(scores, target);
    const at::Tensor empty = at::isneginf(scores);
    const at::Tensor kept = target.masked_fill(empty, 0);
    const at::Tensor shares = log_shares(scores).exp();
    return (dloss.unsqueeze(-1) * (shares * kept.sum(-1, true) - kept))
        .masked_fill(empty, 0);
  }
  Result meta() const { return empty_as(scores); }
};

struct IndexLoss {
  at::Tensor scores, target;

  using Result = at::Tensor;
  static constexpr auto kSchema =
      "index_loss(Tensor scores, Tensor target) -> Tensor";
  template <class Self>
  static auto fields(Self& self) {
    return std::tie(self.scores, self.target);
  }

  Result run() const {
    check_loss(scores, target);
    const at::Tensor kept = target.masked_fill(at::isneginf(scores), 0);
    return (at::xlogy(kept, kept) - kept * log_shares(scores)).sum(-1);
  }
  Result meta() const {
    check_loss(scores, target);
    return at::empty_symint(
        scores.sym_sizes().slice(0, static_cast<std::size_t>(scores.dim() - 1)),
        scores.options());
  }

  Tensors keep(const Tensors& /*outputs*/) const { return {}; }
  Tensors gradients(const Tensors& /*kept*/, const Tensors& grads) const {
    return {Operator<IndexLossBackward>::call({grads[0], scores, target})};
  }
};

TORCH_LIBRARY_FRAGMENT(longspan, m) {
  Operator<IndexLoss>::add_to(m);
  Operator<IndexLossBackward>::add_to(m);
}

}  // namespace

at::Tensor index_loss(const at::Tensor& scores, const at::Tensor& target) {
  return Operator<IndexLoss>::call({scores, target});
}

}  // namespace longspan
