#include "longspan/attention/detail/select_keys.h"
#include "longspan/attention/detail/call_facts.h"

#include "longspan/attention/attend.h"
#include "longspan/attention/selected.h"
#include "longspan/core/detail/check.h"
#include "longspan/ops/attend_selected/inputs.h"
#include "longspan/ops/checks.h"
#include "longspan/ops/partial_attention.h"
#include "longspan/ops/select_keys/inputs.h"

namespace longspan {

namespace selected {

namespace {

void check_score(const at::Tensor& q, const at::Tensor& k,
                 const at::Tensor& weights, const at::Tensor& indices,
                 const OptionalTensor& layout) {
  const char* const who = "score_selected";
  check_indexer(who, q, k, weights);
  check_keys(who, "k", k, q, layout);
  check_listed(who, q, indices);
}

/// dq, dk and dweights of given scores.
struct ScoreSelectedBackward {
  at::Tensor dscores, q, k, weights, indices;
  bool exact_dk = false;  ///< dk in the accumulation type
  Where where = {};

  using Result = Tensors3;
  static constexpr auto kDerivativeOf = "score_selected";
  static constexpr auto kSchema =
      "score_selected_backward(Tensor dscores, Tensor q, Tensor k, "
      "Tensor weights, Tensor indices, bool exact_dk=False, "
      "Tensor? layout=None, str fetch=\"gathered\", str group=\"\") "
      "-> (Tensor, Tensor, Tensor)";
  template <class Self>
  static auto fields(Self& self) {
    return std::tuple_cat(std::tie(self.dscores, self.q, self.k, self.weights,
                                   self.indices, self.exact_dk),
                          Where::fields(self.where));
  }

  void check_all() const {
    check_score(q, k, weights, indices, where.layout);
    check_like("score_selected_backward", "dscores", dscores,
               indices.sym_sizes(), accumulation_type(q.scalar_type()), q);
  }

  template <class Run>
  auto together(const Run& run) const {
    return as_call_of(*this, q, where, run);
  }
  Result run() const {
    check_all();
    const auto dk_type =
        exact_dk ? accumulation_type(k.scalar_type()) : k.scalar_type();
    if (where.is_here(kDerivativeOf)) {
      const IndexerGradients found =
          score_selected_backward(IndexerInputs::of(q, k, weights),
                                  with_row(q, indices), with_row(q, dscores));
      return {found.dq.reshape(q.sizes()),
              found.dk.to(dk_type).reshape(k.sizes()),
              found.dweights.reshape(weights.sizes())};
    }
    const Call call(kDerivativeOf, "scores of selected keys backward", q,
                    where);
    const FetchedKeys fetched = call.fetched(call.with_row(indices));
    const auto keys = fetched.rows_of({call.tokens_first(k)}, "index keys");
    const auto queries = [&](const at::Tensor& t) {
      return fetched.queries(call.with_row(t));
    };
    const IndexerGradients found = score_selected_backward(
        IndexerInputs::of(queries(q), keys[0], queries(weights)),
        fetched.lists(), queries(dscores));
    const auto home = fetched.home({found.dk}, "gradients");
    return {call.as_given(found.dq), call.like_keys(home[0].to(dk_type), k),
            call.as_given(found.dweights)};
  }

  Result meta() const {
    check_all();
    return {empty_as(q), exact_dk ? empty_sums(k, 0, {}) : empty_as(k),
            empty_as(weights)};
  }
};

struct SelectKeys {
  at::Tensor q, k, weights;
  OptionalTensor start, end;
  c10::SymInt slots = 0;
  bool scores = false;
  bool balanced = false;
  Where where = {};

  using Result = Tensors2;
  static constexpr auto kSchema =
      "select_keys(Tensor q, Tensor k, Tensor weights, Tensor? start, "
      "Tensor? end, SymInt slots, bool scores, bool balanced=False, "
      "Tensor? layout=None, str group=\"\") -> (Tensor, Tensor)";
  template <class Self>
  static auto fields(Self& self) {
    return std::tie(self.q, self.k, self.weights, self.start, self.end,
                    self.slots, self.scores, self.balanced, self.where.layout,
                    self.where.group);
  }
  static constexpr auto kWho = "select_keys";

