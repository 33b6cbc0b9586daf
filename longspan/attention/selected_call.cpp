#include "longspan/attention/selected_call.h"

#include <ATen/ATen.h>

#include <limits>

#include "longspan/attention/selected_work.h"
#include "longspan/core/check.h"
#include "longspan/core/even_pieces.h"
#include "longspan/ops/checks.h"
#include "longspan/ops/registering.h"
#include "longspan/ops/select_keys/inputs.h"

namespace longspan::selected {

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

Call::Call(const char* who, const std::string& purpose, const at::Tensor& q,
           const OptionalTensor& layout, const std::string& group)
    : traffic_{Group::named(group), nullptr, purpose},
      has_rows_(q.dim() == 4),
      rows_(has_rows_ ? q.size(0) : 1) {
  const Group& ranks = traffic_.group;
  if (!layout) {
    check(ranks.size() == 1, who, ": ", ranks.size(),
          " ranks need an ownership; give `ownership` or `layout`");
    return;
  }
  traffic_.layout = RankLayout::of(who, *layout, ranks);
  check(traffic_.layout->tokens() < std::numeric_limits<int32_t>::max(), who,
        ": the stream has ", traffic_.layout->tokens(),
        " tokens; keys are counted in 32 bits");
  const int64_t held = traffic_.layout->local_tokens();
  check(q.size(-3) == held, who, ": `q` is ", describe(q), " but rank ",
        ranks.rank(), " holds ", held, " tokens");
}

at::Tensor Call::as_given(const at::Tensor& t, at::IntArrayRef queries) const {
  auto sizes = queries.vec();
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
  return tokens.transpose(0, 1)
      .to(keys.scalar_type())
      .reshape(keys.sizes())
      .contiguous();
}

at::Tensor Call::grouped(const at::Tensor& rows, const at::Tensor& kv) const {
  const bool has_groups = kv.dim() == (has_rows_ ? 4 : 3);
  return has_groups ? rows.unflatten(-1, {kv.size(-2), kv.size(-1)}) : rows;
}

Windows windows_of(const Call& call, const char* who, const at::Tensor& q,
                   const OptionalTensor& start, const OptionalTensor& end,
                   int64_t keys) {
  const auto& layout = call.traffic().layout;
  if (start) {
    return {{as_window(call.with_row(*start), keys),
             as_window(call.with_row(*end), keys)},
            true};
  }
  if (layout != nullptr) {
    return {layout->windows(who, call.rows(), q.device())};
  }
  check(q.size(-3) == keys, who, ": `q` is ", describe(q), " over ", keys,
        " keys; without `start` and `end` each query has its own key");
  const auto ints = q.options().dtype(at::kInt);
  const at::Tensor place = at::arange(keys, ints).expand({call.rows(), keys});
  return {{at::zeros_like(place), place + 1}};
}

Selection select_here(const Call& call, const char* who, const at::Tensor& q,
                      const at::Tensor& all_keys, const at::Tensor& weights,
                      const Windows& windows, int64_t slots, bool scores,
                      bool balanced) {
  const Traffic& traffic = call.traffic();
  const at::Tensor q_in = call.with_row(q), w_in = call.with_row(weights);
  if (!balanced || traffic.group.size() == 1) {
    return select_keys(q_in, all_keys, w_in, windows.borders.begin,
                       windows.borders.end, slots, scores);
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
  const Selection found =
      select_keys(swapped(work[0]), all_keys, swapped(work[1]), borders.begin,
                  borders.end, slots, scores);
  const auto owned = trade.to_owners(
      {swapped(found.indices), swapped(found.scores)}, "selections");
  return {swapped(owned[0]), swapped(owned[1])};
}

Tensors3 exact_score_backward(const at::Tensor& dscores, const at::Tensor& q,
                              const at::Tensor& k, const at::Tensor& weights,
                              const at::Tensor& indices) {
  static const auto op =
      find_op<Tensors3(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                       const at::Tensor&, const at::Tensor&, bool)>(
          "longspan::score_selected_backward");
  return op.call(dscores, q, k, weights, indices, /*exact_dk=*/true);
}

}  // namespace longspan::selected
