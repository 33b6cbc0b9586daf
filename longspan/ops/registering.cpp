#include "longspan/ops/registering.h"

#include <stdexcept>
#include <utility>

#include "longspan/core/detail/check.h"
#include "longspan/ops/partial_attention.h"

namespace longspan {

void refuse_second_derivative(const char* who) {
  throw std::invalid_argument(
      join(who,
           ": there is no second derivative; call backward without "
           "create_graph"));
}

at::Tensor empty_as(const at::Tensor& t) {
  return at::empty_symint(t.sym_sizes(), t.options());
}

at::Tensor empty_out(const at::Tensor& q, int64_t value_dim) {
  auto sizes = q.sym_sizes().vec();
  if (value_dim != 0) sizes.back() = value_dim;
  return at::empty_symint(sizes, q.options());
}

at::Tensor empty_sums(const at::Tensor& q, int64_t dropped,
                      std::vector<c10::SymInt> more) {
  auto sizes =
      q.sym_sizes().slice(0, static_cast<std::size_t>(q.dim() - dropped)).vec();
  sizes.insert(sizes.end(), more.begin(), more.end());
  return at::empty_symint(sizes, sums_like(q));
}

at::Tensor empty_dsink(const std::optional<at::Tensor>& sink,
                       const at::Tensor& lse) {
  return at::empty_symint({sink ? sink->sym_size(0) : c10::SymInt(0)},
                          lse.options());
}

at::Tensor empty_target(const at::Tensor& q, const at::Tensor& kv, bool listed,
                        c10::SymInt slots) {
  if (kv.dim() == q.dim()) {
    return empty_sums(q, 2, {kv.sym_size(-2), std::move(slots)});
  }
  return listed ? empty_sums(q, 2, {1, std::move(slots)})
                : empty_sums(q, 2, {std::move(slots)});
}

}  // namespace longspan
