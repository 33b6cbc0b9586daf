#include "longspan/ops/attend_selected.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "longspan/core/check.h"
#include "longspan/ops/attend_selected/composite.h"
#include "longspan/ops/attend_selected/cpu.h"
#include "longspan/ops/attend_selected/cuda.h"
#include "longspan/ops/attend_selected/inputs.h"
#include "longspan/ops/checks.h"
#include "longspan/ops/output_delta.h"
#include "longspan/ops/registering.h"
#include "longspan/ops/token_arrays.h"

namespace longspan {

namespace {

using OptionalTensor = std::optional<at::Tensor>;
using Tensors2 = std::tuple<at::Tensor, at::Tensor>;
using Tensors3 = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

/// The natural log of everything that a head gives weight to.
at::Tensor with_sink(const at::Tensor& lse, const at::Tensor& sink) {
  return sink.defined() ? at::logaddexp(lse, sink) : lse;
}

Tensors2 forward(const at::Tensor& q, const at::Tensor& kv,
                 const at::Tensor& indices, const OptionalTensor& sink,
                 double scale, int64_t value_dim) {
  check_selected("attend_selected", q, kv, indices, sink, scale, value_dim);
  const auto in = SelectedInputs::of(q, kv, indices, sink, scale, value_dim);
  const PartialAttention answer =
      q.is_cpu() ? attend_selected_cpu(in) : attend_selected_cuda(in);
  const auto like_q = [&](const at::Tensor& t) {
    return q.dim() == 4 ? t : t.squeeze(0);
  };
  return {like_q(answer.out.to(q.scalar_type())), like_q(answer.lse)};
}

void check_backward(const at::Tensor& dout, const at::Tensor& q,
                    const at::Tensor& out, const at::Tensor& lse,
                    int64_t value_dim) {
  constexpr auto kWho = "attend_selected_backward";
  auto sizes =
      q.sym_sizes().slice(0, static_cast<std::size_t>(q.dim() - 1)).vec();
  check_like(kWho, "lse", lse, sizes, accumulation_type(q.scalar_type()), q);
  sizes.push_back(value_dim == 0 ? q.sym_size(-1) : c10::SymInt(value_dim));
  check_like(kWho, "out", out, sizes, q.scalar_type(), q);
  check_like(kWho, "dout", dout, sizes, q.scalar_type(), q);
}

Tensors3 backward(const at::Tensor& dout, const at::Tensor& q,
                  const at::Tensor& kv, const at::Tensor& indices,
                  const OptionalTensor& sink, const at::Tensor& out,
                  const at::Tensor& lse, double scale, int64_t value_dim,
                  bool exact_dkv) {
  check_selected("attend_selected", q, kv, indices, sink, scale, value_dim);
  check_backward(dout, q, out, lse, value_dim);
  const auto in = SelectedInputs::of(q, kv, indices, sink, scale, value_dim);
  const auto sums = accumulation_type(q.scalar_type());
  const auto with_row = [&](const at::Tensor& t) {
    return q.dim() == 4 ? t : t.unsqueeze(0);
  };
  SelectedResult result;
  result.dout = with_row(dout).contiguous();
  result.lse = with_sink(with_row(lse), in.sink).contiguous();
  result.delta = output_delta(with_row(out), result.dout, with_row(lse));
  const SelectedSums gradients =
      q.is_cpu() ? attend_selected_backward_cpu(in, result)
                 : attend_selected_backward_cuda(in, result);
  at::Tensor dsink = at::empty({0}, q.options().dtype(sums));
  if (sink) {
    const at::Tensor share = (in.sink - result.lse).exp();
    dsink = -(result.delta * share.masked_fill(at::isinf(result.lse), 0))
                 .sum(at::IntArrayRef({0, 1}));
  }
  return {
      gradients.dq.to(q.scalar_type()).reshape(q.sizes()),
      gradients.dkv.to(exact_dkv ? sums : kv.scalar_type()).reshape(kv.sizes()),
      dsink};
}

at::Tensor weights(const at::Tensor& q, const at::Tensor& kv,
                   const at::Tensor& indices, const at::Tensor& lse,
                   const OptionalTensor& sink, double scale) {
  check_selected("selected_weights", q, kv, indices, sink, scale, 0);
  check(lse.dim() == q.dim() - 1 &&
            lse.sym_sizes() == q.sym_sizes().slice(0, q.dim() - 1),
        "selected_weights: `lse` is ", describe(lse), " but `q` ", describe(q),
        "; expected what attend_selected returned");
  check(lse.scalar_type() == accumulation_type(q.scalar_type()),
        "selected_weights: `lse` is ", describe(lse), " but `q` ", describe(q),
        "; expected what attend_selected returned");
  check_same_device("selected_weights", "lse", lse, q);
  const auto in = SelectedInputs::of(q, kv, indices, sink, scale, 0);
  const at::Tensor all =
      with_sink(q.dim() == 4 ? lse : lse.unsqueeze(0), in.sink).contiguous();
  const at::Tensor weights = q.is_cpu() ? selected_weights_cpu(in, all)
                                        : selected_weights_cuda(in, all);
  const at::Tensor total = weights.sum(-1, /*keepdim=*/true);
  at::Tensor shares = at::where(total == 0, 0, weights / total);
  if (kv.dim() != q.dim() && indices.dim() != q.dim()) {
    shares = shares.squeeze(-2);
  }
  return q.dim() == 4 ? shares : shares.squeeze(0);
}

Tensors2 forward_meta(const at::Tensor& q, const at::Tensor& kv,
                      const at::Tensor& indices, const OptionalTensor& sink,
                      double scale, int64_t value_dim) {
  check_selected("attend_selected", q, kv, indices, sink, scale, value_dim);
  return {empty_out(q, value_dim), empty_sums(q, 1, {})};
}

Tensors3 backward_meta(const at::Tensor& dout, const at::Tensor& q,
                       const at::Tensor& kv, const at::Tensor& indices,
                       const OptionalTensor& sink, const at::Tensor& out,
                       const at::Tensor& lse, double scale, int64_t value_dim,
                       bool exact_dkv) {
  check_selected("attend_selected", q, kv, indices, sink, scale, value_dim);
  check_backward(dout, q, out, lse, value_dim);
  return {empty_as(q), exact_dkv ? empty_sums(kv, 0, {}) : empty_as(kv),
          empty_dsink(sink, lse)};
}

at::Tensor weights_meta(const at::Tensor& q, const at::Tensor& kv,
                        const at::Tensor& indices, const at::Tensor& /*lse*/,
                        const OptionalTensor& sink, double scale) {
  check_selected("selected_weights", q, kv, indices, sink, scale, 0);
  return empty_target(q, kv, indices.dim() == q.dim(), indices.sym_size(-1));
}

const auto& forward_op() {
  static const auto op =
      find_op<decltype(forward)>("longspan::attend_selected");
  return op;
}

const auto& backward_op() {
  static const auto op =
      find_op<decltype(backward)>("longspan::attend_selected_backward");
  return op;
}

const auto& weights_op() {
  static const auto op =
      find_op<decltype(weights)>("longspan::selected_weights");
  return op;
}

class SelectedFunction : public torch::autograd::Function<SelectedFunction> {
 public:
  static torch::autograd::variable_list forward(
      torch::autograd::AutogradContext* ctx, const at::Tensor& q,
      const at::Tensor& kv, const at::Tensor& indices,
      const OptionalTensor& sink, double scale, int64_t value_dim) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [out, lse] = forward_op().call(q, kv, indices, sink, scale, value_dim);
    ctx->save_for_backward(
        {q, kv, indices, sink.value_or(at::Tensor()), out, lse});
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["value_dim"] = value_dim;
    ctx->mark_non_differentiable({lse});
    return {out, lse};
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* ctx,
      torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const OptionalTensor sink =
        saved[3].defined() ? OptionalTensor(saved[3]) : std::nullopt;
    auto [dq, dkv, dsink] = backward_op().call(
        grads[0], saved[0], saved[1], saved[2], sink, saved[4], saved[5],
        ctx->saved_data["scale"].toDouble(),
        ctx->saved_data["value_dim"].toInt(), /*exact_dkv=*/false);
    return {dq, dkv, {}, sink ? dsink.to(sink->scalar_type()) : at::Tensor(),
            {}, {}};
  }
};

Tensors2 forward_autograd(const at::Tensor& q, const at::Tensor& kv,
                          const at::Tensor& indices, const OptionalTensor& sink,
                          double scale, int64_t value_dim) {
  const auto results =
      SelectedFunction::apply(q, kv, indices, sink, scale, value_dim);
  return {results[0], results[1]};
}

Tensors3 backward_autograd(const at::Tensor& dout, const at::Tensor& q,
                           const at::Tensor& kv, const at::Tensor& indices,
                           const OptionalTensor& sink, const at::Tensor& out,
                           const at::Tensor& lse, double scale,
                           int64_t value_dim, bool exact_dkv) {
  refuse_second_derivative("attend_selected",
                           {dout, q, kv, sink.value_or(at::Tensor())});
  at::AutoDispatchBelowADInplaceOrView guard;
  return backward_op().call(dout, q, kv, indices, sink, out, lse, scale,
                            value_dim, exact_dkv);
}

/// The weights are a target: nobody's gradient goes through them.
at::Tensor weights_autograd(const at::Tensor& q, const at::Tensor& kv,
                            const at::Tensor& indices, const at::Tensor& lse,
                            const OptionalTensor& sink, double scale) {
  at::AutoDispatchBelowADInplaceOrView guard;
  return weights_op().call(q, kv, indices, lse, sink, scale);
}

template <c10::DeviceType device, c10::DispatchKey key>
Tensors2 forward_autocast(const at::Tensor& q, const at::Tensor& kv,
                          const at::Tensor& indices, const OptionalTensor& sink,
                          double scale, int64_t value_dim) {
  const c10::impl::ExcludeDispatchKeyGuard guard(key);
  const Casts<device> cast;
  return forward_op().call(cast(q), cast(kv), indices, sink, scale, value_dim);
}

}  // namespace

