#include "longspan/attention/selected.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "longspan/attention/attend.h"
#include "longspan/attention/selected_run.h"
#include "longspan/ops/attend_selected/inputs.h"
#include "longspan/ops/registering.h"

namespace longspan {

namespace selected {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

Tensors2 attend_meta(const at::Tensor& q, const at::Tensor& kv,
                     const at::Tensor& indices, const OptionalTensor& sink,
                     const OptionalTensor& layout, double scale,
                     int64_t value_dim, const std::string& /*fetch*/,
                     const std::string& /*group*/) {
  check_selected("attend_selected", q, kv, indices, sink, scale, value_dim);
  check_keys("attend_selected", "kv", kv, q, layout);
  check_meta("attend_selected", q);
  return {empty_out(q, value_dim), empty_sums(q, 1, {})};
}

Tensors3 attend_backward_meta(
    const at::Tensor& /*dout*/, const at::Tensor& q, const at::Tensor& kv,
    const at::Tensor& /*indices*/, const OptionalTensor& sink,
    const at::Tensor& /*out*/, const at::Tensor& lse,
    const OptionalTensor& /*layout*/, double /*scale*/, int64_t /*value_dim*/,
    const std::string& /*fetch*/, const std::string& /*group*/) {
  return {empty_as(q), empty_as(kv), empty_dsink(sink, lse)};
}

at::Tensor weights_meta(const at::Tensor& q, const at::Tensor& kv,
                        const at::Tensor& indices, const at::Tensor& lse,
                        const OptionalTensor& sink,
                        const OptionalTensor& layout, double scale,
                        const std::string& /*fetch*/,
                        const std::string& /*group*/) {
  check_weights(q, kv, indices, lse, sink, layout, scale);
  check_meta("selected_weights", q);
  return empty_target(q, kv, indices.dim() == q.dim(), indices.sym_size(-1));
}

const auto& attend_op() {
  static const auto op =
      find_op<decltype(attend)>("longspan::attend_selected_ranks");
  return op;
}

const auto& attend_backward_op() {
  static const auto op = find_op<decltype(attend_backward)>(
      "longspan::attend_selected_ranks_backward");
  return op;
}

const auto& weights_op() {
  static const auto op =
      find_op<decltype(weights)>("longspan::selected_weights_ranks");
  return op;
}

class AttendFunction : public torch::autograd::Function<AttendFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& q,
                               const at::Tensor& kv, const at::Tensor& indices,
                               const OptionalTensor& sink,
                               const OptionalTensor& layout, double scale,
                               int64_t value_dim, const std::string& fetch,
                               const std::string& group) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [out, lse] = attend_op().call(q, kv, indices, sink, layout, scale,
                                       value_dim, fetch, group);
    ctx->save_for_backward({q, kv, indices, sink.value_or(at::Tensor()), out,
                            lse, layout.value_or(at::Tensor())});
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["value_dim"] = value_dim;
    ctx->saved_data["fetch"] = fetch;
    ctx->saved_data["group"] = group;
    ctx->mark_non_differentiable({lse});
    return {out, lse};
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const auto& data = ctx->saved_data;
    const OptionalTensor sink = optional(saved[3]);
    auto [dq, dkv, dsink] = attend_backward_op().call(
        grads[0], saved[0], saved[1], saved[2], sink, saved[4], saved[5],
        optional(saved[6]), data.at("scale").toDouble(),
        data.at("value_dim").toInt(), data.at("fetch").toStringRef(),
        data.at("group").toStringRef());
    variable_list all(9);
    all[0] = dq;
    all[1] = dkv;
    if (sink) all[3] = dsink.to(sink->scalar_type());
    return all;
  }
};

Tensors2 attend_autograd(const at::Tensor& q, const at::Tensor& kv,
                         const at::Tensor& indices, const OptionalTensor& sink,
                         const OptionalTensor& layout, double scale,
                         int64_t value_dim, const std::string& fetch,
                         const std::string& group) {
  const auto results = AttendFunction::apply(q, kv, indices, sink, layout,
                                             scale, value_dim, fetch, group);
  return {results[0], results[1]};
}

Tensors3 attend_backward_autograd(const at::Tensor& dout, const at::Tensor& q,
                                  const at::Tensor& kv,
                                  const at::Tensor& indices,
                                  const OptionalTensor& sink,
                                  const at::Tensor& out, const at::Tensor& lse,
                                  const OptionalTensor& layout, double scale,
                                  int64_t value_dim, const std::string& fetch,
                                  const std::string& group) {
  refuse_second_derivative("attend_selected",
                           {dout, q, kv, sink.value_or(at::Tensor())});
  at::AutoDispatchBelowADInplaceOrView guard;
  return attend_backward_op().call(dout, q, kv, indices, sink, out, lse, layout,
                                   scale, value_dim, fetch, group);
}

