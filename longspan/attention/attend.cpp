#include "longspan/attention/attend.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

#include "longspan/attention/rank_layout.h"
#include "longspan/attention/run.h"
#include "longspan/core/check.h"
#include "longspan/ops/attend_tiles.h"
#include "longspan/ops/registering.h"

namespace longspan {

namespace {

Tensors2 attend_meta(const at::Tensor& q, const at::Tensor& k,
                     const at::Tensor& v, const OptionalTensor& sink,
                     const at::Tensor& /*layout*/, double scale, double softcap,
                     const std::string& /*strategy*/, int64_t /*head_ranks*/,
                     const std::string& /*group*/) {
  check_attend(q, k, v, sink, scale, softcap);
  check(q.is_meta(), "attend: `layout` is on meta, which holds no values; ",
        "keep what attention_layout made on the CPU");
  auto sizes = q.sym_sizes().vec();
  const auto options = sums_like(q);
  const auto without_channels =
      c10::SymIntArrayRef(sizes).slice(0, sizes.size() - 1).vec();
  sizes.back() = v.sym_size(-1);
  return {at::empty_symint(sizes, q.options()),
          at::empty_symint(without_channels, options)};
}

Tensors4 attend_backward_meta(
    const at::Tensor& /*dout*/, const at::Tensor& q, const at::Tensor& k,
    const at::Tensor& v, const OptionalTensor& sink, const at::Tensor& /*out*/,
    const at::Tensor& /*lse*/, const at::Tensor& /*layout*/, double /*scale*/,
    double /*softcap*/, const std::string& /*strategy*/, int64_t /*head_ranks*/,
    const std::string& /*group*/) {
  const auto like = [](const at::Tensor& tensor) {
    return at::empty_symint(tensor.sym_sizes(), tensor.options());
  };
  return {like(q), like(k), like(v),
          sink ? like(*sink) : at::empty({0}, q.options())};
}

const auto& forward_op() {
  static const auto op = find_op<decltype(attend_forward)>("longspan::attend");
  return op;
}

const auto& backward_op() {
  static const auto op =
      find_op<decltype(attend_backward)>("longspan::attend_backward");
  return op;
}

class AttendFunction : public torch::autograd::Function<AttendFunction> {
 public:
  static torch::autograd::variable_list forward(
      torch::autograd::AutogradContext* ctx, const at::Tensor& q,
      const at::Tensor& k, const at::Tensor& v, const OptionalTensor& sink,
      const at::Tensor& layout, double scale, double softcap,
      const std::string& strategy, int64_t head_ranks,
      const std::string& group) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [out, lse] = forward_op().call(q, k, v, sink, layout, scale, softcap,
                                        strategy, head_ranks, group);
    ctx->save_for_backward(
        {q, k, v, sink.value_or(at::Tensor()), out, lse, layout});
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["softcap"] = softcap;
    ctx->saved_data["strategy"] = strategy;
    ctx->saved_data["head_ranks"] = head_ranks;
    ctx->saved_data["group"] = group;
    ctx->mark_non_differentiable({lse});
    return {out, lse};
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* ctx,
      torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const auto& data = ctx->saved_data;
    const OptionalTensor sink =
        saved[3].defined() ? OptionalTensor(saved[3]) : std::nullopt;
    auto [dq, dk, dv, dsink] = backward_op().call(
        grads[0], saved[0], saved[1], saved[2], sink, saved[4], saved[5],
        saved[6], data.at("scale").toDouble(), data.at("softcap").toDouble(),
        data.at("strategy").toStringRef(), data.at("head_ranks").toInt(),
        data.at("group").toStringRef());
    return {dq, dk, dv, sink ? dsink : at::Tensor(), {}, {}, {}, {}, {}, {}};
  }
};

Tensors2 attend_autograd(const at::Tensor& q, const at::Tensor& k,
                         const at::Tensor& v, const OptionalTensor& sink,
                         const at::Tensor& layout, double scale, double softcap,
                         const std::string& strategy, int64_t head_ranks,
                         const std::string& group) {
  const auto results = AttendFunction::apply(
      q, k, v, sink, layout, scale, softcap, strategy, head_ranks, group);
  return {results[0], results[1]};
}

Tensors4 attend_backward_autograd(const at::Tensor& dout, const at::Tensor& q,
                                  const at::Tensor& k, const at::Tensor& v,
                                  const OptionalTensor& sink,
                                  const at::Tensor& out, const at::Tensor& lse,
                                  const at::Tensor& layout, double scale,
                                  double softcap, const std::string& strategy,
                                  int64_t head_ranks,
                                  const std::string& group) {
  refuse_second_derivative("attend",
                           {dout, q, k, v, sink.value_or(at::Tensor())});
  at::AutoDispatchBelowADInplaceOrView guard;
  return backward_op().call(dout, q, k, v, sink, out, lse, layout, scale,
                            softcap, strategy, head_ranks, group);
}

template <c10::DeviceType device, c10::DispatchKey key>
Tensors2 attend_autocast(const at::Tensor& q, const at::Tensor& k,
                         const at::Tensor& v, const OptionalTensor& sink,
                         const at::Tensor& layout, double scale, double softcap,
                         const std::string& strategy, int64_t head_ranks,
                         const std::string& group) {
  const c10::impl::ExcludeDispatchKeyGuard guard(key);
  const auto dtype = at::autocast::get_autocast_dtype(device);
  const auto cast = [&](const at::Tensor& tensor) {
    return at::autocast::cached_cast(dtype, tensor, device);
  };
  return forward_op().call(cast(q), cast(k), cast(v), sink, layout, scale,
                           softcap, strategy, head_ranks, group);
}

}  // namespace

