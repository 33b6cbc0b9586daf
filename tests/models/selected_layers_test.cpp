#include <cmath>
#include <limits>
#include <optional>

#include "longspan/models/deepseek_v4.h"
#include "longspan/models/glm_dsa.h"
#include "longspan/models/rotary.h"
#include "tests/models/streams.h"
#include "tests/support/values.h"

namespace longspan::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Which keys [queries, keys] each query takes: the `slots` greatest of those
/// that it sees, of equal ones the lower.
at::Tensor greatest(const at::Tensor& scores, const at::Tensor& seen,
                    int64_t slots) {
  const at::Tensor visible = scores.masked_fill(~seen, -kInfinity);
  const at::Tensor order =
      std::get<1>(visible.sort(/*stable=*/true, -1, /*descending=*/true));
  const at::Tensor first = order.narrow(1, 0, std::min(slots, order.size(1)));
  return at::zeros_like(seen)
      .scatter(1, first, at::ones_like(first, at::kBool))
      .logical_and(seen);
}

at::Tensor index_scores(const at::Tensor& q, const at::Tensor& k,
                        const at::Tensor& weights) {
  // [queries, heads, keys]
  return (q.matmul(k.t()).relu() * weights.unsqueeze(2)).sum(1);
}

at::Tensor before(int64_t tokens) {  // [queries, keys]: not after the query
  return at::ones({tokens, tokens}, at::kBool).tril();
}

// ---- GLM-5.2: rows from which heads are made.

constexpr int64_t kHeads = 3, kKeys = 4, kValues = 5, kLatent = 6, kTurned = 2;

/// With keys and values of every head, and all scores.
at::Tensor glm_alone(const Tensors& t, const Tensors& p, int64_t slots) {
  const at::Tensor &q = t[0], &rows = t[1];
  const at::Tensor latent = rows.narrow(1, 0, kLatent);
  const at::Tensor turned = rows.narrow(1, kLatent, kTurned);
  const at::Tensor made =  // [tokens, heads, keys and values]
      at::einsum("tc,hkc->thk", {latent, p[0]});
  const at::Tensor keys = at::cat(
      {made.narrow(2, 0, kKeys), turned.unsqueeze(1).expand({-1, kHeads, -1})},
      2);
  const at::Tensor values = made.narrow(2, kKeys, kValues);
  const at::Tensor taken =
      greatest(index_scores(t[2], t[3], t[4]), before(q.size(0)), slots);
  const at::Tensor logits = at::einsum("qhk,shk->hqs", {q, keys}) /
                            std::sqrt(static_cast<double>(q.size(2)));
  return at::einsum(
      "hqs,shv->qhv",
      {logits.masked_fill(~taken, -kInfinity).softmax(-1), values});
}

Tensors glm_tokens(int64_t n) {
  return {drawn({n, kHeads, kKeys + kTurned}, 1),
          drawn({n, kLatent + kTurned}, 2), drawn({n, 2, 4}, 3),
          drawn({n, 4}, 4), drawn({n, 2}, 5)};
}

Layer glm_layer(int64_t slots, Fetch fetch) {
  return [=](const Tensors& t, const Tensors& p, const LayerShare& share) {
    return glm_dsa({.q = t[0],
                    .rows = t[1],
                    .expansion = p[0],
                    .index_q = t[2],
                    .index_k = t[3],
                    .index_weights = t[4]},
                   share, {.slots = slots, .fetch = fetch})
        .out;
  };
}

TEST(GlmDsa, GivesEachDocumentAlone) {
  for (const int64_t slots : {6, 100}) {
    expect_alone(
        {glm_layer(slots, Fetch::gathered), glm_layer(slots, Fetch::needed)},
        [=](const Tensors& t, const Tensors& p) {
          return glm_alone(t, p, slots);
        },
        glm_tokens, {drawn({kHeads, kKeys + kValues, kLatent}, 6)});
  }
}

