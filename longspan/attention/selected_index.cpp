#include "longspan/attention/selected.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "longspan/attention/attend.h"
#include "longspan/attention/selected_run.h"
#include "longspan/ops/registering.h"

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
  check_score(q, k, weights, indices, layout);
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

}  // namespace

TORCH_LIBRARY_FRAGMENT(longspan, m) {
  m.def(
      "select_keys_ranks(Tensor q, Tensor k, Tensor weights, Tensor? start, "
      "Tensor? end, Tensor? layout, SymInt slots, bool scores, "
      "bool balanced, str group) -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "score_selected_ranks(Tensor q, Tensor k, Tensor weights, "
      "Tensor indices, Tensor? layout, str fetch, str group) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "score_selected_ranks_backward(Tensor dscores, Tensor q, Tensor k, "
      "Tensor weights, Tensor indices, Tensor? layout, str fetch, "
      "str group) -> (Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(longspan, Meta, m) {
  m.impl("select_keys_ranks", select_meta);
  m.impl("score_selected_ranks", score_meta);
  m.impl("score_selected_ranks_backward", score_backward_meta);
}
TORCH_LIBRARY_IMPL(longspan, CompositeExplicitAutograd, m) {
  m.impl("select_keys_ranks", select);
  m.impl("score_selected_ranks", score);
  m.impl("score_selected_ranks_backward", score_backward);
}
TORCH_LIBRARY_IMPL(longspan, Autograd, m) {
  m.impl("select_keys_ranks", select_autograd);
  m.impl("score_selected_ranks", score_autograd);
  m.impl("score_selected_ranks_backward", score_backward_autograd);
}
TORCH_LIBRARY_IMPL(longspan, AutocastCPU, m) {
  m.impl("select_keys_ranks",
         select_autocast<at::kCPU, c10::DispatchKey::AutocastCPU>);
  m.impl("score_selected_ranks",
         score_autocast<at::kCPU, c10::DispatchKey::AutocastCPU>);
}
TORCH_LIBRARY_IMPL(longspan, AutocastCUDA, m) {
  m.impl("select_keys_ranks",
         select_autocast<at::kCUDA, c10::DispatchKey::AutocastCUDA>);
  m.impl("score_selected_ranks",
         score_autocast<at::kCUDA, c10::DispatchKey::AutocastCUDA>);
}

}  // namespace selected

Selection select_keys(const at::Tensor& q, const at::Tensor& k,
                      const at::Tensor& weights, const AttentionLayout& layout,
                      const Group& group, const SelectOptions& options) {
  auto [scores, indices] = selected::select_op().call(
      q, k, weights, optional(options.start), optional(options.end),
      layout_tensor(layout), options.slots, options.scores, options.balanced,
      group.name());
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

}  // namespace longspan