std::string which_kernel(const at::Tensor& q, const at::Tensor& k,
                         const at::Tensor& v, const std::vector<Mask>& masks,
                         const AttendOptions& options) {
  check_attend(q, k, v, {}, options.scale.value_or(1), options.softcap);
  AttentionInputs inputs;
  inputs.q = rows_first(q);
  inputs.k = rows_first(k);
  inputs.v = rows_first(v);
  inputs.heads_per_key_head = q.size(1) / k.size(1);
  inputs.softcap = options.softcap;
  const auto layout = AttentionLayout::of(
      Ownership::contiguous(inputs.q.size(1), 1),
      masks.empty()
          ? std::vector{Mask::causal(Packing::single(inputs.q.size(1)))}
          : masks);
  const Plan plan = Plan::of(layout, Strategy{}, 0, inputs.q.size(0));
  return which_kernel(inputs, plan.steps()[0].lines);
}

at::Tensor layout_tensor(const AttentionLayout& layout) {
  const std::vector<int64_t> code = layout.encode();
  return at::tensor(code, at::TensorOptions(at::kLong));
}

Attended attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                const AttentionLayout& layout, const Group& group,
                const AttendOptions& options) {
  check(q.defined() && k.defined() && v.defined(),
        "attend: `q`, `k` or `v` is not a tensor");
  check(q.dim() > 0, "attend: `q` has no axes");
  const double scale = options.scale.value_or(
      1 / std::sqrt(static_cast<double>(std::max<int64_t>(q.size(-1), 1))));
  auto [out, lse] = forward_op().call(
      q, k, v,
      options.sink.defined() ? OptionalTensor(options.sink) : std::nullopt,
      layout_tensor(layout), scale, options.softcap, options.strategy,
      options.head_ranks, group.name());
  return {out, lse};
}

std::shared_ptr<const Plan> plan_for(const at::Tensor& layout,
                                     const std::string& strategy,
                                     int head_ranks, int64_t key_heads,
                                     int64_t rows, const Group& group) {
  return RankLayout::of("attend", layout, group)
      ->plan(Strategy::named(strategy, group.size(), key_heads, head_ranks),
             rows);
}

TORCH_LIBRARY_FRAGMENT(longspan, m) {
  m.def(
      "attend(Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor layout, "
      "float scale, float softcap, str strategy, int head_ranks, str group) "
      "-> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "attend_backward(Tensor dout, Tensor q, Tensor k, Tensor v, "
      "Tensor? sink, Tensor out, Tensor lse, Tensor layout, float scale, "
      "float softcap, str strategy, int head_ranks, str group) "
      "-> (Tensor, Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(longspan, Meta, m) {
  m.impl("attend", attend_meta);
  m.impl("attend_backward", attend_backward_meta);
}
TORCH_LIBRARY_IMPL(longspan, CPU, m) {
  m.impl("attend", attend_forward);
  m.impl("attend_backward", attend_backward);
}
TORCH_LIBRARY_IMPL(longspan, CUDA, m) {
  m.impl("attend", attend_forward);
  m.impl("attend_backward", attend_backward);
}
TORCH_LIBRARY_IMPL(longspan, Autograd, m) {
  m.impl("attend", attend_autograd);
  m.impl("attend_backward", attend_backward_autograd);
}
TORCH_LIBRARY_IMPL(longspan, AutocastCPU, m) {
  m.impl("attend", attend_autocast<at::kCPU, c10::DispatchKey::AutocastCPU>);
}
TORCH_LIBRARY_IMPL(longspan, AutocastCUDA, m) {
  m.impl("attend", attend_autocast<at::kCUDA, c10::DispatchKey::AutocastCUDA>);
}

}  // namespace longspan