/// A layer that takes a selection over gives what one with that indexer gives.
TEST(GlmDsa, TakesASelectionOver) {
  const auto again = [](const Tensors& t, const Tensors& p,
                        const LayerShare& share) {
    const auto first = glm_dsa({.q = t[0],
                                .rows = t[1],
                                .expansion = p[0],
                                .index_q = t[2],
                                .index_k = t[3],
                                .index_weights = t[4]},
                               share, {.slots = 6});
    return glm_dsa({.q = t[0],
                    .rows = t[1],
                    .expansion = p[0],
                    .selection = first.selection},
                   share, {})
        .out;
  };
  expect_alone(
      {again},
      [](const Tensors& t, const Tensors& p) { return glm_alone(t, p, 6); },
      glm_tokens, {drawn({kHeads, kKeys + kValues, kLatent}, 6)});
}

LayerShare share_of(int64_t tokens) {
  return LayerShare(
      AttentionLayout::of(Ownership::contiguous(tokens, 1),
                          {Mask::causal(Packing::single(tokens))}),
      Group::solo());
}

/// What trains the indexer comes out where it is asked for.
TEST(GlmDsa, TrainsItsIndexer) {
  const Tensors t = leaves(glm_tokens(8));
  const auto found = glm_dsa({.q = t[0],
                              .rows = t[1],
                              .expansion = drawn({kHeads, 9, kLatent}, 6),
                              .index_q = t[2],
                              .index_k = t[3],
                              .index_weights = t[4]},
                             share_of(8), {.slots = 4, .train_indexer = true});
  EXPECT_EQ(found.scores.sizes(), (at::IntArrayRef{8, 4}));
  EXPECT_EQ(found.target.sizes(), (at::IntArrayRef{8, 4}));
  found.scores.masked_fill(found.selection < 0, 0).sum().backward();
  EXPECT_GT(t[2].grad().abs().sum().item<double>(), 0);
  EXPECT_EQ(gradient_of(t[0]).abs().sum().item<double>(), 0);
}

TEST(GlmDsa, RefusesWhatDoesNotFit) {
  const LayerShare share = share_of(8);
  const Tensors t = glm_tokens(8);
  const at::Tensor expansion = drawn({kHeads, 9, kLatent}, 6);
  EXPECT_EQ(message_of([&] {
              glm_dsa({.q = t[0],
                       .rows = t[1],
                       .expansion = expansion,
                       .index_q = t[2],
                       .index_k = t[3],
                       .index_weights = t[4]},
                      share, {});
            }),
            "glm_dsa: `slots` is 0; expected at least 1");
  EXPECT_EQ(message_of([&] {
              glm_dsa({.q = t[0], .rows = t[1], .expansion = expansion}, share,
                      {.slots = 4});
            }),
            "glm_dsa: `index_q` is not there; expected floating [8, n, n], a "
            "row for each token of rank 0, on cpu");
  EXPECT_EQ(
      message_of([&] {
        glm_dsa(
            {.q = t[0], .rows = t[1].narrow(1, 0, 5), .expansion = expansion},
            share, {.slots = 4});
      }),
      "glm_dsa: `rows` is float64 [8, 5], `q` float64 [8, 3, 6] and "
      "`expansion` float64 [3, 9, 6]; expected [tokens, C + R], "
      "[tokens, H, K + R] and [H, K + V, C]");
}

// ---- DeepSeek-V4: a window, and pools of the tokens before.

constexpr int64_t kDim = 6, kIndexHeads = 2, kIndexDim = 4, kWindow = 5;
const RotaryConfig kRotary = {.channels = 4, .theta = 100};