SelectedAnswer attend_selected(const at::Tensor& q, const at::Tensor& kv,
                               const at::Tensor& indices,
                               const SelectedOptions& options) {
  auto [out, lse] = forward_op().call(q, kv, indices, optional(options.sink),
                                      options.scale, options.value_dim);
  return {out, lse};
}

SelectedGradients attend_selected_backward(
    const at::Tensor& dout, const at::Tensor& q, const at::Tensor& kv,
    const at::Tensor& indices, const at::Tensor& out, const at::Tensor& lse,
    const SelectedOptions& options, bool exact_dkv) {
  auto [dq, dkv, dsink] =
      backward_op().call(dout, q, kv, indices, optional(options.sink), out, lse,
                         options.scale, options.value_dim, exact_dkv);
  return {dq, dkv, dsink};
}

at::Tensor selected_weights(const at::Tensor& q, const at::Tensor& kv,
                            const at::Tensor& indices, const at::Tensor& lse,
                            const SelectedOptions& options) {
  return weights_op().call(q, kv, indices, lse, optional(options.sink),
                           options.scale);
}

std::string which_selected_kernel(const at::Tensor& q, const at::Tensor& kv,
                                  const at::Tensor& indices, int64_t value_dim,
                                  SelectedWork work) {
  check_selected("which_selected_kernel", q, kv, indices, {}, 1, value_dim);
  if (q.is_cpu()) {
    return describe_chosen_kernels(*element_type(q.scalar_type()));
  }
  check(q.is_cuda(), "which_selected_kernel: `q` is ", describe(q), " on ",
        q.device().str(), "; there are kernels for the CPU and for CUDA");
  return which_selected_kernel_cuda(
      SelectedInputs::of(q, kv, indices, {}, 1, value_dim), work);
}