/// The weights are a target: nobody's gradient goes through them.
at::Tensor weights_autograd(const at::Tensor& q, const at::Tensor& kv,
                            const at::Tensor& indices, const at::Tensor& lse,
                            const OptionalTensor& sink,
                            const OptionalTensor& layout, double scale,
                            const std::string& fetch,
                            const std::string& group) {
  at::AutoDispatchBelowADInplaceOrView guard;
  return weights_op().call(q, kv, indices, lse, sink, layout, scale, fetch,
                           group);
}

template <c10::DeviceType device, c10::DispatchKey key>
Tensors2 attend_autocast(const at::Tensor& q, const at::Tensor& kv,
                         const at::Tensor& indices, const OptionalTensor& sink,
                         const OptionalTensor& layout, double scale,
                         int64_t value_dim, const std::string& fetch,
                         const std::string& group) {
  const c10::impl::ExcludeDispatchKeyGuard guard(key);
  const Casts<device> cast;
  return attend_op().call(cast(q), cast(kv), indices, sink, layout, scale,
                          value_dim, fetch, group);
}

template <c10::DeviceType device, c10::DispatchKey key>
at::Tensor weights_autocast(const at::Tensor& q, const at::Tensor& kv,
                            const at::Tensor& indices, const at::Tensor& lse,
                            const OptionalTensor& sink,
                            const OptionalTensor& layout, double scale,
                            const std::string& fetch,
                            const std::string& group) {
  const c10::impl::ExcludeDispatchKeyGuard guard(key);
  const Casts<device> cast;
  return weights_op().call(cast(q), cast(kv), indices, lse, sink, layout, scale,
                           fetch, group);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(longspan, m) {
  m.def(
      "attend_selected_ranks(Tensor q, Tensor kv, Tensor indices, "
      "Tensor? sink, Tensor? layout, float scale, int value_dim, str fetch, "
      "str group) -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "attend_selected_ranks_backward(Tensor dout, Tensor q, Tensor kv, "
      "Tensor indices, Tensor? sink, Tensor out, Tensor lse, "
      "Tensor? layout, float scale, int value_dim, str fetch, str group) "
      "-> (Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "selected_weights_ranks(Tensor q, Tensor kv, Tensor indices, "
      "Tensor lse, Tensor? sink, Tensor? layout, float scale, str fetch, "
      "str group) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(longspan, Meta, m) {
  m.impl("attend_selected_ranks", attend_meta);
  m.impl("attend_selected_ranks_backward", attend_backward_meta);
  m.impl("selected_weights_ranks", weights_meta);
}
TORCH_LIBRARY_IMPL(longspan, CompositeExplicitAutograd, m) {
  m.impl("attend_selected_ranks", attend);
  m.impl("attend_selected_ranks_backward", attend_backward);
  m.impl("selected_weights_ranks", weights);
}
TORCH_LIBRARY_IMPL(longspan, Autograd, m) {
  m.impl("attend_selected_ranks", attend_autograd);
  m.impl("attend_selected_ranks_backward", attend_backward_autograd);
  m.impl("selected_weights_ranks", weights_autograd);
}
TORCH_LIBRARY_IMPL(longspan, AutocastCPU, m) {
  m.impl("attend_selected_ranks",
         attend_autocast<at::kCPU, c10::DispatchKey::AutocastCPU>);
  m.impl("selected_weights_ranks",
         weights_autocast<at::kCPU, c10::DispatchKey::AutocastCPU>);
}
TORCH_LIBRARY_IMPL(longspan, AutocastCUDA, m) {
  m.impl("attend_selected_ranks",
         attend_autocast<at::kCUDA, c10::DispatchKey::AutocastCUDA>);
  m.impl("selected_weights_ranks",
         weights_autocast<at::kCUDA, c10::DispatchKey::AutocastCUDA>);
}

}  // namespace selected

SelectedAnswer attend_selected(const at::Tensor& q, const at::Tensor& kv,
                               const at::Tensor& indices,
                               const AttentionLayout& layout,
                               const Group& group,
                               const SelectedOptions& options, Fetch fetch) {
  auto [out, lse] = selected::attend_op().call(
      q, kv, indices, optional(options.sink), layout_tensor(layout),
      options.scale, options.value_dim, name_of(fetch), group.name());
  return {out, lse};
}

at::Tensor selected_weights(const at::Tensor& q, const at::Tensor& kv,
                            const at::Tensor& indices, const at::Tensor& lse,
                            const AttentionLayout& layout, const Group& group,
                            const SelectedOptions& options, Fetch fetch) {
  return selected::weights_op().call(
      q, kv, indices, lse, optional(options.sink), layout_tensor(layout),
      options.scale, name_of(fetch), group.name());
}

}  // namespace longspan
