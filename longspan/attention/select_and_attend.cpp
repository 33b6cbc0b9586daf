#include "longspan/attention/detail/call_facts.h"
#include "longspan/attention/detail/selected_call.h"
#include "longspan/attention/selected.h"
#include "longspan/core/detail/check.h"
#include "longspan/ops/attend_selected/inputs.h"
#include "longspan/ops/checks.h"
#include "longspan/ops/partial_attention.h"
#include "longspan/ops/registering.h"
#include "longspan/ops/select_keys/inputs.h"

namespace longspan {

namespace selected {

namespace {

constexpr auto kWho = "select_and_attend";

using Tensors5 =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using Tensors6 = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor,
                            at::Tensor, at::Tensor>;

template <class Self>
auto fields_of(Self& layer) {
  return std::tie(layer.q, layer.kv, layer.index_q, layer.index_k,
                  layer.weights);
}

/// dq, dkv, dsink, and where the indexer is trained its own three, else empty.
struct SelectAndAttendBackward {
  at::Tensor dout, dscores;
  SelectedLayer layer;
  at::Tensor indices;
  OptionalTensor sink;
  at::Tensor out, lse;
  double scale = 1;
  int64_t value_dim = 0;
  bool trained = false;
  Where where = {};

  using Result = Tensors6;
  static constexpr auto kDerivativeOf = kWho;
  static constexpr auto kSchema =
      "select_and_attend_backward(Tensor dout, Tensor dscores, Tensor q, "
      "Tensor kv, Tensor index_q, Tensor index_k, Tensor weights, "
      "Tensor indices, Tensor? sink, Tensor out, Tensor lse, float scale, "
      "int value_dim, bool trained, Tensor? layout=None, "
      "str fetch=\"gathered\", str group=\"\") "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)";
  template <class Self>
  static auto fields(Self& self) {
    return std::tuple_cat(std::tie(self.dout, self.dscores),
                          fields_of(self.layer),
                          std::tie(self.indices, self.sink, self.out, self.lse,
                                   self.scale, self.value_dim, self.trained),
                          Where::fields(self.where));
  }

  template <class Run>
  auto together(const Run& run) const {
    return as_call_of(*this, layer.q, where, run);
  }
  Result run() const {
    const auto& [q, kv, index_q, index_k, weights] = layer;
    const Call call(kWho, "selected attention backward", q, where);
    const FetchedKeys fetched = call.fetched(call.with_row(indices));
    std::vector<at::Tensor> mine = {call.tokens_first(kv)};
    if (trained) mine.push_back(call.tokens_first(index_k));
    const auto keys = fetched.rows_of(mine, trained ? "all keys" : "keys");
    const auto queries = [&](const at::Tensor& t) {
      return fetched.queries(call.with_row(t));
    };
    const SelectedGradients found = attend_selected_backward(
        SelectedInputs::of(queries(q), call.grouped(keys[0], kv),
                           fetched.lists(), sink, scale, value_dim),
        queries(dout), queries(out), queries(lse));
    std::vector<at::Tensor> gradients = {found.dkv.flatten(2)};
    IndexerGradients of_index;
    if (trained) {
      of_index = score_selected_backward(
          IndexerInputs::of(queries(index_q), keys[1], queries(weights)),
          fetched.lists(), queries(dscores));
      gradients.push_back(of_index.dk);
    }
    const auto home = fetched.home(gradients, "gradients");
    const auto like_keys = [&](const at::Tensor& t, const at::Tensor& of) {
      return call.like_keys(t.to(of.scalar_type()), of);
    };
    const at::Tensor none = at::empty({0}, q.options());
    return {call.as_given(found.dq),
            like_keys(home[0], kv),
            found.dsink,
            trained ? call.as_given(of_index.dq) : none,
            trained ? like_keys(home[1], index_k) : none,
            trained ? call.as_given(of_index.dweights)
                    : none.to(weights.scalar_type())};
  }

