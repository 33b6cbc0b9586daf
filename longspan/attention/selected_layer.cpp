#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "longspan/attention/attend.h"
#include "longspan/attention/selected.h"
#include "longspan/attention/selected_run.h"
#include "longspan/ops/registering.h"

namespace longspan {

namespace selected {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

Tensors5 layer_meta(const at::Tensor& q, const at::Tensor& kv,
                    const at::Tensor& index_q, const at::Tensor& index_k,
                    const at::Tensor& weights, const OptionalTensor& start,
                    const OptionalTensor& end, const OptionalTensor& sink,
                    const OptionalTensor& layout, c10::SymInt slots,
                    double scale, int64_t value_dim, bool scores, bool target,
                    bool /*balanced*/, const std::string& /*fetch*/,
                    const std::string& /*group*/) {
  check_meta("select_and_attend", q);
  check_layer(q, kv, index_q, index_k, weights, start, end, sink, layout, slots,
              scale, value_dim);
  const c10::SymInt none = 0;
  return {empty_out(q, value_dim), empty_sums(q, 1, {}),
          empty_sums(index_q, 2, {scores ? slots : none}),
          target ? empty_target(q, kv, false, slots) : empty_sums(q, 2, {none}),
          empty_sums(q, 2, {slots}).to(at::kInt)};
}

Tensors6 layer_backward_meta(
    const at::Tensor& /*dout*/, const at::Tensor& /*dscores*/,
    const at::Tensor& q, const at::Tensor& kv, const at::Tensor& index_q,
    const at::Tensor& index_k, const at::Tensor& weights,
    const at::Tensor& /*indices*/, const OptionalTensor& sink,
    const at::Tensor& /*out*/, const at::Tensor& lse,
    const OptionalTensor& /*layout*/, double /*scale*/, int64_t /*value_dim*/,
    bool trained, const std::string& /*fetch*/, const std::string& /*group*/) {
  const auto maybe = [&](const at::Tensor& t) {
    return trained ? empty_as(t) : at::empty({0}, t.options());
  };
  return {empty_as(q),    empty_as(kv),   empty_dsink(sink, lse),
          maybe(index_q), maybe(index_k), maybe(weights)};
}

const auto& layer_op() {
  static const auto op =
      find_op<decltype(layer_meta)>("longspan::select_and_attend");
  return op;
}

const auto& layer_backward_op() {
  static const auto op =
      find_op<decltype(layer_backward)>("longspan::select_and_attend_backward");
  return op;
}

class LayerFunction : public torch::autograd::Function<LayerFunction> {
 public:
  static variable_list forward(
      AutogradContext* ctx, const at::Tensor& q, const at::Tensor& kv,
      const at::Tensor& index_q, const at::Tensor& index_k,
      const at::Tensor& weights, const OptionalTensor& start,
      const OptionalTensor& end, const OptionalTensor& sink,
      const OptionalTensor& layout, const c10::SymInt& slots, double scale,
      int64_t value_dim, bool scores, bool target, bool balanced,
      const std::string& fetch, const std::string& group) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [out, lse, found, shares, indices] = layer_op().call(
        q, kv, index_q, index_k, weights, start, end, sink, layout, slots,
        scale, value_dim, scores, target, balanced, fetch, group);
    ctx->save_for_backward({q, kv, index_q, index_k, weights, indices,
                            sink.value_or(at::Tensor()), out, lse,
                            layout.value_or(at::Tensor())});
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["value_dim"] = value_dim;
    ctx->saved_data["trained"] = scores;
    ctx->saved_data["fetch"] = fetch;
    ctx->saved_data["group"] = group;
    variable_list constant = {lse, shares, indices};
    if (!scores) constant.push_back(found);
    ctx->mark_non_differentiable(constant);
    return {out, lse, found, shares, indices};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const auto& data = ctx->saved_data;
    const OptionalTensor sink = optional(saved[6]);
    const bool trained = data.at("trained").toBool();
    auto [dq, dkv, dsink, diq, dik, dweights] = layer_backward_op().call(
        grads[0], grads[2], saved[0], saved[1], saved[2], saved[3], saved[4],
        saved[5], sink, saved[7], saved[8], optional(saved[9]),
        data.at("scale").toDouble(), data.at("value_dim").toInt(), trained,
        data.at("fetch").toStringRef(), data.at("group").toStringRef());
    variable_list all(17);
    all[0] = dq;
    all[1] = dkv;
    if (trained) {
      all[2] = diq;
      all[3] = dik;
      all[4] = dweights;
    }
    if (sink) all[7] = dsink.to(sink->scalar_type());
    return all;
  }
};

Tensors5 layer_autograd(const at::Tensor& q, const at::Tensor& kv,
                        const at::Tensor& index_q, const at::Tensor& index_k,
                        const at::Tensor& weights, const OptionalTensor& start,
                        const OptionalTensor& end, const OptionalTensor& sink,
                        const OptionalTensor& layout, c10::SymInt slots,
                        double scale, int64_t value_dim, bool scores,
                        bool target, bool balanced, const std::string& fetch,
                        const std::string& group) {
  const auto results = LayerFunction::apply(
      q, kv, index_q, index_k, weights, start, end, sink, layout, slots, scale,
      value_dim, scores, target, balanced, fetch, group);
  return {results[0], results[1], results[2], results[3], results[4]};
}

Tensors6 layer_backward_autograd(
    const at::Tensor& dout, const at::Tensor& dscores, const at::Tensor& q,
    const at::Tensor& kv, const at::Tensor& index_q, const at::Tensor& index_k,
    const at::Tensor& weights, const at::Tensor& indices,
    const OptionalTensor& sink, const at::Tensor& out, const at::Tensor& lse,
    const OptionalTensor& layout, double scale, int64_t value_dim, bool trained,
    const std::string& fetch, const std::string& group) {
  refuse_second_derivative("select_and_attend",
                           {dout, dscores, q, kv, index_q, index_k, weights,
                            sink.value_or(at::Tensor())});
  at::AutoDispatchBelowADInplaceOrView guard;
  return layer_backward_op().call(dout, dscores, q, kv, index_q, index_k,
                                  weights, indices, sink, out, lse, layout,
                                  scale, value_dim, trained, fetch, group);
}

template <c10::DeviceType device, c10::DispatchKey key>
Tensors5 layer_autocast(const at::Tensor& q, const at::Tensor& kv,
                        const at::Tensor& index_q, const at::Tensor& index_k,
                        const at::Tensor& weights, const OptionalTensor& start,
                        const OptionalTensor& end, const OptionalTensor& sink,
                        const OptionalTensor& layout, c10::SymInt slots,
                        double scale, int64_t value_dim, bool scores,
                        bool target, bool balanced, const std::string& fetch,
                        const std::string& group) {
  const c10::impl::ExcludeDispatchKeyGuard guard(key);
  const Casts<device> cast;
  return layer_op().call(cast(q), cast(kv), cast(index_q), cast(index_k),
                         cast.sums(weights), start, end, sink, layout,
                         std::move(slots), scale, value_dim, scores, target,
                         balanced, fetch, group);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(longspan, m) {
  m.def(
      "select_and_attend(Tensor q, Tensor kv, Tensor index_q, Tensor index_k, "
      "Tensor weights, Tensor? start, Tensor? end, Tensor? sink, "
      "Tensor? layout, SymInt slots, float scale, int value_dim, bool scores, "
      "bool target, bool balanced, str fetch, str group) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "select_and_attend_backward(Tensor dout, Tensor dscores, Tensor q, "
      "Tensor kv, Tensor index_q, Tensor index_k, Tensor weights, "
      "Tensor indices, Tensor? sink, Tensor out, Tensor lse, Tensor? layout, "
      "float scale, int value_dim, bool trained, str fetch, str group) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(longspan, Meta, m) {
  m.impl("select_and_attend", layer_meta);
  m.impl("select_and_attend_backward", layer_backward_meta);
}
TORCH_LIBRARY_IMPL(longspan, CompositeExplicitAutograd, m) {
  m.impl("select_and_attend", layer);
  m.impl("select_and_attend_backward", layer_backward);
}
TORCH_LIBRARY_IMPL(longspan, Autograd, m) {
  m.impl("select_and_attend", layer_autograd);
  m.impl("select_and_attend_backward", layer_backward_autograd);
}
TORCH_LIBRARY_IMPL(longspan, AutocastCPU, m) {
  m.impl("select_and_attend",
         layer_autocast<at::kCPU, c10::DispatchKey::AutocastCPU>);
}
TORCH_LIBRARY_IMPL(longspan, AutocastCUDA, m) {
  m.impl("select_and_attend",
         layer_autocast<at::kCUDA, c10::DispatchKey::AutocastCUDA>);
}

}  // namespace selected

LayerAnswer select_and_attend(const SelectedLayer& layer,
                              const AttentionLayout& layout, const Group& group,
                              const SelectOptions& selection,
                              const SelectedOptions& attention, Fetch fetch,
                              bool with_target) {
  auto [out, lse, scores, target, indices] = selected::layer_op().call(
      layer.q, layer.kv, layer.index_q, layer.index_k, layer.weights,
      optional(selection.start), optional(selection.end),
      optional(attention.sink), layout_tensor(layout), selection.slots,
      attention.scale, attention.value_dim, selection.scores, with_target,
      selection.balanced, name_of(fetch), group.name());
  return {out, lse, indices, scores, target};
}

}  // namespace longspan
