#include "longspan/attention/selected_run.h"

#include <ATen/ATen.h>

#include "longspan/attention/selected_call.h"
#include "longspan/core/check.h"
#include "longspan/ops/attend_selected/inputs.h"
#include "longspan/ops/checks.h"
#include "longspan/ops/partial_attention.h"
#include "longspan/ops/select_keys/inputs.h"

namespace longspan::selected {

namespace {

/// [Tq] or [B, Tq].
at::IntArrayRef queries_of(const at::Tensor& q) {
  return q.sizes().slice(0, static_cast<std::size_t>(q.dim() - 2));
}

SelectedOptions options_of(const OptionalTensor& sink, double scale,
                           int64_t value_dim) {
  return {.scale = scale,
          .value_dim = value_dim,
          .sink = sink.value_or(at::Tensor())};
}

}  // namespace

void check_meta(const char* who, const at::Tensor& q) {
  check(q.is_meta(), who, ": `layout` is on meta, which holds no values; ",
        "keep what attention_layout made on the CPU");
}

void check_keys(const char* who, const char* name, const at::Tensor& k,
                const at::Tensor& q, const OptionalTensor& layout) {
  const auto tokens = k.sym_size(q.dim() - 3);
  check(!layout || tokens == q.sym_size(-3), who, ": `", name, "` is ",
        describe(k), " but `q` ", describe(q),
        "; each rank brings the keys of its own tokens");
}

void check_select(const char* who, const at::Tensor& q, const at::Tensor& k,
                  const at::Tensor& weights, const OptionalTensor& start,
                  const OptionalTensor& end, const OptionalTensor& layout,
                  const c10::SymInt& slots) {
  check_indexer(who, q, k, weights);
  check_slots(who, slots);
  check(start.has_value() == end.has_value(), who,
        ": one of `start` and `end` is missing; give both or none");
  if (start) {
    const auto queries =
        q.sym_sizes().slice(0, static_cast<std::size_t>(q.dim() - 2));
    check_window(who, "start", *start, queries, q.device());
    check_window(who, "end", *end, queries, q.device());
  }
  check_keys(who, "k", k, q, layout);
}

void check_score(const at::Tensor& q, const at::Tensor& k,
                 const at::Tensor& weights, const at::Tensor& indices,
                 const OptionalTensor& layout) {
  const char* const who = "score_selected";
  check_indexer(who, q, k, weights);
  check_keys(who, "k", k, q, layout);
  const auto type = indices.scalar_type();
  const auto queries = static_cast<std::size_t>(q.dim() - 2);
  check((type == at::kInt || type == at::kLong) &&
            indices.dim() == q.dim() - 1 &&
            indices.sym_sizes().slice(0, queries) ==
                q.sym_sizes().slice(0, queries),
        who, ": `indices` is ", describe(indices), " but `q` ", describe(q),
        "; expected int32 or int64 [Tq, slots] after as many rows");
  check_same_device(who, "indices", indices, q);
}

void check_weights(const at::Tensor& q, const at::Tensor& kv,
                   const at::Tensor& indices, const at::Tensor& lse,
                   const OptionalTensor& sink, const OptionalTensor& layout,
                   double scale) {
  const char* const who = "selected_weights";
  check_selected(who, q, kv, indices, sink, scale, 0);
  check_keys(who, "kv", kv, q, layout);
  const auto heads = static_cast<std::size_t>(q.dim() - 1);
  check(lse.sym_sizes() == q.sym_sizes().slice(0, heads) &&
            lse.scalar_type() == accumulation_type(q.scalar_type()),
        who, ": `lse` is ", describe(lse), " but `q` ", describe(q),
        "; expected what attend_selected returned");
  check_same_device(who, "lse", lse, q);
}

void check_layer(const at::Tensor& q, const at::Tensor& kv,
                 const at::Tensor& index_q, const at::Tensor& index_k,
                 const at::Tensor& weights, const OptionalTensor& start,
                 const OptionalTensor& end, const OptionalTensor& sink,
                 const OptionalTensor& layout, const c10::SymInt& slots,
                 double scale, int64_t value_dim) {
  const char* const who = "select_and_attend";
  check(q.dim() >= 3, who, ": `q` is ", describe(q),
        "; expected [Tq, H, D] or [B, Tq, H, D]");
  // Lists of any keys have this shape; their values come later.
  auto lists = q.sym_sizes().slice(0, static_cast<std::size_t>(q.dim() - 2));
  auto sizes = lists.vec();
  sizes.emplace_back(1);
  check_selected(who, q, kv,
                 at::empty_symint(sizes, q.options().dtype(at::kInt)), sink,
                 scale, value_dim);
  check_keys(who, "kv", kv, q, layout);
  check(index_q.dim() == q.dim() &&
            index_q.sym_sizes().slice(0, lists.size()) == lists,
        who, ": `index_q` is ", describe(index_q), " but `q` ", describe(q),
        "; they have the same queries");
  check(index_k.dim() == q.dim() - 1 &&
            index_k.sym_size(-2) == kv.sym_size(q.dim() - 3),
        who, ": `index_k` is ", describe(index_k), " but `kv` ", describe(kv),
        "; they have the same tokens");
  check(index_k.scalar_type() == kv.scalar_type(), who, ": `index_k` is ",
        describe(index_k), " but `kv` ", describe(kv),
        "; they travel together, so they have the same type");
  check_same_device(who, "index_q", index_q, q);
  check_select(who, index_q, index_k, weights, start, end, layout, slots);
}

Tensors2 select(const at::Tensor& q, const at::Tensor& k,
                const at::Tensor& weights, const OptionalTensor& start,
                const OptionalTensor& end, const OptionalTensor& layout,
                int64_t slots, bool scores, bool balanced,
                const std::string& group) {
  const char* const who = "select_keys";
  check_select(who, q, k, weights, start, end, layout, slots);
  const Call call(who, "selection of keys", q, layout, group);
  const int64_t keys = layout ? call.traffic().layout->tokens() : k.size(-2);
  const Windows windows = windows_of(call, who, q, start, end, keys);
  const auto all =
      gather_rows({call.tokens_first(k)}, call.traffic(), "index keys");
  const Selection found = select_here(call, who, q, all[0], weights, windows,
                                      slots, scores, balanced);
  return {call.as_given(found.scores, queries_of(q)),
          call.as_given(found.indices, queries_of(q))};
}

at::Tensor score(const at::Tensor& q, const at::Tensor& k,
                 const at::Tensor& weights, const at::Tensor& indices,
                 const OptionalTensor& layout, const std::string& fetch,
                 const std::string& group) {
  const char* const who = "score_selected";
  check_score(q, k, weights, indices, layout);
  const Fetch how = fetch_named(who, fetch);
  const Call call(who, "scores of selected keys", q, layout, group);
  const FetchedKeys fetched(call.with_row(indices), how, call.traffic());
  const auto keys = fetched.rows_of({call.tokens_first(k)}, "index keys");
  const at::Tensor scores =
      score_selected(fetched.queries(call.with_row(q)), keys[0],
                     fetched.queries(call.with_row(weights)), fetched.lists());
  return call.as_given(scores, queries_of(q));
}

Tensors3 score_backward(const at::Tensor& dscores, const at::Tensor& q,
                        const at::Tensor& k, const at::Tensor& weights,
                        const at::Tensor& indices, const OptionalTensor& layout,
                        const std::string& fetch, const std::string& group) {
  const char* const who = "score_selected";
  const Fetch how = fetch_named(who, fetch);
  const Call call(who, "scores of selected keys backward", q, layout, group);
  const FetchedKeys fetched(call.with_row(indices), how, call.traffic());
  const auto keys = fetched.rows_of({call.tokens_first(k)}, "index keys");
  const auto queries = [&](const at::Tensor& t) {
    return fetched.queries(call.with_row(t));
  };
  const auto [dq, dk, dweights] = exact_score_backward(
      queries(dscores), queries(q), keys[0], queries(weights), fetched.lists());
  const auto home = fetched.home({dk}, "gradients");
  return {call.as_given(dq, queries_of(q)), call.like_keys(home[0], k),
          call.as_given(dweights, queries_of(q))};
}

Tensors2 attend(const at::Tensor& q, const at::Tensor& kv,
                const at::Tensor& indices, const OptionalTensor& sink,
                const OptionalTensor& layout, double scale, int64_t value_dim,
                const std::string& fetch, const std::string& group) {
  const char* const who = "attend_selected";
  check_selected(who, q, kv, indices, sink, scale, value_dim);
  check_keys(who, "kv", kv, q, layout);
  const Fetch how = fetch_named(who, fetch);
  const Call call(who, "selected attention forward", q, layout, group);
  const FetchedKeys fetched(call.with_row(indices), how, call.traffic());
  const auto keys = fetched.rows_of({call.tokens_first(kv)}, "keys");
  const auto [out, lse] = attend_selected(
      fetched.queries(call.with_row(q)), call.grouped(keys[0], kv),
      fetched.lists(), options_of(sink, scale, value_dim));
  return {call.as_given(out, queries_of(q)), call.as_given(lse, queries_of(q))};
}

Tensors3 attend_backward(const at::Tensor& dout, const at::Tensor& q,
                         const at::Tensor& kv, const at::Tensor& indices,
                         const OptionalTensor& sink, const at::Tensor& out,
                         const at::Tensor& lse, const OptionalTensor& layout,
                         double scale, int64_t value_dim,
                         const std::string& fetch, const std::string& group) {
  const char* const who = "attend_selected";
  const Fetch how = fetch_named(who, fetch);
  const Call call(who, "selected attention backward", q, layout, group);
  const FetchedKeys fetched(call.with_row(indices), how, call.traffic());
  const auto keys = fetched.rows_of({call.tokens_first(kv)}, "keys");
  const auto queries = [&](const at::Tensor& t) {
    return fetched.queries(call.with_row(t));
  };
  const SelectedGradients found = attend_selected_backward(
      queries(dout), queries(q), call.grouped(keys[0], kv), fetched.lists(),
      queries(out), queries(lse), options_of(sink, scale, value_dim),
      /*exact_dkv=*/true);
  const auto home = fetched.home({found.dkv.flatten(2)}, "gradients");
  return {call.as_given(found.dq, queries_of(q)), call.like_keys(home[0], kv),
          found.dsink};
}

at::Tensor weights(const at::Tensor& q, const at::Tensor& kv,
                   const at::Tensor& indices, const at::Tensor& lse,
                   const OptionalTensor& sink, const OptionalTensor& layout,
                   double scale, const std::string& fetch,
                   const std::string& group) {
  const char* const who = "selected_weights";
  check_weights(q, kv, indices, lse, sink, layout, scale);
  const Fetch how = fetch_named(who, fetch);
  const Call call(who, "weights of selected keys", q, layout, group);
  const FetchedKeys fetched(call.with_row(indices), how, call.traffic());
  const auto keys = fetched.rows_of({call.tokens_first(kv)}, "keys");
  const at::Tensor shares = selected_weights(
      fetched.queries(call.with_row(q)), call.grouped(keys[0], kv),
      fetched.lists(), fetched.queries(call.with_row(lse)),
      options_of(sink, scale, 0));
  return call.as_given(shares, queries_of(q));
}

Tensors5 layer(const at::Tensor& q, const at::Tensor& kv,
               const at::Tensor& index_q, const at::Tensor& index_k,
               const at::Tensor& weights, const OptionalTensor& start,
               const OptionalTensor& end, const OptionalTensor& sink,
               const OptionalTensor& layout, int64_t slots, double scale,
               int64_t value_dim, bool scores, bool target, bool balanced,
               const std::string& fetch, const std::string& group) {
  const char* const who = "select_and_attend";
  check_layer(q, kv, index_q, index_k, weights, start, end, sink, layout, slots,
              scale, value_dim);
  const Fetch how = fetch_named(who, fetch);
  const Call call(who, "selected attention forward", q, layout, group);
  const Traffic& traffic = call.traffic();
  const int64_t keys = layout ? traffic.layout->tokens() : kv.size(q.dim() - 3);
  const Windows windows = windows_of(call, who, q, start, end, keys);
  const bool together = how == Fetch::gathered || traffic.group.size() == 1;
  std::vector<at::Tensor> mine = {call.tokens_first(index_k)};
  if (together) mine.push_back(call.tokens_first(kv));
  const auto all =
      gather_rows(mine, traffic, together ? "all keys" : "index keys");
  const Selection found = select_here(call, who, index_q, all[0], weights,
                                      windows, slots, scores, balanced);
  const FetchedKeys fetched(found.indices, how, traffic);
  const at::Tensor rows =
      together ? all[1] : fetched.rows_of({call.tokens_first(kv)}, "keys")[0];
  const auto queries = [&](const at::Tensor& t) {
    return fetched.queries(call.with_row(t));
  };
  const at::Tensor kv_rows = call.grouped(rows, kv);
  const SelectedOptions options = options_of(sink, scale, value_dim);
  const auto [out, lse] =
      attend_selected(queries(q), kv_rows, fetched.lists(), options);
  const at::Tensor shares =
      target
          ? selected_weights(queries(q), kv_rows, fetched.lists(), lse, options)
          : at::empty({1, q.size(-3) * call.rows(), 0}, lse.options());
  const auto given = [&](const at::Tensor& t) {
    return call.as_given(t, queries_of(q));
  };
  return {given(out), given(lse), given(found.scores), given(shares),
          given(found.indices)};
}

Tensors6 layer_backward(const at::Tensor& dout, const at::Tensor& dscores,
                        const at::Tensor& q, const at::Tensor& kv,
                        const at::Tensor& index_q, const at::Tensor& index_k,
                        const at::Tensor& weights, const at::Tensor& indices,
                        const OptionalTensor& sink, const at::Tensor& out,
                        const at::Tensor& lse, const OptionalTensor& layout,
                        double scale, int64_t value_dim, bool trained,
                        const std::string& fetch, const std::string& group) {
  const char* const who = "select_and_attend";
  const Fetch how = fetch_named(who, fetch);
  const Call call(who, "selected attention backward", q, layout, group);
  const FetchedKeys fetched(call.with_row(indices), how, call.traffic());
  std::vector<at::Tensor> mine = {call.tokens_first(kv)};
  if (trained) mine.push_back(call.tokens_first(index_k));
  const auto keys = fetched.rows_of(mine, trained ? "all keys" : "keys");
  const auto queries = [&](const at::Tensor& t) {
    return fetched.queries(call.with_row(t));
  };
  const SelectedGradients found = attend_selected_backward(
      queries(dout), queries(q), call.grouped(keys[0], kv), fetched.lists(),
      queries(out), queries(lse), options_of(sink, scale, value_dim),
      /*exact_dkv=*/true);
  std::vector<at::Tensor> gradients = {found.dkv.flatten(2)};
  at::Tensor diq, dik, dweights;
  if (trained) {
    std::tie(diq, dik, dweights) =
        exact_score_backward(queries(dscores), queries(index_q), keys[1],
                             queries(weights), fetched.lists());
    gradients.push_back(dik);
  }
  const auto home = fetched.home(gradients, "gradients");
  const auto given = [&](const at::Tensor& t) {
    return call.as_given(t, queries_of(q));
  };
  const at::Tensor none = at::empty({0}, q.options());
  return {given(found.dq),
          call.like_keys(home[0], kv),
          found.dsink,
          trained ? given(diq) : none,
          trained ? call.like_keys(home[1], index_k) : none,
          trained ? given(dweights) : none.to(weights.scalar_type())};
}

}  // namespace longspan::selected