/// Pairs 2j and 2j + 1 of the last channels turn; x [n, .., D].
at::Tensor turned(const at::Tensor& x, const at::Tensor& positions,
                  double sign = 1) {
  Tensors channels = x.unbind(-1);
  const int64_t first = std::ssize(channels) - kRotary.channels;
  for (int64_t j = 0; j < kRotary.channels / 2; ++j) {
    at::Tensor angle =
        positions.to(at::kDouble) *
        std::pow(kRotary.theta, -2.0 * static_cast<double>(j) / 4) * sign;
    while (angle.dim() < x.dim() - 1) angle = angle.unsqueeze(-1);
    at::Tensor& a = channels[static_cast<std::size_t>(first + 2 * j)];
    at::Tensor& b = channels[static_cast<std::size_t>(first + 2 * j + 1)];
    const at::Tensor one = a * angle.cos() - b * angle.sin();
    b = a * angle.sin() + b * angle.cos();
    a = one;
  }
  return at::stack(channels, -1);
}

/// Pools of one document: [pools, D], normed and turned.
at::Tensor pooled(const at::Tensor& values, const at::Tensor& gates,
                  const at::Tensor& bias, const at::Tensor& norm,
                  int64_t ratio) {
  const int64_t dim = norm.size(0), count = values.size(0) / ratio;
  const bool overlap = values.size(1) == 2 * dim;
  Tensors pools;
  for (int64_t w = 0; w < count; ++w) {
    const auto window = [&](const at::Tensor& x, int64_t which) {
      return x.narrow(0, which * ratio, ratio);
    };
    const int64_t own = overlap ? dim : 0;
    at::Tensor v = window(values, w).narrow(1, own, dim);
    at::Tensor g = (window(gates, w) + bias).narrow(1, own, dim);
    if (overlap && w > 0) {
      v = at::cat({window(values, w - 1).narrow(1, 0, dim), v});
      g = at::cat({(window(gates, w - 1) + bias).narrow(1, 0, dim), g});
    }
    pools.push_back((v * g.softmax(0)).sum(0));
  }
  if (pools.empty()) return at::zeros({0, dim}, values.options());
  const at::Tensor made = at::stack(pools);
  const at::Tensor normed =
      made / (made * made).mean(-1, true).add(1e-6).sqrt() * norm;
  return turned(normed, at::arange(count) * ratio);
}

enum class Pooling { none, heavy, selected };

struct V4Case {
  Pooling pooling = Pooling::none;
  int64_t ratio = 0, slots = 0;
  int64_t halves() const { return pooling == Pooling::selected ? 2 : 1; }
};

/// q, kv, values, gates, index values, index gates, index q, index weights.
Tensors v4_tokens(const V4Case& c, int64_t n) {
  return {drawn({n, kHeads, kDim}, 1),
          drawn({n, kDim}, 2),
          drawn({n, c.halves() * kDim}, 3),
          drawn({n, c.halves() * kDim}, 4),
          drawn({n, c.halves() * kIndexDim}, 5),
          drawn({n, c.halves() * kIndexDim}, 6),
          drawn({n, kIndexHeads, kIndexDim}, 7),
          drawn({n, kIndexHeads}, 8)};
}

/// sinks, bias, norm, index bias, index norm.
Tensors v4_parameters(const V4Case& c) {
  const int64_t ratio = std::max<int64_t>(c.ratio, 1);
  return {drawn({kHeads}, 9), drawn({ratio, c.halves() * kDim}, 10),
          drawn({kDim}, 11), drawn({ratio, c.halves() * kIndexDim}, 12),
          drawn({kIndexDim}, 13)};
}

