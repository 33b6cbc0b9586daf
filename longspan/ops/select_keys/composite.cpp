#include "longspan/ops/select_keys/composite.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "longspan/ops/partial_attention.h"

namespace longspan {

namespace {

constexpr int64_t kKeyBlock = 16384;
constexpr int64_t kProducts = 8 << 20;  // query heads x keys at a time
constexpr int64_t kScores = 4 << 20;    // queries x keys at a time
constexpr int64_t kMostQueries = 256;   // at a time
constexpr int64_t kGathered = 8 << 20;  // channels of keys at a time

/// Integers in the order of the scores: NaN above everything, the two zeros
/// equal, and the least integer left for keys that are not visible.
at::Tensor ranks_of(const at::Tensor& scores) {
  const bool wide = scores.scalar_type() == at::kDouble;
  const at::Tensor bits =
      (scores + 0).view(wide ? at::kLong : at::kInt);  // -0 + 0 is +0
  const int64_t top = wide ? std::numeric_limits<int64_t>::max()
                           : std::numeric_limits<int32_t>::max();
  return at::where(bits < 0, bits.bitwise_xor(top), bits)
      .masked_fill(at::isnan(scores), top);
}

/// Rows of keys that a list names, 0 where a slot is empty.
struct ListedKeys {
  at::Tensor keys;      // [n, slots, D]
  at::Tensor empty;     // [n, slots]
  at::Tensor sources;   // [n * slots], Tk for an empty slot
  at::Tensor q;         // [n, H, D]
  at::Tensor products;  // [n, H, slots]

