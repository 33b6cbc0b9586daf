#include "longspan/ops/select_keys.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <limits>
#include <tuple>

#include "longspan/core/check.h"
#include "longspan/ops/attend_selected/inputs.h"
#include "longspan/ops/checks.h"
#include "longspan/ops/partial_attention.h"
#include "longspan/ops/registering.h"
#include "longspan/ops/select_keys/cpu.h"
#include "longspan/ops/select_keys/cuda.h"
#include "longspan/ops/select_keys/inputs.h"
#include "longspan/ops/token_arrays.h"

namespace longspan {

namespace {

using Tensors2 = std::tuple<at::Tensor, at::Tensor>;
using Tensors3 = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

c10::SymIntArrayRef queries_of(const at::Tensor& q) {
  return q.sym_sizes().slice(0, static_cast<std::size_t>(q.dim() - 2));
}

void check_select(const at::Tensor& q, const at::Tensor& k,
                  const at::Tensor& weights, const at::Tensor& start,
                  const at::Tensor& end, const c10::SymInt& slots) {
  check_indexer("select_keys", q, k, weights);
  check_slots("select_keys", slots);
  check_window("select_keys", "start", start, queries_of(q), q.device());
  check_window("select_keys", "end", end, queries_of(q), q.device());
}

void check_score(const at::Tensor& q, const at::Tensor& k,
                 const at::Tensor& weights, const at::Tensor& indices) {
  check_indexer("score_selected", q, k, weights);
  const auto type = indices.scalar_type();
  check(
      (type == at::kInt || type == at::kLong) && indices.dim() == q.dim() - 1 &&
          indices.sym_sizes().slice(0, indices.sym_sizes().size() - 1) ==
              queries_of(q),
      "score_selected: `indices` is ", describe(indices), " but `q` ",
      describe(q), "; expected int32 or int64 [Tq, slots] after as many rows");
  check_same_device("score_selected", "indices", indices, q);
}

Tensors2 select(const at::Tensor& q, const at::Tensor& k,
                const at::Tensor& weights, const at::Tensor& start,
                const at::Tensor& end, int64_t slots, bool with_scores) {
  check_select(q, k, weights, start, end, slots);
  const auto in = IndexerInputs::of(q, k, weights);
  const auto with_row = [&](const at::Tensor& t) {
    return q.dim() == 4 ? t : t.unsqueeze(0);
  };
  const at::Tensor from = as_window(with_row(start), in.k.size(1));
  const at::Tensor to = as_window(with_row(end), in.k.size(1));
  at::Tensor indices, scores;
  indices = at::empty({in.q.size(0), in.q.size(1), slots},
                      q.options().dtype(at::kInt));
  if (with_scores) scores = at::empty(indices.sizes(), sums_like(q));
  (q.is_cpu() ? select_keys_cpu : select_keys_cuda)(in, from, to, indices,
                                                    scores);
  if (!with_scores) {
    scores = at::empty({in.q.size(0), in.q.size(1), 0}, sums_like(q));
  }
  return q.dim() == 4 ? Tensors2{scores, indices}
                      : Tensors2{scores.squeeze(0), indices.squeeze(0)};
}

at::Tensor score(const at::Tensor& q, const at::Tensor& k,
                 const at::Tensor& weights, const at::Tensor& indices) {
  check_score(q, k, weights, indices);
  const auto in = IndexerInputs::of(q, k, weights);
  const at::Tensor lists =
      as_slots(q.dim() == 4 ? indices : indices.unsqueeze(0), in.k.size(1))
          .contiguous();
  const at::Tensor scores = q.is_cpu() ? score_selected_cpu(in, lists)
                                       : score_selected_cuda(in, lists);
  return q.dim() == 4 ? scores : scores.squeeze(0);
}

Tensors3 score_backward(const at::Tensor& dscores, const at::Tensor& q,
                        const at::Tensor& k, const at::Tensor& weights,
                        const at::Tensor& indices, bool exact_dk) {
  check_score(q, k, weights, indices);
  check_like("score_selected_backward", "dscores", dscores, indices.sym_sizes(),
             accumulation_type(q.scalar_type()), q);
  const auto in = IndexerInputs::of(q, k, weights);
  const auto with_row = [&](const at::Tensor& t) {
    return (q.dim() == 4 ? t : t.unsqueeze(0)).contiguous();
  };
  const at::Tensor lists = as_slots(with_row(indices), in.k.size(1));
  const at::Tensor g = with_row(dscores);
  const IndexerGradients sums =
      q.is_cpu() ? score_selected_backward_cpu(in, lists, g)
                 : score_selected_backward_cuda(in, lists, g);
  return {sums.dq.to(q.scalar_type()).reshape(q.sizes()),
          sums.dk.to(exact_dk ? sums.dk.scalar_type() : k.scalar_type())
              .reshape(k.sizes()),
          sums.dweights.reshape(weights.sizes())};
}

at::Tensor top(const at::Tensor& scores, int64_t slots,
               const std::optional<at::Tensor>& start,
               const std::optional<at::Tensor>& end);

at::Tensor top_meta(const at::Tensor& scores, c10::SymInt slots,
                    const std::optional<at::Tensor>& start,
                    const std::optional<at::Tensor>& end) {
  check(scores.dim() >= 1 && (scores.scalar_type() == at::kFloat ||
                              scores.scalar_type() == at::kDouble),
        "top_keys: `scores` is ", describe(scores),
        "; expected float32 or float64 [.., Tk]");
  check(scores.sym_size(-1) <= std::numeric_limits<int32_t>::max(),
        "top_keys: `scores` is ", describe(scores),
        "; keys are counted in 32 bits");
  check_slots("top_keys", slots);
  check(start.has_value() == end.has_value(),
        "top_keys: one of `start` and `end` is missing; give both or none");
  auto sizes = scores.sym_sizes().vec();
  sizes.pop_back();
  if (start) {
    check_window("top_keys", "start", *start, sizes, scores.device());
    check_window("top_keys", "end", *end, sizes, scores.device());
  }
  sizes.push_back(std::move(slots));
  return at::empty_symint(sizes, scores.options().dtype(at::kInt));
}

at::Tensor top(const at::Tensor& scores, int64_t slots,
               const std::optional<at::Tensor>& start,
               const std::optional<at::Tensor>& end) {
  const at::Tensor checked =
      top_meta(scores, slots, start, end);  // also the shape of the answer
  const int64_t keys = scores.size(-1);
  const at::Tensor rows =
      scores
          .reshape(
              {keys == 0 ? checked.numel() / std::max<int64_t>(slots, 1) : -1,
               keys})
          .contiguous();
  const auto ints = scores.options().dtype(at::kInt);
  const auto window = [&](const std::optional<at::Tensor>& border,
                          int64_t otherwise) {
    return border ? as_window(border->reshape({-1}), keys)
                  : at::full({rows.size(0)}, otherwise, ints);
  };
  const at::Tensor from = window(start, 0), to = window(end, keys);
  if (scores.is_cpu()) {
    return top_keys_cpu(rows, slots, from, to).view(checked.sizes());
  }
  constexpr int64_t kScores = 4 << 20;  // at a time
  const int64_t most =
      std::max<int64_t>(1, kScores / std::max<int64_t>(keys, 1));
  at::Tensor indices = checked.view({rows.size(0), slots});
  if (top_keys_on_device(rows, from, to, indices)) return checked;
  // Kernels read four float32 at a time.
  const bool pads = keys % 4 != 0 && rows.scalar_type() == at::kFloat;
  for (int64_t first = 0; first < rows.size(0); first += most) {
    const int64_t n = std::min(most, rows.size(0) - first);
    const at::Tensor start_of = from.narrow(0, first, n);
    const at::Tensor end_of = to.narrow(0, first, n);
    const at::Tensor some = rows.narrow(0, first, n);
    at::Tensor chosen = indices.narrow(0, first, n);
    if (pads) {
      const at::Tensor wide = at::constant_pad_nd(some, {0, 4 - keys % 4});
      if (top_keys_on_device(wide.narrow(1, 0, keys), start_of, end_of,
                             chosen)) {
        continue;
      }
    }
    chosen.copy_(top_keys_composite(some, slots, start_of, end_of));
  }
  return checked;
}

Tensors2 select_meta(const at::Tensor& q, const at::Tensor& k,
                     const at::Tensor& weights, const at::Tensor& start,
                     const at::Tensor& end, c10::SymInt slots,
                     bool with_scores) {
  check_select(q, k, weights, start, end, slots);
  auto sizes = queries_of(q).vec();
  sizes.push_back(std::move(slots));
  const at::Tensor indices =
      at::empty_symint(sizes, q.options().dtype(at::kInt));
  if (!with_scores) sizes.back() = 0;
  return {at::empty_symint(sizes, sums_like(q)), indices};
}

at::Tensor score_meta(const at::Tensor& q, const at::Tensor& k,
                      const at::Tensor& weights, const at::Tensor& indices) {
  check_score(q, k, weights, indices);
  return at::empty_symint(indices.sym_sizes(), sums_like(q));
}

Tensors3 score_backward_meta(const at::Tensor& dscores, const at::Tensor& q,
                             const at::Tensor& k, const at::Tensor& weights,
                             const at::Tensor& indices, bool exact_dk) {
  check_score(q, k, weights, indices);
  check_like("score_selected_backward", "dscores", dscores, indices.sym_sizes(),
             accumulation_type(q.scalar_type()), q);
  return {
      at::empty_symint(q.sym_sizes(), q.options()),
      at::empty_symint(k.sym_sizes(), exact_dk ? sums_like(k) : k.options()),
      at::empty_symint(weights.sym_sizes(), weights.options())};
}

const auto& select_op() {
  static const auto op =
      find_op<decltype(select_meta)>("longspan::select_keys");
  return op;
}

const auto& score_op() {
  static const auto op = find_op<decltype(score)>("longspan::score_selected");
  return op;
}

const auto& score_backward_op() {
  static const auto op =
      find_op<decltype(score_backward)>("longspan::score_selected_backward");
  return op;
}

const auto& top_op() {
  static const auto op = find_op<decltype(top_meta)>("longspan::top_keys");
  return op;
}

/// What both functions below do backward: `saved` is q, k, weights, indices.
torch::autograd::variable_list gradients_of_scores(
    const torch::autograd::variable_list& saved, const at::Tensor& dscores,
    std::size_t arguments) {
  auto [dq, dk, dweights] = score_backward_op().call(
      dscores, saved[0], saved[1], saved[2], saved[3], /*exact_dk=*/false);
  torch::autograd::variable_list all(arguments);
  all[0] = dq;
  all[1] = dk;
  all[2] = dweights;
  return all;
}

class SelectFunction : public torch::autograd::Function<SelectFunction> {
 public:
  static torch::autograd::variable_list forward(
      torch::autograd::AutogradContext* ctx, const at::Tensor& q,
      const at::Tensor& k, const at::Tensor& weights, const at::Tensor& start,
      const at::Tensor& end, const c10::SymInt& slots) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [scores, indices] =
        select_op().call(q, k, weights, start, end, slots, true);
    ctx->save_for_backward({q, k, weights, indices});
    ctx->mark_non_differentiable({indices});
    return {scores, indices};
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* ctx,
      torch::autograd::variable_list grads) {
    return gradients_of_scores(ctx->get_saved_variables(), grads[0], 6);
  }
};

class ScoreFunction : public torch::autograd::Function<ScoreFunction> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx,
                            const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& weights,
                            const at::Tensor& indices) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({q, k, weights, indices});
    return score_op().call(q, k, weights, indices);
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* ctx,
      torch::autograd::variable_list grads) {
    return gradients_of_scores(ctx->get_saved_variables(), grads[0], 4);
  }
};

