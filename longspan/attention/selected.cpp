#include "longspan/attention/selected.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "longspan/attention/attend.h"
#include "longspan/attention/selected_ops.h"
#include "longspan/core/check.h"
#include "longspan/ops/checks.h"
#include "longspan/ops/partial_attention.h"
#include "longspan/ops/selected_inputs.h"
#include "longspan/ops/selection_inputs.h"

namespace longspan {

namespace selected {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

Tensors2 select_meta(const at::Tensor& q, const at::Tensor& k,
                     const at::Tensor& weights, const OptionalTensor& start,
                     const OptionalTensor& end, const OptionalTensor& layout,
                     c10::SymInt slots, bool scores, bool /*balanced*/,
                     const std::string& /*group*/) {
  check_select("select_keys", q, k, weights, start, end, layout, slots);
  check_meta("select_keys", q);
  return {empty_sums(q, 2, {scores ? slots : c10::SymInt(0)}),
          empty_sums(q, 2, {slots}).to(at::kInt)};
}

at::Tensor score_meta(const at::Tensor& q, const at::Tensor& k,
                      const at::Tensor& weights, const at::Tensor& indices,
                      const OptionalTensor& layout,
                      const std::string& /*fetch*/,
                      const std::string& /*group*/) {
  check_indexer("score_selected", q, k, weights);
  check_keys("score_selected", "k", k, q, layout);
  check_meta("score_selected", q);
  return empty_sums(q, 2, {indices.sym_size(-1)});
}

Tensors3 score_backward_meta(const at::Tensor& /*dscores*/, const at::Tensor& q,
                             const at::Tensor& k, const at::Tensor& weights,
                             const at::Tensor& /*indices*/,
                             const OptionalTensor& /*layout*/,
                             const std::string& /*fetch*/,
                             const std::string& /*group*/) {
  return {empty_as(q), empty_as(k), empty_as(weights)};
}

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
                        const at::Tensor& indices, const at::Tensor& /*lse*/,
                        const OptionalTensor& sink,
                        const OptionalTensor& layout, double scale,
                        const std::string& /*fetch*/,
                        const std::string& /*group*/) {
  check_selected("selected_weights", q, kv, indices, sink, scale, 0);
  check_keys("selected_weights", "kv", kv, q, layout);
  check_meta("selected_weights", q);
  return empty_target(q, kv, indices.dim() == q.dim(), indices.sym_size(-1));
}

const auto& select_op() {
  static const auto op =
      find_op<decltype(select_meta)>("longspan::select_keys_ranks");
  return op;
}

const auto& score_op() {
  static const auto op =
      find_op<decltype(score)>("longspan::score_selected_ranks");
  return op;
}

const auto& score_backward_op() {
  static const auto op = find_op<decltype(score_backward)>(
      "longspan::score_selected_ranks_backward");
  return op;
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

/// What both functions of scores keep: q, k, weights, indices, layout.
void keep_scores(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                 const at::Tensor& weights, const at::Tensor& indices,
                 const OptionalTensor& layout, const std::string& fetch,
                 const std::string& group) {
  ctx->save_for_backward(
      {q, k, weights, indices, layout.value_or(at::Tensor())});
  ctx->saved_data["fetch"] = fetch;
  ctx->saved_data["group"] = group;
}

variable_list gradients_of_scores(AutogradContext* ctx,
                                  const at::Tensor& dscores,
                                  std::size_t arguments) {
  const auto saved = ctx->get_saved_variables();
  auto [dq, dk, dweights] = score_backward_op().call(
      dscores, saved[0], saved[1], saved[2], saved[3], optional(saved[4]),
      ctx->saved_data["fetch"].toStringRef(),
      ctx->saved_data["group"].toStringRef());
  variable_list all(arguments);
  all[0] = dq;
  all[1] = dk;
  all[2] = dweights;
  return all;
}

class SelectFunction : public torch::autograd::Function<SelectFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& q,
                               const at::Tensor& k, const at::Tensor& weights,
                               const OptionalTensor& start,
                               const OptionalTensor& end,
                               const OptionalTensor& layout,
                               const c10::SymInt& slots, bool balanced,
                               const std::string& group) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [scores, indices] = select_op().call(q, k, weights, start, end, layout,
                                              slots, true, balanced, group);
    keep_scores(ctx, q, k, weights, indices, layout, "gathered", group);
    ctx->mark_non_differentiable({indices});
    return {scores, indices};
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    return gradients_of_scores(ctx, grads[0], 9);
  }
};