  ListedKeys(const IndexerInputs& in, const at::Tensor& indices, int64_t row,
             int64_t first, int64_t n) {
    const auto sums = accumulation_type(in.q.scalar_type());
    const int64_t tokens = in.k.size(1);
    const at::Tensor lists = indices[row].narrow(0, first, n).to(at::kLong);
    empty = (lists < 0).logical_or_(lists >= tokens);
    sources = lists.masked_fill(empty, tokens).flatten();
    keys = in.k[row]
               .index_select(0, lists.masked_fill(empty, 0).flatten())
               .view({n, lists.size(1), in.k.size(2)})
               .masked_fill(empty.unsqueeze(-1), 0)
               .to(sums);
    q = in.q[row].narrow(0, first, n).to(sums);
    products = at::matmul(q, keys.transpose(1, 2));
  }
};

template <class Visit>
void each_list(const IndexerInputs& in, const at::Tensor& indices,
               const Visit& visit) {
  const int64_t slots = indices.size(2);
  if (slots == 0 || in.k.size(1) == 0) return;
  const int64_t most = std::max<int64_t>(
      1, kGathered / (slots * std::max(in.q.size(2), in.q.size(3))));
  for (int64_t row = 0; row < in.q.size(0); ++row) {
    for (int64_t first = 0; first < in.q.size(1); first += most) {
      const int64_t n = std::min(most, in.q.size(1) - first);
      visit(row, first, n, ListedKeys(in, indices, row, first, n));
    }
  }
}

}  // namespace

at::Tensor top_keys_composite(const at::Tensor& scores, int64_t slots,
                              const at::Tensor& start, const at::Tensor& end) {
  const int64_t queries = scores.size(0), keys = scores.size(1);
  const auto ints = scores.options().dtype(at::kInt);
  const int64_t wanted = std::min(slots, keys);
  if (wanted == 0) return at::full({queries, slots}, -1, ints);
  const at::Tensor key = at::arange(keys, ints).unsqueeze(0);
  const at::Tensor visible =
      (key >= start.unsqueeze(1)).logical_and_(key < end.unsqueeze(1));
  at::Tensor ranks = ranks_of(scores);
  const bool wide = ranks.scalar_type() == at::kLong;
  ranks.masked_fill_(visible.logical_not(),
                     wide ? std::numeric_limits<int64_t>::min()
                          : std::numeric_limits<int32_t>::min());
  const at::Tensor last =
      std::get<0>(ranks.topk(wanted, -1, true, false)).amin(-1, true);
  const at::Tensor above = ranks > last;
  const at::Tensor ties = (ranks == last).logical_and_(visible);
  const at::Tensor left = at::rsub(above.sum(-1, true), wanted);
  const at::Tensor chosen =
      above.logical_or(ties.logical_and(ties.cumsum(-1, at::kInt) <= left));
  // A column more, for those that were not chosen.
  const at::Tensor place = (chosen.cumsum(-1, at::kLong) - 1)
                               .masked_fill_(chosen.logical_not(), slots);
  return at::full({queries, slots + 1}, -1, ints)
      .scatter_(1, place, key.expand({queries, keys}))
      .narrow(1, 0, slots)
      .contiguous();
}

at::Tensor select_keys_composite(const IndexerInputs& in, int64_t slots,
                                 const at::Tensor& start,
                                 const at::Tensor& end) {
  const int64_t keys = in.k.size(1), heads = in.q.size(2);
  const auto options = sums_like(in.q);
  at::Tensor indices = at::full({in.q.size(0), in.q.size(1), slots}, -1,
                                options.dtype(at::kInt));
  if (keys == 0 || slots == 0 || in.q.size(1) == 0) return indices;
  const int64_t block = std::min(keys, kKeyBlock);
  // Always this many queries, in every call: libraries choose how they add by
  // the shape.
  const int64_t most = std::clamp<int64_t>(
      std::min(kProducts / (std::max<int64_t>(heads, 1) * block),
               kScores / keys),
      1, kMostQueries);
  for (int64_t row = 0; row < in.q.size(0); ++row) {
    for (int64_t first = 0; first < in.q.size(1); first += most) {
      const int64_t n = std::min(most, in.q.size(1) - first);
      at::Tensor q = in.q[row].narrow(0, first, n).to(options.dtype());
      at::Tensor weights = in.weights[row].narrow(0, first, n);
      if (n < most) {
        q = at::constant_pad_nd(q, {0, 0, 0, 0, 0, most - n});
        weights = at::constant_pad_nd(weights, {0, 0, 0, most - n});
      }
      q = q.reshape({most * heads, in.q.size(3)});
      at::Tensor scores = at::empty({most, keys}, options);
      for (int64_t key = 0; key < keys; key += block) {
        const int64_t width = std::min(block, keys - key);
        const at::Tensor k =
            in.k[row].narrow(0, key, width).to(options.dtype()).contiguous();
        const at::Tensor products =
            at::matmul(q, k.t()).relu_().view({most, heads, width});
        scores.narrow(1, key, width)
            .copy_((products * weights.unsqueeze(-1)).sum(1));
      }
      indices[row]
          .narrow(0, first, n)
          .copy_(top_keys_composite(scores.narrow(0, 0, n), slots,
                                    start[row].narrow(0, first, n),
                                    end[row].narrow(0, first, n)));
    }
  }
  return indices;
}

at::Tensor score_selected_composite(const IndexerInputs& in,
                                    const at::Tensor& indices) {
  at::Tensor scores =
      at::full(indices.sizes(), -std::numeric_limits<double>::infinity(),
               sums_like(in.q));
  each_list(
      in, indices,
      [&](int64_t row, int64_t first, int64_t n, const ListedKeys& listed) {
        const at::Tensor weights = in.weights[row].narrow(0, first, n);
        scores[row]
            .narrow(0, first, n)
            .copy_(((listed.products.relu() * weights.unsqueeze(-1)).sum(1) + 0)
                       .masked_fill(listed.empty,
                                    -std::numeric_limits<double>::infinity()));
      });
  return scores;
}

IndexerGradients score_selected_backward_composite(const IndexerInputs& in,
                                                   const at::Tensor& indices,
                                                   const at::Tensor& dscores) {
  const auto options = sums_like(in.q);
  const int64_t tokens = in.k.size(1);
  // One row more, for the empty slots.
  at::Tensor dk = at::zeros({in.k.size(0), tokens + 1, in.k.size(2)}, options);
  IndexerGradients sums{at::zeros(in.q.sizes(), options),
                        {},
                        at::zeros(in.weights.sizes(), options)};
  each_list(
      in, indices,
      [&](int64_t row, int64_t first, int64_t n, const ListedKeys& listed) {
        const at::Tensor g = dscores[row]
                                 .narrow(0, first, n)
                                 .masked_fill(listed.empty, 0)
                                 .unsqueeze(1);  // [n, 1, slots]
        const at::Tensor weights =
            in.weights[row].narrow(0, first, n).unsqueeze(-1);
        sums.dweights[row]
            .narrow(0, first, n)
            .copy_((listed.products.relu() * g).sum(-1));
        const at::Tensor m =
            (g * weights)
                .masked_fill(listed.products <= 0, 0);  // [n, H, slots]
        sums.dq[row].narrow(0, first, n).copy_(at::matmul(m, listed.keys));
        dk[row].index_add_(
            0, listed.sources,
            at::matmul(m.transpose(1, 2), listed.q).view({-1, in.k.size(2)}));
      });
  sums.dk = dk.narrow(1, 0, tokens);
  return sums;
}

}  // namespace longspan
