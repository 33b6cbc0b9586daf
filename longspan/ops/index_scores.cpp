#include "longspan/ops/index_scores.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>

#include "longspan/core/check.h"
#include "longspan/ops/checks.h"
#include "longspan/ops/partial_attention.h"
#include "longspan/ops/registering.h"
#include "longspan/ops/select_keys/inputs.h"

namespace longspan {

namespace {

using OptionalTensor = std::optional<at::Tensor>;
using Tensors3 = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

constexpr int64_t kScores = 4 << 20;  // queries x keys at a time

void check_scores(const at::Tensor& q, const at::Tensor& k,
                  const at::Tensor& weights, const OptionalTensor& start,
                  const OptionalTensor& end) {
  check_indexer("index_scores", q, k, weights);
  check(start.has_value() == end.has_value(),
        "index_scores: one of `start` and `end` is missing; give both or none");
  if (!start) return;
  const auto queries =
      q.sym_sizes().slice(0, static_cast<std::size_t>(q.dim() - 2));
  check_window("index_scores", "start", *start, queries, q.device());
  check_window("index_scores", "end", *end, queries, q.device());
}

/// Some queries of one row, in the accumulation type.
struct Chunk {
  int64_t row, first, count;
  at::Tensor q;        // [n, H, D]
  at::Tensor k;        // [Tk, D]
  at::Tensor weights;  // [n, H]
  at::Tensor scratch = {};

  /// q[:, head] . k, [n, Tk], in the memory of the head before.
  const at::Tensor& products(int64_t head) {
    if (!scratch.defined()) {
      scratch = at::empty({count, k.size(0)}, q.options());
    }
    return at::mm_out(scratch, q.select(1, head), k.t());
  }
  at::Tensor weight(int64_t head) const { return weights.narrow(1, head, 1); }

  /// The part of a tensor [B, Tq, ..] that is theirs.
  at::Tensor of(const at::Tensor& t) const {
    return t[row].narrow(0, first, count);
  }
};

template <class Visit>
void each_chunk(const IndexerInputs& in, const Visit& visit) {
  const int64_t queries = in.q.size(1), keys = in.k.size(1);
  if (queries == 0 || keys == 0) return;
  const auto sums = accumulation_type(in.q.scalar_type());
  const int64_t most = std::max<int64_t>(1, kScores / keys);
  for (int64_t row = 0; row < in.q.size(0); ++row) {
    const at::Tensor k = in.k[row].to(sums);
    for (int64_t first = 0; first < queries; first += most) {
      Chunk chunk{row, first, std::min(most, queries - first), {}, k, {}};
      chunk.q = chunk.of(in.q).to(sums);
      chunk.weights = chunk.of(in.weights);
      visit(chunk);
    }
  }
}

at::Tensor hidden_keys(const Chunk& chunk, const at::Tensor& start,
                       const at::Tensor& end) {
  const at::Tensor key =
      at::arange(chunk.k.size(0), start.options().dtype(at::kInt));
  return (key < chunk.of(start).unsqueeze(1))
      .logical_or_(key >= chunk.of(end).unsqueeze(1));
}

/// [B, Tq], whether or not rows came.
at::Tensor window(const at::Tensor& q, const at::Tensor& border) {
  return q.dim() == 4 ? border : border.unsqueeze(0);
}

at::Tensor scores(const at::Tensor& q, const at::Tensor& k,
                  const at::Tensor& weights, const OptionalTensor& start,
                  const OptionalTensor& end) {
  check_scores(q, k, weights, start, end);
  const auto in = IndexerInputs::of(q, k, weights);
  at::Tensor all =
      at::zeros({in.q.size(0), in.q.size(1), in.k.size(1)}, sums_like(q));
  each_chunk(in, [&](Chunk& chunk) {
    at::Tensor here = chunk.of(all);
    for (int64_t head = 0; head < in.q.size(2); ++head) {
      here.addcmul_(chunk.products(head).relu_(), chunk.weight(head));
    }
    if (start) {
      here.masked_fill_(hidden_keys(chunk, window(q, *start), window(q, *end)),
                        -std::numeric_limits<double>::infinity());
    }
  });
  return q.dim() == 4 ? all : all.squeeze(0);
}

Tensors3 scores_backward(const at::Tensor& dscores, const at::Tensor& q,
                         const at::Tensor& k, const at::Tensor& weights,
                         const OptionalTensor& start,
                         const OptionalTensor& end) {
  check_scores(q, k, weights, start, end);
  const auto in = IndexerInputs::of(q, k, weights);
  const at::Tensor given = q.dim() == 4 ? dscores : dscores.unsqueeze(0);
  at::Tensor dq = at::zeros(in.q.sizes(), sums_like(q));
  at::Tensor dk = at::zeros(in.k.sizes(), sums_like(q));
  at::Tensor dweights = at::zeros(in.weights.sizes(), sums_like(q));
  each_chunk(in, [&](Chunk& chunk) {
    at::Tensor g = chunk.of(given);
    if (start) {
      g = g.masked_fill(hidden_keys(chunk, window(q, *start), window(q, *end)),
                        0);
    }
    for (int64_t head = 0; head < in.q.size(2); ++head) {
      const at::Tensor& products = chunk.products(head);
      const at::Tensor through =
          (g * chunk.weight(head)).masked_fill_(products <= 0, 0);
      chunk.of(dq).select(1, head).copy_(at::mm(through, chunk.k));
      dk[chunk.row].addmm_(through.t(), chunk.q.select(1, head));
      chunk.of(dweights).select(1, head).copy_((products.relu() * g).sum(-1));
    }
  });
  return {dq.to(q.scalar_type()).reshape(q.sizes()),
          dk.to(k.scalar_type()).reshape(k.sizes()),
          dweights.reshape(weights.sizes())};
}

at::Tensor scores_meta(const at::Tensor& q, const at::Tensor& k,
                       const at::Tensor& weights, const OptionalTensor& start,
                       const OptionalTensor& end) {
  check_scores(q, k, weights, start, end);
  auto sizes =
      q.sym_sizes().slice(0, static_cast<std::size_t>(q.dim() - 2)).vec();
  sizes.push_back(k.sym_size(-2));
  return at::empty_symint(sizes, sums_like(q));
}

Tensors3 scores_backward_meta(const at::Tensor& /*dscores*/,
                              const at::Tensor& q, const at::Tensor& k,
                              const at::Tensor& weights,
                              const OptionalTensor& /*start*/,
                              const OptionalTensor& /*end*/) {
  return {at::empty_symint(q.sym_sizes(), q.options()),
          at::empty_symint(k.sym_sizes(), k.options()),
          at::empty_symint(weights.sym_sizes(), weights.options())};
}

const auto& scores_op() {
  static const auto op = find_op<decltype(scores)>("longspan::index_scores");
  return op;
}

const auto& scores_backward_op() {
  static const auto op =
      find_op<decltype(scores_backward)>("longspan::index_scores_backward");
  return op;
}

class ScoresFunction : public torch::autograd::Function<ScoresFunction> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx,
                            const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& weights,
                            const OptionalTensor& start,
                            const OptionalTensor& end) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({q, k, weights, start.value_or(at::Tensor()),
                            end.value_or(at::Tensor())});
    return scores_op().call(q, k, weights, start, end);
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* ctx,
      torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    auto [dq, dk, dweights] =
        scores_backward_op().call(grads[0], saved[0], saved[1], saved[2],
                                  optional(saved[3]), optional(saved[4]));
    return {dq, dk, dweights, {}, {}};
  }
};

