#include "longspan/ops/registering.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
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

bool is_last_use(const Tensors& kept) {
  if (torch::autograd::get_current_graph_task_keep_graph()) return false;
  // Autograd, the list that it was unpacked into, `kept`, and the object that
  // Python made of an output, which lives as long as the tensor.
  constexpr std::size_t kHolders = 4;
  return std::all_of(kept.begin(), kept.end(), [](const at::Tensor& t) {
    return !t.key_set().has_any(c10::DispatchKeySet(
               {c10::DispatchKey::Python, c10::DispatchKey::Functionalize})) &&
           t.use_count() <= kHolders && t.storage().use_count() == 1;
  });
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
