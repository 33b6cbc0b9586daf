#include "longspan/attention/state_tables.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace longspan {

namespace {

/// One row of int64 for each entry of a list.
template <class Row>
at::Tensor table_of(const std::vector<Row>& rows) {
  constexpr auto kColumns = static_cast<int64_t>(sizeof(Row) / sizeof(int64_t));
  at::Tensor table =
      at::empty({std::ssize(rows), kColumns}, at::TensorOptions(at::kLong));
  std::ranges::copy(rows,
                    reinterpret_cast<Row*>(table.mutable_data_ptr<int64_t>()));
  return table;
}

}  // namespace

StateTables state_tables(const StatePlan& plan) {
  const auto& forward = plan.lists(Pass::forward);
  const auto& backward = plan.lists(Pass::backward);
  return {.sends = table_of(forward.sends),
          .steps = table_of(forward.steps),
          .back_sends = table_of(backward.sends),
          .back_steps = table_of(backward.steps)};
}

}  // namespace longspan