TORCH_LIBRARY_FRAGMENT(longspan, m) {
  m.def(
      "attend_selected(Tensor q, Tensor kv, Tensor indices, Tensor? sink, "
      "float scale, int value_dim) -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "attend_selected_backward(Tensor dout, Tensor q, Tensor kv, "
      "Tensor indices, Tensor? sink, Tensor out, Tensor lse, float scale, "
      "int value_dim, bool exact_dkv) -> (Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "selected_weights(Tensor q, Tensor kv, Tensor indices, Tensor lse, "
      "Tensor? sink, float scale) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(longspan, Meta, m) {
  m.impl("attend_selected", forward_meta);
  m.impl("attend_selected_backward", backward_meta);
  m.impl("selected_weights", weights_meta);
}
TORCH_LIBRARY_IMPL(longspan, CPU, m) {
  m.impl("attend_selected", forward);
  m.impl("attend_selected_backward", backward);
  m.impl("selected_weights", weights);
}
TORCH_LIBRARY_IMPL(longspan, CUDA, m) {
  m.impl("attend_selected", forward);
  m.impl("attend_selected_backward", backward);
  m.impl("selected_weights", weights);
}
TORCH_LIBRARY_IMPL(longspan, Autograd, m) {
  m.impl("attend_selected", forward_autograd);
  m.impl("attend_selected_backward", backward_autograd);
  m.impl("selected_weights", weights_autograd);
}
TORCH_LIBRARY_IMPL(longspan, AutocastCPU, m) {
  m.impl("attend_selected",
         forward_autocast<at::kCPU, c10::DispatchKey::AutocastCPU>);
}
TORCH_LIBRARY_IMPL(longspan, AutocastCUDA, m) {
  m.impl("attend_selected",
         forward_autocast<at::kCUDA, c10::DispatchKey::AutocastCUDA>);
}

}  // namespace longspan
