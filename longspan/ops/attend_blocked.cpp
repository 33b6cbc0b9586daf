#include <ATen/ATen.h>

#include <algorithm>

#include "longspan/ops/attend_tiles.h"

namespace longspan {

namespace {

/// One block of queries of one line against the keys that some of them see.
struct Block {
  TokenRange queries, keys;
};

/// Scores of all heads of a block stay below this many numbers.
constexpr int64_t kMostScores = int64_t{1} << 24;

/// Calls body(block) for query blocks and, inside them, key blocks.
template <class Body>
void for_each_block(const KeyLines& line, int64_t heads, const Body& body) {
  constexpr int64_t kKeys = 2048;
  const int64_t size = std::clamp<int64_t>(
      kMostScores / (kKeys * std::max<int64_t>(heads, 1)), 16, 2048);
  for (int64_t q = line.queries.begin; q < line.queries.end; q += size) {
    const TokenRange queries{q, std::min(q + size, line.queries.end)};
    // Both lines rise, so the first and the last query span the keys.
    const TokenRange reach{line.keys_of(queries.begin).begin,
                           line.keys_of(queries.end - 1).end};
    for (int64_t k = reach.begin; k < reach.end; k += kKeys) {
      body(Block{queries, {k, std::min(k + kKeys, reach.end)}});
    }
  }
}

/// [queries, keys], true where the query sees the key.
at::Tensor visible(const KeyLines& line, const Block& block,
                   const at::Device& device) {
  const auto options = at::TensorOptions(at::kLong).device(device);
  const at::Tensor q =
      at::arange(block.queries.begin, block.queries.end, options).unsqueeze(1);
  const at::Tensor k = at::arange(block.keys.begin, block.keys.end, options);
  const at::Tensor begin =
      (q + line.begin_shift).clamp(line.begin_min, line.begin_max);
  const at::Tensor end = (q + line.end_shift).clamp(line.end_min, line.end_max);
  return k.ge(begin).logical_and_(k.lt(end));
}

/// A part of one row as [heads, tokens, channels] in the accumulation type.
at::Tensor part(const at::Tensor& tensor, int64_t row, TokenRange tokens) {
  return tensor.select(0, row)
      .narrow(0, tokens.begin, tokens.size())
      .transpose(0, 1)
      .to(accumulation_type(tensor.scalar_type()));
}

/// Which key head each query head uses, on the device.
at::Tensor key_heads(const AttentionInputs& in) {
  return at::arange(in.q.size(2),
                    at::TensorOptions(at::kLong).device(in.q.device()))
      .add_(in.head_offset)
      .floor_divide_(in.heads_per_key_head);
}

/// A block's queries, keys and values, [heads, tokens, channels], and scores.
struct Scores {
  at::Tensor q, k, v;
  at::Tensor s;     // [heads, queries, keys], -inf where not visible
  at::Tensor bend;  // ds / d(scale * q.k), undefined without softcap
};

Scores scores(const AttentionInputs& in, const KeyLines& line,
              const Block& block, const at::Tensor& heads) {
  Scores result;
  result.q = part(in.q, line.row, block.queries);
  result.k = part(in.k, line.row, block.keys).index_select(0, heads);
  result.v = part(in.v, line.row, block.keys).index_select(0, heads);
  result.s = at::matmul(result.q, result.k.transpose(1, 2)).mul_(in.scale);
  if (in.softcap > 0) {
    const at::Tensor bent = (result.s / in.softcap).tanh_();
    result.bend = 1 - bent * bent;
    result.s = bent.mul_(in.softcap);
  }
  result.s.masked_fill_(visible(line, block, in.q.device()).logical_not_(),
                        kMinusInfinity);
  return result;
}

}  // namespace

void attend_tiles_blocked(const AttentionInputs& in,
                          std::span<const KeyLines> lines,
                          Accumulator& running) {
  const at::Tensor heads = key_heads(in);
  const PartialAttention sums = running.sums();
  for (const KeyLines& line : lines) {
    for_each_block(line, in.q.size(2), [&](const Block& block) {
      const Scores score = scores(in, line, block, heads);
      const at::Tensor& s = score.s;
      const at::Tensor lse = s.logsumexp(2);
      const at::Tensor p =
          (s - lse.unsqueeze(2)).exp_().masked_fill_(at::isneginf(s), 0);
      const auto rows = [&](const at::Tensor& tensor) {
        return tensor.narrow(0, line.row, 1)
            .narrow(1, block.queries.begin, block.queries.size());
      };
      PartialAttention before{rows(sums.out), rows(sums.lse)};
      before.add({at::matmul(p, score.v).transpose(0, 1).unsqueeze(0),
                  lse.transpose(0, 1).unsqueeze(0)});
    });
  }
}

void attend_tiles_backward_blocked(const AttentionInputs& in,
                                   std::span<const KeyLines> lines,
                                   const AttentionAnswer& answer,
                                   AttentionGradients& gradients) {
  const at::Tensor heads = key_heads(in);
  const at::Tensor all_dq = gradients.dq.sums().out;
  const at::Tensor all_dk = gradients.dk.sums().out;
  const at::Tensor all_dv = gradients.dv.sums().out;
  for (const KeyLines& line : lines) {
    for_each_block(line, in.q.size(2), [&](const Block& block) {
      const Scores score = scores(in, line, block, heads);
      const at::Tensor dout = part(answer.dout, line.row, block.queries);
      const auto column = [&](const at::Tensor& tensor) {
        return tensor.select(0, line.row)
            .narrow(0, block.queries.begin, block.queries.size())
            .t()
            .unsqueeze(2);
      };
      const at::Tensor hidden = at::isneginf(score.s);
      const at::Tensor p =
          (score.s - column(answer.lse)).exp_().masked_fill_(hidden, 0);
      at::Tensor ds = at::matmul(dout, score.v.transpose(1, 2))
                          .sub_(column(answer.delta()))
                          .mul_(p);
      if (score.bend.defined()) ds = ds.mul_(score.bend);
      ds = ds.mul_(in.scale).masked_fill_(hidden, 0);
      const auto add = [&](const at::Tensor& total, TokenRange tokens,
                           const at::Tensor& value) {
        total.select(0, line.row)
            .narrow(0, tokens.begin, tokens.size())
            .transpose(0, 1)
            .add_(value);
      };
      const auto add_to_key_heads = [&](const at::Tensor& total,
                                        const at::Tensor& value) {
        at::Tensor sum = at::zeros(
            {total.size(2), value.size(1), value.size(2)}, value.options());
        // One head after another: the same sum in every run.
        for (int64_t h = 0; h < value.size(0); ++h) {
          sum.select(0, (h + in.head_offset) / in.heads_per_key_head)
              .add_(value.select(0, h));
        }
        add(total, block.keys, sum);
      };
      add(all_dq, block.queries, at::matmul(ds, score.k));
      add_to_key_heads(all_dk, at::matmul(ds.transpose(1, 2), score.q));
      add_to_key_heads(all_dv, at::matmul(p.transpose(1, 2), dout));
    });
  }
}

}  // namespace longspan