at::Tensor v4_alone(const V4Case& c, const Tensors& t, const Tensors& p) {
  const int64_t n = t[0].size(0);
  const at::Tensor positions = at::arange(n);
  const at::Tensor q = turned(t[0], positions);
  at::Tensor rows = turned(t[1], positions);
  const at::Tensor back = positions.unsqueeze(1) - positions;
  at::Tensor seen = (back >= 0).logical_and(back < kWindow);
  if (c.pooling != Pooling::none) {
    const at::Tensor pools = pooled(t[2], t[3], p[1], p[2], c.ratio);
    const at::Tensor ended =
        at::arange(pools.size(0)).unsqueeze(0) <
        ((positions + 1).div(c.ratio, "floor")).unsqueeze(1);
    at::Tensor taken = ended;
    if (c.pooling == Pooling::selected) {
      const at::Tensor keys = pooled(t[4], t[5], p[3], p[4], c.ratio);
      taken = greatest(index_scores(turned(t[6], positions), keys, t[7]), ended,
                       c.slots);
    }
    rows = at::cat({rows, pools});
    seen = at::cat({seen, taken}, 1);
  }
  const at::Tensor logits = at::einsum("qhd,sd->hqs", {q, rows}) /
                            std::sqrt(static_cast<double>(kDim));
  const at::Tensor sinks = p[0].view({-1, 1, 1}).expand({-1, n, 1});
  const at::Tensor weights =
      at::cat({logits.masked_fill(~seen, -kInfinity), sinks}, 2)
          .softmax(-1)
          .narrow(2, 0, rows.size(0));
  return turned(at::einsum("hqs,sd->qhd", {weights, rows}), positions, -1);
}

at::Tensor v4_over_ranks(const V4Case& c, const Tensors& t, const Tensors& p,
                         const LayerShare& share) {
  DeepseekV4Tensors tensors = {.q = t[0], .kv = t[1], .sinks = p[0]};
  if (c.pooling != Pooling::none) tensors.pools = {t[2], t[3], p[1], p[2]};
  if (c.pooling == Pooling::selected) {
    tensors.index_pools = {t[4], t[5], p[3], p[4]};
    tensors.index_q = t[6];
    tensors.index_weights = t[7];
  }
  return deepseek_v4(tensors, share,
                     {.window = kWindow,
                      .ratio = c.ratio,
                      .slots = c.slots,
                      .rotary = kRotary});
}

class DeepseekV4 : public ::testing::TestWithParam<V4Case> {};

TEST_P(DeepseekV4, GivesEachDocumentAlone) {
  const V4Case c = GetParam();
  expect_alone(
      {[=](const Tensors& t, const Tensors& p, const LayerShare& share) {
        return v4_over_ranks(c, t, p, share);
      }},
      [=](const Tensors& t, const Tensors& p) { return v4_alone(c, t, p); },
      [=](int64_t n) { return v4_tokens(c, n); }, v4_parameters(c));
}

INSTANTIATE_TEST_SUITE_P(
    Usual, DeepseekV4,
    ::testing::Values(V4Case{}, V4Case{Pooling::heavy, 7},
                      V4Case{Pooling::heavy, 100},  // no document makes one
                      V4Case{Pooling::selected, 4, 2},
                      V4Case{Pooling::selected, 4, 100}));

TEST(DeepseekV4Layer, RefusesWhatDoesNotFit) {
  const V4Case c{Pooling::selected, 4, 2};
  const LayerShare share = share_of(8);
  const Tensors p = v4_parameters(c);
  Tensors t = v4_tokens(c, 8);
  const auto refused = [&](const V4Case& other) {
    return message_of([&] { v4_over_ranks(other, t, p, share); });
  };
  EXPECT_EQ(refused({Pooling::selected, 4, 0}),
            "deepseek_v4: `slots` is 0; expected at least 1");
  EXPECT_EQ(refused({Pooling::heavy, 0, 0}),
            "deepseek_v4: `ratio` is 0; pools have at least 1 token");
  t[4] = t[4].narrow(1, 0, kIndexDim);
  EXPECT_EQ(refused(c),
            "deepseek_v4: `pools` and `index_pools` are not pools of the same "
            "tokens: one of them looks at the window before its own");
  t[2] = t[2].narrow(1, 0, 7);
  EXPECT_EQ(refused(c),
            "deepseek_v4: `pools.values` is float64 [8, 7]; expected 6 "
            "channels, or twice as many with an overlap");
}

}  // namespace
}  // namespace longspan::test