  Result meta() const {
    const auto maybe = [&](const at::Tensor& t) {
      return trained ? empty_as(t) : at::empty({0}, t.options());
    };
    return {empty_as(layer.q),    empty_as(layer.kv),   empty_dsink(sink, lse),
            maybe(layer.index_q), maybe(layer.index_k), maybe(layer.weights)};
  }
};

/// out, lse, scores, target, indices.
struct SelectAndAttend {
  SelectedLayer layer;
  OptionalTensor start, end, sink;
  c10::SymInt slots = 0;
  double scale = 1;
  int64_t value_dim = 0;
  bool scores = false, target = false, balanced = false;
  Where where = {};

  using Result = Tensors5;
  static constexpr auto kSchema =
      "select_and_attend(Tensor q, Tensor kv, Tensor index_q, Tensor index_k, "
      "Tensor weights, Tensor? start, Tensor? end, Tensor? sink, SymInt slots, "
      "float scale, int value_dim, bool scores=False, bool target=False, "
      "bool balanced=False, Tensor? layout=None, str fetch=\"gathered\", "
      "str group=\"\") -> (Tensor, Tensor, Tensor, Tensor, Tensor)";
  template <class Self>
  static auto fields(Self& self) {
    return std::tuple_cat(
        fields_of(self.layer),
        std::tie(self.start, self.end, self.sink, self.slots, self.scale,
                 self.value_dim, self.scores, self.target, self.balanced),
        Where::fields(self.where));
  }

  void check_all() const;
  template <class Run>
  auto together(const Run& run) const {
    return as_call_of(*this, layer.q, where, run);
  }
  Result run() const;

  Result meta() const {
    const auto& q = layer.q;
    check_meta(kWho, q);
    check_all();
    const c10::SymInt none = 0;
    return {empty_out(q, value_dim), empty_sums(q, 1, {}),
            empty_sums(q, 2, {scores ? slots : none}),
            target ? empty_target(q, layer.kv, false, slots)
                   : empty_sums(q, 2, {none}),
            empty_sums(q, 2, {slots}).to(at::kInt)};
  }

  void cast(const Casts& to) {
    for (at::Tensor* t :
         {&layer.q, &layer.kv, &layer.index_q, &layer.index_k}) {
      *t = to(*t);
    }
    layer.weights = to.sums(layer.weights);
  }

