#include "longspan/attention/pool_tokens.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include "longspan/comm/collectives.h"
#include "longspan/core/detail/check.h"
#include "longspan/ops/checks.h"
#include "longspan/ops/pool_listed.h"
#include "longspan/ops/registering.h"

namespace longspan {

namespace {

template <class T>
at::Tensor table_of(const std::vector<T>& numbers, at::IntArrayRef sizes,
                    at::Device device) {
  return at::tensor(numbers, c10::CppTypeToScalarType<T>::value)
      .view(sizes)
      .to(device);
}

void check_pooled(const at::Tensor& values, const at::Tensor& gates,
                  const OptionalTensor& bias, const at::Tensor& lists,
                  int64_t halves) {
  const char* const who = "pool_tokens";
  check(halves == 1 || halves == 2, who, ": ", halves,
        " halves; expected 1, or 2 with an overlap");
  check(values.is_floating_point() && values.dim() == 2, who, ": `values` is ",
        describe(values), "; expected floating [tokens, channels]");
  check(values.sym_size(1) % halves == 0, who, ": `values` is ",
        describe(values),
        "; with an overlap one half of the channels is for the next window");
  check(gates.is_floating_point() && gates.sym_sizes() == values.sym_sizes() &&
            gates.device() == values.device(),
        who, ": `gates` is ", describe(gates), " but `values` ",
        describe(values), "; expected the same shape and device");
  if (!bias) return;
  const c10::SymInt ratio = lists.sym_size(1) / halves;
  check(bias->is_floating_point() && bias->dim() == 2 &&
            bias->sym_size(0) == ratio &&
            bias->sym_size(1) == values.sym_size(1) &&
            bias->device() == values.device(),
        who, ": `bias` is ", describe(*bias), "; expected floating [", ratio,
        ", ", values.sym_size(1), "] beside `values`");
}

/// With a row for each half of a token.
at::Tensor halves_of(const at::Tensor& x, int64_t halves) {
  return x.contiguous().view_symint(
      {x.sym_size(0) * halves, x.sym_size(1) / halves});
}

/// One row for each slot, the window before first.
at::Tensor slots_of(const at::Tensor& bias, int64_t halves) {
  return bias
      .reshape_symint({bias.sym_size(0), halves, bias.sym_size(1) / halves})
      .transpose(0, 1)
      .flatten(0, 1);
}

/// Made of operators that have derivatives.
at::Tensor pools_of(const at::Tensor& values, const at::Tensor& gates,
                    const OptionalTensor& bias, const at::Tensor& lists,
                    const at::Tensor& sends, const at::Tensor& merges,
                    const at::Tensor& order, c10::SymInt whole,
                    c10::SymInt received, int64_t halves,
                    std::string_view group) {
  check_pooled(values, gates, bias, lists, halves);
  const Pooled here = pool_listed(
      halves_of(values, halves), halves_of(gates, halves),
      bias ? OptionalTensor(slots_of(*bias, halves)) : std::nullopt, lists);
  at::Tensor pools = here.out;
  if (sends.sym_size(0) > 0) {
    const c10::SymInt parts = lists.sym_size(0) - whole;
    const auto behind = [&](const at::Tensor& t) {
      return t.narrow_symint(0, whole, parts);
    };
    static const auto exchange =
        find_op<at::Tensor(const at::Tensor&, int64_t, const at::Tensor&,
                           c10::SymInt, std::string_view)>(
            "longspan::exchange_needed");
    const at::Tensor came =
        exchange.call(at::cat({behind(here.out), behind(here.lse)}, 1), 0,
                      sends, std::move(received), group);
    const auto part_and_log = came.chunk(2, 1);
    const Pooled merged =
        pool_listed(part_and_log[0], part_and_log[1], std::nullopt, merges);
    pools = at::cat({pools.narrow_symint(0, 0, whole), merged.out});
  }
  return pools.index_select(0, order).to(values.scalar_type());
}

TORCH_LIBRARY_FRAGMENT(longspan, m) {
  m.def(
      "pool_tokens(Tensor values, Tensor gates, Tensor? bias, Tensor lists, "
      "Tensor sends, Tensor merges, Tensor order, SymInt whole, "
      "SymInt received, int halves, str group) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(longspan, CompositeImplicitAutograd, m) {
  m.impl("pool_tokens", pools_of);
}

}  // namespace

at::Tensor sends_tensor(const std::vector<RowSend>& sends) {
  at::Tensor table =
      at::empty({std::ssize(sends), 4}, at::TensorOptions(at::kLong));
  static_assert(sizeof(RowSend) == 4 * sizeof(int64_t));
  std::copy(sends.begin(), sends.end(),
            reinterpret_cast<RowSend*>(table.mutable_data_ptr<int64_t>()));
  return table;
}

PoolTables PoolTables::of(const PoolPlan& plan, at::Device device) {
  const int64_t merged = std::ssize(plan.merges()) / plan.most_parts();
  return {
      .lists = table_of(plan.lists(),
                        {std::ssize(plan.lists()) / plan.slots(), plan.slots()},
                        device),
      .sends = sends_tensor(plan.sends()),
      .merges = table_of(plan.merges(), {merged, plan.most_parts()}, device),
      .order = table_of(plan.order(), {plan.here()}, device),
      .in_stream = table_of(plan.in_stream(), {plan.total()}, device),
      .whole = plan.whole(),
      .received = plan.received(),
      .halves = plan.halves()};
}

at::Tensor pool_tokens(const at::Tensor& values, const at::Tensor& gates,
                       const OptionalTensor& bias, const PoolTables& tables,
                       const Group& group) {
  return pools_of(values, gates, bias, tables.lists, tables.sends,
                  tables.merges, tables.order, tables.whole, tables.received,
                  tables.halves, group.name());
}

at::Tensor gather_pools(const at::Tensor& pools, const PoolPlan& plan,
                        const PoolTables& tables, const Group& group) {
  return all_gather_tokens(pools, 0, plan.sizes(), group)
      .index_select(0, tables.in_stream);
}

}  // namespace longspan
