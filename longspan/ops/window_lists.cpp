#include "longspan/ops/window_lists.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <limits>
#include <optional>

#include "longspan/core/detail/check.h"
#include "longspan/ops/checks.h"

namespace longspan {

namespace {

bool is_index(const at::Tensor& t) {
  return t.scalar_type() == at::kInt || t.scalar_type() == at::kLong;
}

at::Tensor counting(const c10::SymInt& count, const at::Tensor& like) {
  return at::arange(at::Scalar(count), like.options());
}

/// Keys that are there, -1 for the others.
at::Tensor kept(const at::Tensor& keys, const at::Tensor& there) {
  return keys.masked_fill(there.logical_not(), -1);
}

at::Tensor ended(const char* who, const at::Tensor& queries, int64_t ratio) {
  check(is_index(queries), who, ": `queries` is ", describe(queries),
        "; expected int32 or int64");
  check(ratio >= 1, who, ": pools of ", ratio,
        " tokens; expected a ratio of 1 or more");
  return (queries + 1).floor_divide(ratio);
}

at::Tensor lists_of(const at::Tensor& queries, c10::SymInt keys,
                    c10::SymInt window, c10::SymInt pools, int64_t ratio,
                    const std::optional<at::Tensor>& chosen) {
  const char* const who = "window_lists";
  check(is_index(queries) && queries.dim() >= 1, who, ": `queries` is ",
        describe(queries), "; expected int32 or int64 [.., T]");
  check(keys >= 0 && window >= 0 && pools >= 0, who, ": ", keys,
        " keys, a window of ", window, " and ", pools,
        " pools; expected 0 or more");
  constexpr int64_t kMostKeys = std::numeric_limits<int32_t>::max();
  check(keys <= kMostKeys && window <= kMostKeys && pools <= kMostKeys, who,
        ": ", keys, " keys, a window of ", window, " and ", pools,
        " pools; keys are counted in 32 bits");
  // Each query gets them all, used or not.
  constexpr int64_t kMostSlots = int64_t{1} << 22;
  check(keys.min(window) <= kMostSlots && (chosen || pools <= kMostSlots), who,
        ": a window of ", window, " of ", keys, " keys and ", pools,
        " pools for each query; lists have at most ", kMostSlots, " of each");
  const at::Tensor query = queries.unsqueeze(-1);
  const at::Tensor key = counting(keys.min(window), queries) +
                         (query - at::Scalar(window) + 1).clamp_min(0);
  at::Tensor near =
      kept(key, (key <= query).logical_and(key < at::Scalar(keys)));
  if (chosen) {
    check(is_index(*chosen) && chosen->dim() == queries.dim() + 1 &&
              chosen->sym_sizes().slice(
                  0, static_cast<std::size_t>(queries.dim())) ==
                  queries.sym_sizes() &&
              chosen->device() == queries.device(),
          who, ": `chosen` is ", describe(*chosen), " but `queries` ",
          describe(queries), "; expected int32 or int64 [.., T, slots]");
    const at::Tensor pool = chosen->to(queries.scalar_type());
    const at::Tensor far =
        kept(pool + at::Scalar(keys),
             (*chosen >= 0).logical_and(*chosen < at::Scalar(pools)));
    return at::cat({near, far}, -1);
  }
  if (pools == 0) return near;
  const at::Tensor pool = counting(pools, queries);
  return at::cat(
      {near, kept(pool + at::Scalar(keys), pool < ended(who, query, ratio))},
      -1);
}

at::Tensor hide(const at::Tensor& lists, const at::Tensor& mask) {
  const char* const who = "hide_listed";
  check(is_index(lists) && lists.dim() == 3, who, ": `lists` is ",
        describe(lists), "; expected int32 or int64 [B, T, slots]");
  check(mask.dim() == 3 &&
            (mask.sym_size(0) == 1 || mask.sym_size(0) == lists.sym_size(0)) &&
            mask.sym_size(1) == lists.sym_size(1) &&
            mask.device() == lists.device(),
        who, ": `mask` is ", describe(mask), " but `lists` ", describe(lists),
        "; expected [B, T, keys]");
  const at::Tensor inside =
      (lists >= 0).logical_and(lists < at::Scalar(mask.sym_size(2)));
  if (mask.sym_size(2) == 0) return kept(lists, inside);
  const at::Tensor found =
      mask.detach()
          .expand_symint({lists.sym_size(0), -1, -1})
          .gather(2, lists.masked_fill(inside.logical_not(), 0).to(at::kLong));
  const at::Tensor visible =
      mask.scalar_type() == at::kBool ? found : (found < 0).logical_not();
  return kept(lists, inside.logical_and(visible));
}

}  // namespace

at::Tensor window_lists(const at::Tensor& queries, int64_t keys, int64_t window,
                        const Pools& pools) {
  return lists_of(
      queries, keys, window, pools.count, pools.ratio,
      pools.chosen.defined() ? std::optional(pools.chosen) : std::nullopt);
}

at::Tensor ended_pools(const at::Tensor& queries, int64_t ratio) {
  return ended("ended_pools", queries, ratio);
}

at::Tensor hide_listed(const at::Tensor& lists, const at::Tensor& mask) {
  return hide(lists, mask);
}

TORCH_LIBRARY_FRAGMENT(longspan, m) {
  m.def(
      "window_lists(Tensor queries, SymInt keys, SymInt window, "
      "SymInt pools=0, int ratio=0, Tensor? chosen=None) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def("ended_pools(Tensor queries, int ratio) -> Tensor",
        {at::Tag::pt2_compliant_tag});
  m.def("hide_listed(Tensor lists, Tensor mask) -> Tensor",
        {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(longspan, CompositeImplicitAutograd, m) {
  m.impl("window_lists", lists_of);
  m.impl("ended_pools", ended_pools);
  m.impl("hide_listed", hide);
}

}  // namespace longspan