class ScoreFunction : public torch::autograd::Function<ScoreFunction> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& q,
                            const at::Tensor& k, const at::Tensor& weights,
                            const at::Tensor& indices,
                            const OptionalTensor& layout,
                            const std::string& fetch,
                            const std::string& group) {
    at::AutoDispatchBelowADInplaceOrView guard;
    keep_scores(ctx, q, k, weights, indices, layout, fetch, group);
    return score_op().call(q, k, weights, indices, layout, fetch, group);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    return gradients_of_scores(ctx, grads[0], 7);
  }
};

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

Tensors2 select_autograd(const at::Tensor& q, const at::Tensor& k,
                         const at::Tensor& weights, const OptionalTensor& start,
                         const OptionalTensor& end,
                         const OptionalTensor& layout, c10::SymInt slots,
                         bool scores, bool balanced, const std::string& group) {
  if (scores) {
    const auto results = SelectFunction::apply(q, k, weights, start, end,
                                               layout, slots, balanced, group);
    return {results[0], results[1]};
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return select_op().call(q, k, weights, start, end, layout, std::move(slots),
                          false, balanced, group);
}

at::Tensor score_autograd(const at::Tensor& q, const at::Tensor& k,
                          const at::Tensor& weights, const at::Tensor& indices,
                          const OptionalTensor& layout,
                          const std::string& fetch, const std::string& group) {
  return ScoreFunction::apply(q, k, weights, indices, layout, fetch, group);
}

Tensors3 score_backward_autograd(const at::Tensor& dscores, const at::Tensor& q,
                                 const at::Tensor& k, const at::Tensor& weights,
                                 const at::Tensor& indices,
                                 const OptionalTensor& layout,
                                 const std::string& fetch,
                                 const std::string& group) {
  refuse_second_derivative("score_selected", {dscores, q, k, weights});
  at::AutoDispatchBelowADInplaceOrView guard;
  return score_backward_op().call(dscores, q, k, weights, indices, layout,
                                  fetch, group);
}

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
Tensors2 select_autocast(const at::Tensor& q, const at::Tensor& k,
                         const at::Tensor& weights, const OptionalTensor& start,
                         const OptionalTensor& end,
                         const OptionalTensor& layout, c10::SymInt slots,
                         bool scores, bool balanced, const std::string& group) {
  const c10::impl::ExcludeDispatchKeyGuard guard(key);
  const Casts<device> cast;
  return select_op().call(cast(q), cast(k), cast.sums(weights), start, end,
                          layout, std::move(slots), scores, balanced, group);
}

template <c10::DeviceType device, c10::DispatchKey key>
at::Tensor score_autocast(const at::Tensor& q, const at::Tensor& k,
                          const at::Tensor& weights, const at::Tensor& indices,
                          const OptionalTensor& layout,
                          const std::string& fetch, const std::string& group) {
  const c10::impl::ExcludeDispatchKeyGuard guard(key);
  const Casts<device> cast;
  return score_op().call(cast(q), cast(k), cast.sums(weights), indices, layout,
                         fetch, group);
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

void define(torch::Library& m, const char* schema) {
  m.def(schema, {at::Tag::pt2_compliant_tag});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(longspan, m) {
  define(m,
         "select_keys_ranks(Tensor q, Tensor k, Tensor weights, Tensor? start, "
         "Tensor? end, Tensor? layout, SymInt slots, bool scores, "
         "bool balanced, str group) -> (Tensor, Tensor)");
  define(m,
         "score_selected_ranks(Tensor q, Tensor k, Tensor weights, "
         "Tensor indices, Tensor? layout, str fetch, str group) -> Tensor");
  define(m,
         "score_selected_ranks_backward(Tensor dscores, Tensor q, Tensor k, "
         "Tensor weights, Tensor indices, Tensor? layout, str fetch, "
         "str group) -> (Tensor, Tensor, Tensor)");
  define(m,
         "attend_selected_ranks(Tensor q, Tensor kv, Tensor indices, "
         "Tensor? sink, Tensor? layout, float scale, int value_dim, str fetch, "
         "str group) -> (Tensor, Tensor)");
  define(m,
         "attend_selected_ranks_backward(Tensor dout, Tensor q, Tensor kv, "
         "Tensor indices, Tensor? sink, Tensor out, Tensor lse, "
         "Tensor? layout, float scale, int value_dim, str fetch, str group) "
         "-> (Tensor, Tensor, Tensor)");
  define(m,
         "selected_weights_ranks(Tensor q, Tensor kv, Tensor indices, "
         "Tensor lse, Tensor? sink, Tensor? layout, float scale, str fetch, "
         "str group) -> Tensor");
}
TORCH_LIBRARY_IMPL(longspan, Meta, m) {
  m.impl("select_keys_ranks", select_meta);
  m.impl("score_selected_ranks", score_meta);
  m.impl("score_selected_ranks_backward", score_backward_meta);
  m.impl("attend_selected_ranks", attend_meta);
  m.impl("attend_selected_ranks_backward", attend_backward_meta);
  m.impl("selected_weights_ranks", weights_meta);
}
TORCH_LIBRARY_IMPL(longspan, CompositeExplicitAutograd, m) {
  m.impl("select_keys_ranks", select);
  m.impl("score_selected_ranks", score);
  m.impl("score_selected_ranks_backward", score_backward);
  m.impl("attend_selected_ranks", attend);
  m.impl("attend_selected_ranks_backward", attend_backward);
  m.impl("selected_weights_ranks", weights);
}
TORCH_LIBRARY_IMPL(longspan, Autograd, m) {
  m.impl("select_keys_ranks", select_autograd);
  m.impl("score_selected_ranks", score_autograd);
  m.impl("score_selected_ranks_backward", score_backward_autograd);
  m.impl("attend_selected_ranks", attend_autograd);
  m.impl("attend_selected_ranks_backward", attend_backward_autograd);
  m.impl("selected_weights_ranks", weights_autograd);
}
template <c10::DeviceType device, c10::DispatchKey key>
void autocast(torch::Library& m) {
  m.impl("select_keys_ranks", select_autocast<device, key>);
  m.impl("score_selected_ranks", score_autocast<device, key>);
  m.impl("attend_selected_ranks", attend_autocast<device, key>);
  m.impl("selected_weights_ranks", weights_autocast<device, key>);
}
TORCH_LIBRARY_IMPL(longspan, AutocastCPU, m) {
  autocast<at::kCPU, c10::DispatchKey::AutocastCPU>(m);
}
TORCH_LIBRARY_IMPL(longspan, AutocastCUDA, m) {
  autocast<at::kCUDA, c10::DispatchKey::AutocastCUDA>(m);
}

}  // namespace selected

namespace {

std::string name_of(Fetch fetch) {
  return fetch == Fetch::gathered ? "gathered" : "needed";
}

}  // namespace

Selection select_keys(const at::Tensor& q, const at::Tensor& k,
                      const at::Tensor& weights, const AttentionLayout& layout,
                      const Group& group, const SelectOptions& options) {
  auto [scores, indices] = selected::select_op().call(
      q, k, weights, selected::optional(options.start),
      selected::optional(options.end), layout_tensor(layout), options.slots,
      options.scores, options.balanced, group.name());
  return {indices, scores};
}

at::Tensor score_selected(const at::Tensor& q, const at::Tensor& k,
                          const at::Tensor& weights, const at::Tensor& indices,
                          const AttentionLayout& layout, const Group& group,
                          Fetch fetch) {
  return selected::score_op().call(q, k, weights, indices,
                                   layout_tensor(layout), name_of(fetch),
                                   group.name());
}

SelectedAnswer attend_selected(const at::Tensor& q, const at::Tensor& kv,
                               const at::Tensor& indices,
                               const AttentionLayout& layout,
                               const Group& group,
                               const SelectedOptions& options, Fetch fetch) {
  auto [out, lse] = selected::attend_op().call(
      q, kv, indices, selected::optional(options.sink), layout_tensor(layout),
      options.scale, options.value_dim, name_of(fetch), group.name());
  return {out, lse};
}

at::Tensor selected_weights(const at::Tensor& q, const at::Tensor& kv,
                            const at::Tensor& indices, const at::Tensor& lse,
                            const AttentionLayout& layout, const Group& group,
                            const SelectedOptions& options, Fetch fetch) {
  return selected::weights_op().call(
      q, kv, indices, lse, selected::optional(options.sink),
      layout_tensor(layout), options.scale, name_of(fetch), group.name());
}

}  // namespace longspan
