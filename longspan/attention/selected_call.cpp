#include "longspan/attention/detail/selected_call.h"

#include <ATen/ATen.h>

#include <limits>

#include "longspan/attention/attend.h"
#include "longspan/attention/detail/call_facts.h"
#include "longspan/attention/detail/selected_work.h"
#include "longspan/core/detail/check.h"
#include "longspan/core/detail/even_pieces.h"
#include "longspan/ops/checks.h"
#include "longspan/ops/select_keys/inputs.h"

namespace longspan::selected {

std::string layout_facts(const char* who, const at::Tensor& layout,
                         const Group& group) {
  return RankLayout::of(who, layout, group)->words();
}

namespace {

/// Pieces with even work under windows that only their owners know: the lengths
/// are gathered, and the host waits for them.
std::vector<TokenRange> even_pieces_of(const Call& call,
                                       const KeyWindows& windows) {
  const at::Tensor lengths = (windows.end - windows.begin)
                                 .clamp_min(0)
                                 .sum(at::IntArrayRef({0}), false, at::kLong);
  const at::Tensor sums =
      gather_stream(lengths, call.traffic(), "lengths of windows")
          .cumsum(0)
          .cpu()
          .contiguous();
  return even_pieces(std::span(sums.const_data_ptr<int64_t>(),
                               static_cast<std::size_t>(sums.numel())),
                     call.traffic().group.size());
}

}  // namespace

Where Where::of(const AttentionLayout& layout, const Group& group,
                Fetch fetch) {
  return {layout_tensor(layout), name_of(fetch), group.name()};
}

bool Where::is_here(const char* who) const {
  fetch_named(who, fetch);
  if (layout) return false;
  if (!group.empty()) {
    const int ranks = Group::named(group).size();
    check(ranks == 1, who, ": ", ranks,
          " ranks need to know who owns what; give `layout`");
  }
  return true;
}

void check_meta(const char* who, const at::Tensor& q) {
  check(q.is_meta(), who, ": `layout` is on meta, which holds no values; ",
        "keep the tensor of an AttentionLayout on the CPU");
}

void check_keys(const char* who, const char* name, const at::Tensor& k,
                const at::Tensor& q, const OptionalTensor& layout) {
  if (!layout) return;
  check(k.sym_size(q.dim() - 3) == q.sym_size(-3), who, ": `", name, "` is ",
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
    check_window(who, "start", *start, queries_of(q), q.device());
    check_window(who, "end", *end, queries_of(q), q.device());
  }
  check_keys(who, "k", k, q, layout);
}

Call::Call(const char* who, const std::string& purpose, const at::Tensor& q,
           const Where& where)
    : q_(q),
      traffic_{Group::named(where.group), nullptr, purpose},
      fetch_(fetch_named(who, where.fetch)) {
  if (where.is_here(who)) return;
  const Group& ranks = traffic_.group;
  traffic_.layout = RankLayout::of(who, *where.layout, ranks);
  check(traffic_.layout->tokens() < std::numeric_limits<int32_t>::max(), who,
        ": the stream has ", traffic_.layout->tokens(),
        " tokens; keys are counted in 32 bits");
  const int64_t held = traffic_.layout->local_tokens();
  check(q.size(-3) == held, who, ": `q` is ", describe(q), " but rank ",
        ranks.rank(), " holds ", held, " tokens");
}

at::Tensor Call::as_given(const at::Tensor& t) const {
  auto sizes = q_.sizes().slice(0, q_.sizes().size() - 2).vec();
  const auto rest = t.sizes().slice(2);
  sizes.insert(sizes.end(), rest.begin(), rest.end());
  return t.reshape(sizes).contiguous();
}

at::Tensor Call::tokens_first(const at::Tensor& keys) const {
  const at::Tensor rows = with_row(keys);
  return (rows.dim() == 4 ? rows.flatten(2) : rows).transpose(0, 1);
}

at::Tensor Call::like_keys(const at::Tensor& tokens,
                           const at::Tensor& keys) const {
  return tokens.transpose(0, 1).reshape(keys.sizes()).contiguous();
}

at::Tensor Call::grouped(const at::Tensor& rows, const at::Tensor& kv) const {
  return kv.dim() == q_.dim() ? rows.unflatten(-1, {kv.size(-2), kv.size(-1)})
                              : rows;
}

KeyWindows causal_windows(const char* who, const at::Tensor& q, int64_t keys) {
  check(q.size(-3) == keys, who, ": `q` is ", describe(q), " over ", keys,
        " keys; without `start` and `end` each query has its own key");
  const at::Tensor place = at::arange(keys, q.options().dtype(at::kInt))
                               .expand({q.dim() == 4 ? q.size(0) : 1, keys});
  return {at::zeros_like(place), place + 1};
}

Windows windows_of(const Call& call, const char* who, const at::Tensor& q,
                   const OptionalTensor& start, const OptionalTensor& end,
                   int64_t keys) {
  if (start) {
    return {{as_window(call.with_row(*start), keys),
             as_window(call.with_row(*end), keys)},
            true};
  }
  const auto& layout = call.traffic().layout;
  return {layout != nullptr ? layout->windows(who, call.rows(), q.device())
                            : causal_windows(who, q, keys)};
}

Selection select_here(const Call& call, const char* who, const at::Tensor& q,
                      const at::Tensor& all_keys, const at::Tensor& weights,
                      const Windows& windows, int64_t slots, bool scores,
                      bool balanced) {
  const Traffic& traffic = call.traffic();
  const at::Tensor q_in = call.with_row(q), w_in = call.with_row(weights);
  if (!balanced || traffic.group.size() == 1) {
    return select_keys(IndexerInputs::of(q_in, all_keys, w_in), windows.borders,
                       slots, scores);
  }
  const auto swapped = [](const at::Tensor& t) { return t.transpose(0, 1); };
  const WorkTrade trade(
      traffic, windows.came ? even_pieces_of(call, windows.borders)
                            : traffic.layout->even_pieces(q_in.size(0)));
  std::vector<at::Tensor> leaving = {swapped(q_in), swapped(w_in)};
  if (windows.came) {
    leaving.push_back(swapped(windows.borders.begin));
    leaving.push_back(swapped(windows.borders.end));
  }
  const auto work = trade.to_workers(leaving, "index queries");
  const KeyWindows borders =
      windows.came ? KeyWindows{swapped(work[2]), swapped(work[3])}
                   : traffic.layout->windows(who, trade.queries(), call.rows(),
                                             q.device());
  const Selection found = select_keys(
      IndexerInputs::of(swapped(work[0]), all_keys, swapped(work[1])), borders,
      slots, scores);
  const auto owned = trade.to_owners(
      {swapped(found.indices), swapped(found.scores)}, "selections");
  return {swapped(owned[0]), swapped(owned[1])};
}

}  // namespace longspan::selected
