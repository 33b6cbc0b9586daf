#include "longspan/ops/attend_selected/composite.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

namespace longspan {

namespace {

/// Memory for the rows of keys that are gathered at once.
constexpr int64_t kGatheredBytes = 32 << 20;

/// Some queries of one row with the keys that they list.
struct Chunk {
  at::Tensor q;        // [n, G, H / G, D]
  at::Tensor keys;     // [n, G, slots, D], 0 where a slot is empty
  at::Tensor empty;    // [n, G, slots]
  at::Tensor scores;   // [n, G, H / G, slots], -inf where a slot is empty
  at::Tensor sources;  // [n * G * slots]: which row of kv, Tk * G for none

  Chunk(const SelectedInputs& in, int64_t row, int64_t first, int64_t n) {
    const auto sums = accumulation_type(in.q.scalar_type());
    const int64_t keys_in = in.kv.size(1), groups = in.key_heads();
    const at::Tensor lists = in.indices[row].narrow(0, first, n).to(at::kLong);
    empty = (lists < 0).logical_or_(lists >= keys_in);
    const at::Tensor group =
        at::arange(groups, lists.options()).view({1, groups, 1});
    const at::Tensor place = lists * groups + group;
    sources = place.masked_fill(empty, keys_in * groups).flatten();
    const at::Tensor flat = in.kv[row].reshape({-1, in.kv.size(3)});
    keys = flat.index_select(0, place.masked_fill(empty, 0).flatten())
               .view({n, groups, in.slots(), in.kv.size(3)})
               .masked_fill(empty.unsqueeze(-1), 0)
               .to(sums);
    q = in.q[row]
            .narrow(0, first, n)
            .to(sums)
            .reshape({n, groups, in.q.size(2) / groups, in.q.size(3)});
    scores = (at::matmul(q, keys.transpose(-1, -2)) * in.scale)
                 .masked_fill(empty.unsqueeze(-2),
                              -std::numeric_limits<double>::infinity());
  }

  /// exp(score - lse), 0 where lse is infinite.
  at::Tensor weights(const at::Tensor& lse) const {
    const at::Tensor at_heads = lse.view({q.size(0), q.size(1), q.size(2), 1});
    return (scores - at_heads)
        .exp()
        .masked_fill(at::isinf(at_heads).logical_or(empty.unsqueeze(-2)), 0);
  }
};

/// visit(row, first query, queries, their chunk), until all had their turn.
template <class Visit>
void each_chunk(const SelectedInputs& in, const Visit& visit) {
  if (in.kv.size(1) == 0 || in.slots() == 0 || in.q.numel() == 0) return;
  const int64_t bytes = in.key_heads() * in.slots() * in.kv.size(3) *
                        static_cast<int64_t>(c10::elementSize(
                            accumulation_type(in.q.scalar_type())));
  const int64_t most = std::max<int64_t>(1, kGatheredBytes / bytes);
  for (int64_t row = 0; row < in.q.size(0); ++row) {
    for (int64_t first = 0; first < in.q.size(1); first += most) {
      const int64_t n = std::min(most, in.q.size(1) - first);
      visit(row, first, n, Chunk(in, row, first, n));
    }
  }
}

}  // namespace

PartialAttention attend_selected_composite(const SelectedInputs& in) {
  PartialAttention answer = PartialAttention::nothing(
      in.q.sizes().slice(0, 3), in.value_dim, sums_like(in.q));
  each_chunk(
      in, [&](int64_t row, int64_t first, int64_t n, const Chunk& chunk) {
        const at::Tensor lse = chunk.scores.logsumexp(-1);
        const at::Tensor out = at::matmul(
            chunk.weights(lse), chunk.keys.narrow(-1, 0, in.value_dim));
        answer.out[row]
            .narrow(0, first, n)
            .copy_(out.view({n, in.q.size(2), in.value_dim}));
        answer.lse[row].narrow(0, first, n).copy_(lse.view({n, in.q.size(2)}));
      });
  if (in.sink.defined()) answer.out = answer.with_sink(in.sink);
  return answer;
}

SelectedSums attend_selected_backward_composite(const SelectedInputs& in,
                                                const SelectedResult& result) {
  const auto options = sums_like(in.q);
  SelectedSums sums{at::zeros(in.q.sizes(), options), {}};
  // One row more, for the empty slots.
  const int64_t places = in.kv.size(1) * in.key_heads();
  at::Tensor dkv =
      at::zeros({in.q.size(0), places + 1, in.kv.size(3)}, options);
  each_chunk(in, [&](int64_t row, int64_t first, int64_t n,
                     const Chunk& chunk) {
    const auto of_chunk = [&](const at::Tensor& t) {
      return t[row].narrow(0, first, n).to(options.dtype()).contiguous();
    };
    const int64_t groups = chunk.q.size(1), heads = chunk.q.size(2);
    const at::Tensor dout =
        of_chunk(result.dout).view({n, groups, heads, in.value_dim});
    const at::Tensor p = chunk.weights(of_chunk(result.lse));
    const at::Tensor delta = of_chunk(result.delta).view({n, groups, heads, 1});
    const at::Tensor values = chunk.keys.narrow(-1, 0, in.value_dim);
    const at::Tensor ds =
        (p * (at::matmul(dout, values.transpose(-1, -2)) - delta) * in.scale)
            .masked_fill(p == 0, 0);
    sums.dq[row]
        .narrow(0, first, n)
        .copy_(
            at::matmul(ds, chunk.keys).view({n, in.q.size(2), in.q.size(3)}));
    at::Tensor dkeys = at::matmul(ds.transpose(-1, -2), chunk.q);
    dkeys.narrow(-1, 0, in.value_dim)
        .add_(at::matmul(p.transpose(-1, -2), dout));
    dkv[row].index_add_(0, chunk.sources, dkeys.view({-1, in.kv.size(3)}));
  });
  sums.dkv = dkv.narrow(1, 0, places).reshape(in.kv.sizes());
  return sums;
}

at::Tensor selected_weights_composite(const SelectedInputs& in,
                                      const at::Tensor& lse) {
  at::Tensor weights = at::zeros(in.indices.sizes(), sums_like(in.q));
  each_chunk(in, [&](int64_t row, int64_t first, int64_t n,
                     const Chunk& chunk) {
    weights[row]
        .narrow(0, first, n)
        .copy_(chunk.weights(lse[row].narrow(0, first, n).contiguous()).sum(2));
  });
  return weights;
}

}  // namespace longspan
