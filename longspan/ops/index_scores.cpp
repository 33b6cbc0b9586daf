#include "longspan/ops/index_scores.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "longspan/core/detail/check.h"
#include "longspan/ops/checks.h"
#include "longspan/ops/partial_attention.h"
#include "longspan/ops/registering.h"
#include "longspan/ops/select_keys/inputs.h"

namespace longspan {

namespace {

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

struct IndexScoresBackward {
  at::Tensor dscores, q, k, weights;
  OptionalTensor start, end;

  using Result = Tensors3;
  static constexpr auto kDerivativeOf = "index_scores";
  static constexpr auto kSchema =
      "index_scores_backward(Tensor dscores, Tensor q, Tensor k, "
      "Tensor weights, Tensor? start, Tensor? end) "
      "-> (Tensor, Tensor, Tensor)";
  template <class Self>
  static auto fields(Self& self) {
    return std::tie(self.dscores, self.q, self.k, self.weights, self.start,
                    self.end);
  }
  Result run() const;
  Result meta() const { return {empty_as(q), empty_as(k), empty_as(weights)}; }
};

struct IndexScores {
  at::Tensor q, k, weights;
  OptionalTensor start, end;

  using Result = at::Tensor;
  static constexpr auto kSchema =
      "index_scores(Tensor q, Tensor k, Tensor weights, Tensor? start=None, "
      "Tensor? end=None) -> Tensor";
  template <class Self>
  static auto fields(Self& self) {
    return std::tie(self.q, self.k, self.weights, self.start, self.end);
  }
  Result run() const;
  Result meta() const {
    check_scores(q, k, weights, start, end);
    return empty_sums(q, 2, {k.sym_size(-2)});
  }

  /// q and k in autocast's type, weights in what scores are summed in.
  void cast(const Casts& to) {
    q = to(q);
    k = to(k);
    weights = to.sums(weights);
  }

  Tensors keep(const Tensors& /*outputs*/) const { return {}; }
  Tensors gradients(const Tensors& /*kept*/, const Tensors& grads) const {
    return listed(Operator<IndexScoresBackward>::call(
        {grads[0], q, k, weights, start, end}));
  }
};

at::Tensor IndexScores::run() const {
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

Tensors3 IndexScoresBackward::run() const {
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

TORCH_LIBRARY_FRAGMENT(longspan, m) {
  Operator<IndexScores>::add_to(m);
  Operator<IndexScoresBackward>::add_to(m);
}

}  // namespace

at::Tensor index_scores(const at::Tensor& q, const at::Tensor& k,
                        const at::Tensor& weights, const at::Tensor& start,
                        const at::Tensor& end) {
  return Operator<IndexScores>::call(
      {q, k, weights, optional(start), optional(end)});
}

}  // namespace longspan