  Tensors constants(const Tensors& outputs) const {
    Tensors constant = {outputs[1], outputs[3], outputs[4]};
    if (!scores) constant.push_back(outputs[2]);
    return constant;
  }
  Tensors keep(const Tensors& outputs) {
    start.reset();
    end.reset();
    return {outputs[4], outputs[0], outputs[1]};
  }
  Tensors gradients(const Tensors& kept, const Tensors& grads) const {
    const auto [dq, dkv, dsink, diq, dik, dweights] =
        Operator<SelectAndAttendBackward>::call(
            {grads[0], grads[2], layer, kept[0], sink, kept[1], kept[2], scale,
             value_dim, scores, where});
    Tensors all = {dq, dkv, {}, {}, {}, {}, {}, {}};
    if (scores) {
      all[2] = diq;
      all[3] = dik;
      all[4] = dweights;
    }
    if (sink) all[7] = dsink.to(sink->scalar_type());
    return all;
  }
};

void SelectAndAttend::check_all() const {
  const auto& [q, kv, index_q, index_k, weights] = layer;
  check(q.dim() >= 3, kWho, ": `q` is ", describe(q),
        "; expected [Tq, H, D] or [B, Tq, H, D]");
  // Lists of any keys have this shape; their values come later, and nobody
  // knows yet that there is room for so many.
  const auto lists = queries_of(q);
  auto sizes = lists.vec();
  sizes.emplace_back(1);
  const at::Tensor one = at::empty({1}, q.options().dtype(at::kInt));
  check_selected(kWho, q, kv, one.expand_symint(sizes), sink, scale, value_dim);
  check_keys(kWho, "kv", kv, q, where.layout);
  check(index_q.dim() == q.dim() && queries_of(index_q) == lists, kWho,
        ": `index_q` is ", describe(index_q), " but `q` ", describe(q),
        "; they have the same queries");
  check(index_k.dim() == q.dim() - 1 &&
            index_k.sym_size(-2) == kv.sym_size(q.dim() - 3),
        kWho, ": `index_k` is ", describe(index_k), " but `kv` ", describe(kv),
        "; they have the same tokens");
  check(index_k.scalar_type() == kv.scalar_type(), kWho, ": `index_k` is ",
        describe(index_k), " but `kv` ", describe(kv),
        "; they travel together, so they have the same type");
  check_same_device(kWho, "index_q", index_q, q);
  check_select(kWho, index_q, index_k, weights, start, end, where.layout,
               slots);
}

Tensors5 SelectAndAttend::run() const {
  check_all();
  const auto& [q, kv, index_q, index_k, weights] = layer;
  const Call call(kWho, "selected attention forward", q, where);
  const Traffic& traffic = call.traffic();
  const int64_t keys =
      where.layout ? traffic.layout->tokens() : kv.size(q.dim() - 3);
  const Windows windows = windows_of(call, kWho, q, start, end, keys);
  const bool together = call.is_gathered();
  std::vector<at::Tensor> mine = {call.tokens_first(index_k)};
  if (together) mine.push_back(call.tokens_first(kv));
  const auto all =
      gather_rows(mine, traffic, together ? "all keys" : "index keys");
  const Selection found =
      select_here(call, kWho, index_q, all[0], weights, windows,
                  slots.expect_int(), scores, balanced);
  const FetchedKeys fetched = call.fetched(found.indices);
  const at::Tensor rows =
      together ? all[1] : fetched.rows_of({call.tokens_first(kv)}, "keys")[0];
  const SelectedInputs in = SelectedInputs::of(
      fetched.queries(call.with_row(q)), call.grouped(rows, kv),
      fetched.lists(), sink, scale, value_dim);
  const PartialAttention attended = attend_selected(in);
  at::Tensor shares;
  if (!target) {
    shares =
        at::empty({1, q.size(-3) * call.rows(), 0}, attended.lse.options());
  } else {
    shares = selected_weights(in, attended.lse);
    if (kv.dim() != q.dim()) shares = shares.squeeze(-2);
  }
  return {call.as_given(attended.out), call.as_given(attended.lse),
          call.as_given(found.scores), call.as_given(shares),
          call.as_given(found.indices)};
}

TORCH_LIBRARY_FRAGMENT(longspan, m) {
  Operator<SelectAndAttend>::add_to(m);
  Operator<SelectAndAttendBackward>::add_to(m);
}

LayerAnswer run(const SelectedLayer& layer, const SelectOptions& selection,
                const SelectedOptions& attention, bool with_target,
                Where where) {
  auto [out, lse, scores, target, indices] = Operator<SelectAndAttend>::call(
      {layer, optional(selection.start), optional(selection.end),
       optional(attention.sink), selection.slots, attention.scale,
       attention.value_dim, selection.scores, with_target, selection.balanced,
       std::move(where)});
  return {out, lse, indices, scores, target};
}

}  // namespace

}  // namespace selected

using selected::Where;

LayerAnswer select_and_attend(const SelectedLayer& layer,
                              const SelectOptions& selection,
                              const SelectedOptions& attention,
                              bool with_target) {
  return selected::run(layer, selection, attention, with_target, {});
}

LayerAnswer select_and_attend(const SelectedLayer& layer,
                              const AttentionLayout& layout, const Group& group,
                              const SelectOptions& selection,
                              const SelectedOptions& attention, Fetch fetch,
                              bool with_target) {
  return selected::run(layer, selection, attention, with_target,
                       Where::of(layout, group, fetch));
}

}  // namespace longspan