at::Tensor scores_autograd(const at::Tensor& q, const at::Tensor& k,
                           const at::Tensor& weights,
                           const OptionalTensor& start,
                           const OptionalTensor& end) {
  return ScoresFunction::apply(q, k, weights, start, end);
}

Tensors3 scores_backward_autograd(const at::Tensor& dscores,
                                  const at::Tensor& q, const at::Tensor& k,
                                  const at::Tensor& weights,
                                  const OptionalTensor& start,
                                  const OptionalTensor& end) {
  refuse_second_derivative("index_scores", {dscores, q, k, weights});
  at::AutoDispatchBelowADInplaceOrView guard;
  return scores_backward_op().call(dscores, q, k, weights, start, end);
}

/// q and k in autocast's type, weights in what scores are summed in.
template <c10::DeviceType device, c10::DispatchKey key>
at::Tensor scores_autocast(const at::Tensor& q, const at::Tensor& k,
                           const at::Tensor& weights,
                           const OptionalTensor& start,
                           const OptionalTensor& end) {
  const c10::impl::ExcludeDispatchKeyGuard guard(key);
  const Casts<device> cast;
  return scores_op().call(cast(q), cast(k), cast.sums(weights), start, end);
}

}  // namespace

at::Tensor index_scores(const at::Tensor& q, const at::Tensor& k,
                        const at::Tensor& weights, const at::Tensor& start,
                        const at::Tensor& end) {
  return scores_op().call(q, k, weights, optional(start), optional(end));
}

TORCH_LIBRARY_FRAGMENT(longspan, m) {
  m.def(
      "index_scores(Tensor q, Tensor k, Tensor weights, Tensor? start=None, "
      "Tensor? end=None) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "index_scores_backward(Tensor dscores, Tensor q, Tensor k, "
      "Tensor weights, Tensor? start, Tensor? end) "
      "-> (Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(longspan, Meta, m) {
  m.impl("index_scores", scores_meta);
  m.impl("index_scores_backward", scores_backward_meta);
}
TORCH_LIBRARY_IMPL(longspan, CPU, m) {
  m.impl("index_scores", scores);
  m.impl("index_scores_backward", scores_backward);
}
TORCH_LIBRARY_IMPL(longspan, CUDA, m) {
  m.impl("index_scores", scores);
  m.impl("index_scores_backward", scores_backward);
}
TORCH_LIBRARY_IMPL(longspan, Autograd, m) {
  m.impl("index_scores", scores_autograd);
  m.impl("index_scores_backward", scores_backward_autograd);
}
TORCH_LIBRARY_IMPL(longspan, AutocastCPU, m) {
  m.impl("index_scores",
         scores_autocast<at::kCPU, c10::DispatchKey::AutocastCPU>);
}
TORCH_LIBRARY_IMPL(longspan, AutocastCUDA, m) {
  m.impl("index_scores",
         scores_autocast<at::kCUDA, c10::DispatchKey::AutocastCUDA>);
}

}  // namespace longspan