Tensors2 select_autograd(const at::Tensor& q, const at::Tensor& k,
                         const at::Tensor& weights, const at::Tensor& start,
                         const at::Tensor& end, c10::SymInt slots,
                         bool with_scores) {
  if (with_scores) {
    const auto results =
        SelectFunction::apply(q, k, weights, start, end, slots);
    return {results[0], results[1]};
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return select_op().call(q, k, weights, start, end, std::move(slots), false);
}

at::Tensor score_autograd(const at::Tensor& q, const at::Tensor& k,
                          const at::Tensor& weights,
                          const at::Tensor& indices) {
  return ScoreFunction::apply(q, k, weights, indices);
}

Tensors3 score_backward_autograd(const at::Tensor& dscores, const at::Tensor& q,
                                 const at::Tensor& k, const at::Tensor& weights,
                                 const at::Tensor& indices, bool exact_dk) {
  refuse_second_derivative("score_selected", {dscores, q, k, weights});
  at::AutoDispatchBelowADInplaceOrView guard;
  return score_backward_op().call(dscores, q, k, weights, indices, exact_dk);
}

at::Tensor top_autograd(const at::Tensor& scores, c10::SymInt slots,
                        const std::optional<at::Tensor>& start,
                        const std::optional<at::Tensor>& end) {
  at::AutoDispatchBelowADInplaceOrView guard;
  return top_op().call(scores, std::move(slots), start, end);
}

/// q and k in autocast's type, weights in what scores are summed in.
template <c10::DeviceType device, c10::DispatchKey key>
Tensors2 select_autocast(const at::Tensor& q, const at::Tensor& k,
                         const at::Tensor& weights, const at::Tensor& start,
                         const at::Tensor& end, c10::SymInt slots,
                         bool with_scores) {
  const c10::impl::ExcludeDispatchKeyGuard guard(key);
  const Casts<device> cast;
  return select_op().call(cast(q), cast(k), cast.sums(weights), start, end,
                          std::move(slots), with_scores);
}

template <c10::DeviceType device, c10::DispatchKey key>
at::Tensor score_autocast(const at::Tensor& q, const at::Tensor& k,
                          const at::Tensor& weights,
                          const at::Tensor& indices) {
  const c10::impl::ExcludeDispatchKeyGuard guard(key);
  const Casts<device> cast;
  return score_op().call(cast(q), cast(k), cast.sums(weights), indices);
}

}  // namespace