  template <class Run>
  auto together(const Run& run) const {
    return as_call_of(*this, q, where, run);
  }
  Result run() const {
    check_select(kWho, q, k, weights, start, end, where.layout, slots);
    const int64_t count = slots.expect_int();
    if (where.is_here(kWho)) {
      const Selection found =
          select_keys(IndexerInputs::of(q, k, weights),
                      start ? KeyWindows{with_row(q, *start), with_row(q, *end)}
                            : causal_windows(kWho, q, k.size(-2)),
                      count, scores);
      return {without_row(q, found.scores), without_row(q, found.indices)};
    }
    const Call call(kWho, "selection of keys", q, where);
    const Windows windows =
        windows_of(call, kWho, q, start, end, call.traffic().layout->tokens());
    const auto all =
        gather_rows({call.tokens_first(k)}, call.traffic(), "index keys");
    const Selection found = select_here(call, kWho, q, all[0], weights, windows,
                                        count, scores, balanced);
    return {call.as_given(found.scores), call.as_given(found.indices)};
  }

  Result meta() const {
    check_select(kWho, q, k, weights, start, end, where.layout, slots);
    check_meta(kWho, q);
    return {empty_sums(q, 2, {scores ? slots : c10::SymInt(0)}),
            empty_sums(q, 2, {slots}).to(at::kInt)};
  }

  void cast(const Casts& to) {
    q = to(q);
    k = to(k);
    weights = to.sums(weights);
  }

  Tensors constants(const Tensors& outputs) const {
    return scores ? Tensors{outputs[1]} : outputs;
  }
  Tensors keep(const Tensors& outputs) {
    start.reset();
    end.reset();
    return {outputs[1]};
  }
  Tensors gradients(const Tensors& kept, const Tensors& grads) const {
    return listed(Operator<ScoreSelectedBackward>::call(
        {grads[0], q, k, weights, kept[0], false, where}));
  }
};

}  // namespace

at::Tensor ScoreSelected::run() const {
  const char* const who = "score_selected";
  check_score(q, k, weights, indices, where.layout);
  if (where.is_here(who)) {
    return without_row(q, score_selected(IndexerInputs::of(q, k, weights),
                                         with_row(q, indices)));
  }
  const Call call(who, "scores of selected keys", q, where);
  const FetchedKeys fetched = call.fetched(call.with_row(indices));
  const auto keys = fetched.rows_of({call.tokens_first(k)}, "index keys");
  return call.as_given(score_selected(
      IndexerInputs::of(fetched.queries(call.with_row(q)), keys[0],
                        fetched.queries(call.with_row(weights))),
      fetched.lists()));
}

at::Tensor ScoreSelected::meta() const {
  check_score(q, k, weights, indices, where.layout);
  check_meta("score_selected", q);
  return empty_sums(q, 2, {indices.sym_size(-1)});
}

void ScoreSelected::cast(const Casts& to) {
  q = to(q);
  k = to(k);
  weights = to.sums(weights);
}

Tensors ScoreSelected::keep(const Tensors& /*outputs*/) const {
  return {};
}

Tensors ScoreSelected::gradients(const Tensors& /*kept*/,
                                 const Tensors& grads) const {
  return listed(Operator<ScoreSelectedBackward>::call(
      {grads[0], q, k, weights, indices, false, where}));
}

TORCH_LIBRARY_FRAGMENT(longspan, m) {
  Operator<SelectKeys>::add_to(m);
  Operator<ScoreSelected>::add_to(m);
  Operator<ScoreSelectedBackward>::add_to(m);
}

}  // namespace selected

using selected::Where;

namespace {

Selection select(const at::Tensor& q, const at::Tensor& k,
                 const at::Tensor& weights, const SelectOptions& options,
                 Where where) {
  auto [scores, indices] = Operator<selected::SelectKeys>::call(
      {q, k, weights, optional(options.start), optional(options.end),
       options.slots, options.scores, options.balanced, std::move(where)});
  return {indices, scores};
}

}  // namespace

Selection select_keys(const at::Tensor& q, const at::Tensor& k,
                      const at::Tensor& weights, const SelectOptions& options) {
  return select(q, k, weights, options, {});
}

Selection select_keys(const at::Tensor& q, const at::Tensor& k,
                      const at::Tensor& weights, const AttentionLayout& layout,
                      const Group& group, const SelectOptions& options) {
  return select(q, k, weights, options, Where::of(layout, group));
}

at::Tensor score_selected(const at::Tensor& q, const at::Tensor& k,
                          const at::Tensor& weights,
                          const at::Tensor& indices) {
  return Operator<selected::ScoreSelected>::call({q, k, weights, indices});
}

at::Tensor score_selected(const at::Tensor& q, const at::Tensor& k,
                          const at::Tensor& weights, const at::Tensor& indices,
                          const AttentionLayout& layout, const Group& group,
                          Fetch fetch) {
  return Operator<selected::ScoreSelected>::call(
      {q, k, weights, indices, Where::of(layout, group, fetch)});
}

}  // namespace longspan
