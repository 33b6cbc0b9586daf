#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "longspan/core/check.h"
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
        "index_loss: `target` is ", describe(target), " on ",
        target.device().str(), " but `scores` ", describe(scores), " on ",
        scores.device().str(), "; they are alike");
}

/// Log of the softmax over the slots, 0 where one is empty.
at::Tensor log_shares(const at::Tensor& scores) {
  return at::log_softmax(scores, -1).masked_fill(at::isneginf(scores), 0);
}

at::Tensor loss(const at::Tensor& scores, const at::Tensor& target) {
  check_loss(scores, target);
  const at::Tensor kept = target.masked_fill(at::isneginf(scores), 0);
  return (at::xlogy(kept, kept) - kept * log_shares(scores)).sum(-1);
}

at::Tensor loss_backward(const at::Tensor& dloss, const at::Tensor& scores,
                         const at::Tensor& target) {
  check_loss(scores, target);
  const at::Tensor empty = at::isneginf(scores);
  const at::Tensor kept = target.masked_fill(empty, 0);
  const at::Tensor shares = log_shares(scores).exp();
  return (dloss.unsqueeze(-1) * (shares * kept.sum(-1, true) - kept))
      .masked_fill(empty, 0);
}

at::Tensor loss_meta(const at::Tensor& scores, const at::Tensor& target) {
  check_loss(scores, target);
  return at::empty_symint(
      scores.sym_sizes().slice(0, static_cast<std::size_t>(scores.dim() - 1)),
      scores.options());
}

at::Tensor loss_backward_meta(const at::Tensor& /*dloss*/,
                              const at::Tensor& scores,
                              const at::Tensor& /*target*/) {
  return at::empty_symint(scores.sym_sizes(), scores.options());
}

const auto& loss_op() {
  static const auto op = find_op<decltype(loss)>("longspan::index_loss");
  return op;
}

const auto& loss_backward_op() {
  static const auto op =
      find_op<decltype(loss_backward)>("longspan::index_loss_backward");
  return op;
}

class LossFunction : public torch::autograd::Function<LossFunction> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx,
                            const at::Tensor& scores,
                            const at::Tensor& target) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({scores, target});
    return loss_op().call(scores, target);
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* ctx,
      torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    return {loss_backward_op().call(grads[0], saved[0], saved[1]), {}};
  }
};

at::Tensor loss_autograd(const at::Tensor& scores, const at::Tensor& target) {
  return LossFunction::apply(scores, target);
}

at::Tensor loss_backward_autograd(const at::Tensor& dloss,
                                  const at::Tensor& scores,
                                  const at::Tensor& target) {
  refuse_second_derivative("index_loss", {dloss, scores});
  at::AutoDispatchBelowADInplaceOrView guard;
  return loss_backward_op().call(dloss, scores, target);
}

}  // namespace

at::Tensor index_loss(const at::Tensor& scores, const at::Tensor& target) {
  return loss_op().call(scores, target);
}

TORCH_LIBRARY_FRAGMENT(longspan, m) {
  m.def("index_loss(Tensor scores, Tensor target) -> Tensor",
        {at::Tag::pt2_compliant_tag});
  m.def(
      "index_loss_backward(Tensor dloss, Tensor scores, Tensor target) "
      "-> Tensor",
      {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(longspan, Meta, m) {
  m.impl("index_loss", loss_meta);
  m.impl("index_loss_backward", loss_backward_meta);
}
TORCH_LIBRARY_IMPL(longspan, CPU, m) {
  m.impl("index_loss", loss);
  m.impl("index_loss_backward", loss_backward);
}
TORCH_LIBRARY_IMPL(longspan, CUDA, m) {
  m.impl("index_loss", loss);
  m.impl("index_loss_backward", loss_backward);
}
TORCH_LIBRARY_IMPL(longspan, Autograd, m) {
  m.impl("index_loss", loss_autograd);
  m.impl("index_loss_backward", loss_backward_autograd);
}

}  // namespace longspan