Selection select_keys(const at::Tensor& q, const at::Tensor& k,
                      const at::Tensor& weights, const at::Tensor& start,
                      const at::Tensor& end, int64_t slots, bool with_scores) {
  auto [scores, indices] =
      select_op().call(q, k, weights, start, end, slots, with_scores);
  return {indices, scores};
}

at::Tensor score_selected(const at::Tensor& q, const at::Tensor& k,
                          const at::Tensor& weights,
                          const at::Tensor& indices) {
  return score_op().call(q, k, weights, indices);
}

at::Tensor top_keys(const at::Tensor& scores, int64_t slots,
                    const at::Tensor& start, const at::Tensor& end) {
  return top_op().call(scores, slots, optional(start), optional(end));
}

std::string which_indexer_kernel(const at::Tensor& q, const at::Tensor& k,
                                 const at::Tensor& weights, int64_t slots,
                                 IndexerWork work) {
  constexpr const char* who = "which_indexer_kernel";
  check_indexer(who, q, k, weights);
  check_slots(who, slots);
  if (q.is_cpu()) {
    return describe_chosen_kernels(*element_type(q.scalar_type()));
  }
  check(q.is_cuda(), who, ": `q` is ", describe(q), " on ", q.device().str(),
        "; there are kernels for the CPU and for CUDA");
  return which_indexer_kernel_cuda(IndexerInputs::of(q, k, weights), slots,
                                   work);
}

TORCH_LIBRARY_FRAGMENT(longspan, m) {
  m.def(
      "select_keys(Tensor q, Tensor k, Tensor weights, Tensor start, "
      "Tensor end, SymInt slots, bool scores) -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "score_selected(Tensor q, Tensor k, Tensor weights, Tensor indices) "
      "-> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "score_selected_backward(Tensor dscores, Tensor q, Tensor k, "
      "Tensor weights, Tensor indices, bool exact_dk) "
      "-> (Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "top_keys(Tensor scores, SymInt slots, Tensor? start, Tensor? end) "
      "-> Tensor",
      {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(longspan, Meta, m) {
  m.impl("select_keys", select_meta);
  m.impl("score_selected", score_meta);
  m.impl("score_selected_backward", score_backward_meta);
  m.impl("top_keys", top_meta);
}
TORCH_LIBRARY_IMPL(longspan, CPU, m) {
  m.impl("select_keys", select);
  m.impl("score_selected", score);
  m.impl("score_selected_backward", score_backward);
  m.impl("top_keys", top);
}
TORCH_LIBRARY_IMPL(longspan, CUDA, m) {
  m.impl("select_keys", select);
  m.impl("score_selected", score);
  m.impl("score_selected_backward", score_backward);
  m.impl("top_keys", top);
}
TORCH_LIBRARY_IMPL(longspan, Autograd, m) {
  m.impl("select_keys", select_autograd);
  m.impl("score_selected", score_autograd);
  m.impl("score_selected_backward", score_backward_autograd);
  m.impl("top_keys", top_autograd);
}
TORCH_LIBRARY_IMPL(longspan, AutocastCPU, m) {
  m.impl("select_keys",
         select_autocast<at::kCPU, c10::DispatchKey::AutocastCPU>);
  m.impl("score_selected",
         score_autocast<at::kCPU, c10::DispatchKey::AutocastCPU>);
}
TORCH_LIBRARY_IMPL(longspan, AutocastCUDA, m) {
  m.impl("select_keys",
         select_autocast<at::kCUDA, c10::DispatchKey::AutocastCUDA>);
  m.impl("score_selected",
         score_autocast<at::kCUDA, c10::DispatchKey::AutocastCUDA>);
}

}  // namespace longspan
