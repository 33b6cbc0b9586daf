#include <cmath>

#include "longspan/models/convolve.h"
#include "longspan/models/delta.h"
#include "longspan/models/mamba2.h"
#include "longspan/plan/state_plan.h"
#include "tests/models/streams.h"
#include "tests/support/values.h"

namespace longspan::test {
namespace {

// ---- Convolutions.

at::Tensor convolve_alone(const Tensors& tokens, const Tensors& parameters) {
  const at::Tensor &x = tokens[0], &weight = parameters[0];
  Tensors rows;
  for (int64_t t = 0; t < x.size(0); ++t) {
    at::Tensor row = parameters[1];
    for (int64_t back = 0; back < weight.size(2) && back <= t; ++back) {
      row = row + x.select(0, t - back) *
                      weight.select(2, weight.size(2) - 1 - back).select(1, 0);
    }
    rows.push_back(row);
  }
  return at::stack(rows);
}

TEST(ConvolveRuns, GivesEachDocumentAlone) {
  for (const int64_t taps : {1, 4, 9}) {
    expect_alone(
        {[](const Tensors& t, const Tensors& p, const LayerShare& share) {
          return convolve_runs(t[0], p[0], p[1], share);
        }},
        convolve_alone, [](int64_t n) { return Tensors{drawn({n, 3}, 1)}; },
        {drawn({3, 1, taps}, 2), drawn({3}, 3)});
  }
}

// ---- Scans.

constexpr int64_t kHeads = 4, kGroups = 2, kRows = 3, kColumns = 2;

/// As the definition says, token by token.
at::Tensor mamba2_alone(const Tensors& t, const Tensors& p) {
  const at::Tensor &x = t[0], &dt = t[1], &A = p[0], &D = p[1];
  const at::Tensor B = t[2].repeat_interleave(kHeads / kGroups, 1);
  const at::Tensor C = t[3].repeat_interleave(kHeads / kGroups, 1);
  at::Tensor state = at::zeros({kHeads, x.size(2), B.size(2)}, x.options());
  Tensors rows;
  for (int64_t i = 0; i < x.size(0); ++i) {
    const at::Tensor step = dt.select(0, i).view({kHeads, 1, 1});
    state = (step * A.view({kHeads, 1, 1})).exp() * state +
            step * x.select(0, i).unsqueeze(2) * B.select(0, i).unsqueeze(1);
    rows.push_back(state.matmul(C.select(0, i).unsqueeze(2)).squeeze(2) +
                   D.unsqueeze(1) * x.select(0, i));
  }
  return at::stack(rows);
}

Tensors mamba2_tokens(int64_t n) {
  return {drawn({n, kHeads, kRows}, 1), drawn({n, kHeads}, 2).abs(),
          drawn({n, kGroups, kColumns}, 3), drawn({n, kGroups, kColumns}, 4)};
}

TEST(Mamba2Scan, GivesEachDocumentAlone) {
  std::vector<Layer> layers;
  for (const int64_t chunk : {1, 7, 64}) {
    layers.push_back([=](const Tensors& t, const Tensors& p,
                         const LayerShare& share) {
      return mamba2_scan({t[0], t[1], p[0], t[2], t[3], p[1]}, share, chunk);
    });
  }
  expect_alone(layers, mamba2_alone, mamba2_tokens,
               {-drawn({kHeads}, 5).abs() - 0.1, drawn({kHeads}, 6)});
}

/// As the definition says, token by token.
at::Tensor delta_alone(const Tensors& t, const Tensors&) {
  const auto unit = [](const at::Tensor& x) {
    return (x / (x * x).sum(-1, true).add(1e-6).sqrt())
        .repeat_interleave(kHeads / kGroups, 1);
  };
  const at::Tensor q = unit(t[0]), k = unit(t[1]), &v = t[2], &g = t[3],
                   &beta = t[4];
  at::Tensor state = at::zeros({kHeads, k.size(2), v.size(2)}, v.options());
  Tensors rows;
  for (int64_t i = 0; i < v.size(0); ++i) {
    state = state * g.select(0, i).exp().view({kHeads, 1, 1});
    const at::Tensor key = k.select(0, i).unsqueeze(2);  // [H, K, 1]
    const at::Tensor known = state.transpose(1, 2).matmul(key).squeeze(2);
    const at::Tensor change =
        (v.select(0, i) - known) * beta.select(0, i).unsqueeze(1);
    state = state + key * change.unsqueeze(1);
    rows.push_back(
        state.transpose(1, 2).matmul(q.select(0, i).unsqueeze(2)).squeeze(2) /
        std::sqrt(static_cast<double>(k.size(2))));
  }
  return at::stack(rows);
}

Tensors delta_tokens(int64_t n) {
  return {drawn({n, kGroups, kRows}, 1), drawn({n, kGroups, kRows}, 2),
          drawn({n, kHeads, kColumns}, 3), -drawn({n, kHeads}, 4).abs(),
          drawn({n, kHeads}, 5).abs()};
}

TEST(DeltaRule, GivesEachDocumentAlone) {
  std::vector<Layer> layers;
  for (const int64_t chunk : {1, 7, 64}) {
    layers.push_back(
        [=](const Tensors& t, const Tensors&, const LayerShare& share) {
          return delta_rule({t[0], t[1], t[2], t[3], t[4]}, share,
                            {.chunk = chunk});
        });
  }
  expect_alone(layers, delta_alone, delta_tokens, {});
}

// ---- Laws.

/// Over two ranks, with a NaN in one document.
TEST(States, ANanStaysInItsDocument) {
  const Packing packing = Packing::of({17, 11, 20});
  const Ownership owners = Ownership::head_tail(48, 2);
  Tensors delta = delta_tokens(48), mamba = mamba2_tokens(48);
  const double nan = std::nan("");
  delta[2].select(0, 3).fill_(nan);
  mamba[0].select(0, 3).fill_(nan);
  const at::Tensor A = -at::ones({kHeads}, at::kDouble);
  run_ranks(2, [&](const Group& group) {
    const LayerShare share(AttentionLayout::of(owners, {Mask::causal(packing)}),
                           group);
    const at::Tensor mine = token_indices(owners, group.rank());
    const auto own = [&](const at::Tensor& x) {
      return x.index_select(0, mine);
    };
    const auto expect_inside = [&](const at::Tensor& out) {
      const at::Tensor found = out.isnan().flatten(1).any(1);
      EXPECT_FALSE(found.logical_and(mine >= 17).any().item<bool>());
      // Products inside a chunk may carry it to tokens before it.
      EXPECT_TRUE(
          found.logical_or(mine < 3).logical_or(mine >= 17).all().item<bool>());
    };
    expect_inside(delta_rule({own(delta[0]), own(delta[1]), own(delta[2]),
                              own(delta[3]), own(delta[4])},
                             share, {.chunk = 8}));
    expect_inside(mamba2_scan(
        {own(mamba[0]), own(mamba[1]), A, own(mamba[2]), own(mamba[3]), {}},
        share, 8));
  });
}

/// A run sends one pair, however long it is.
TEST(States, BytesAreThoseOfThePlan) {
  for (const int64_t tokens : {48, 96}) {
    const Ownership owners = Ownership::contiguous(tokens, 3);
    const auto layout =
        AttentionLayout::of(owners, {Mask::causal(Packing::single(tokens))});
    run_ranks(3, [&](const Group& group) {
      const LayerShare share(layout, group);
      const at::Tensor mine = token_indices(owners, group.rank());
      Tensors t;
      for (const at::Tensor& x : delta_tokens(tokens)) {
        t.push_back(x.index_select(0, mine));
      }
      const int64_t before = group.sent_bytes();
      delta_rule({t[0], t[1], t[2], t[3], t[4]}, share);
      EXPECT_EQ(group.sent_bytes() - before,
                StatePlan::of(layout, group.rank())
                    .sent_bytes(kHeads * kRows * kRows * 8,
                                kHeads * kRows * kColumns * 8, Pass::forward));
    });
  }
}

/// One document over eight ranks, with states of a megabyte: each rank sends
/// one a round, and not its own to all others.
TEST(States, LargeOnesTravelByAScan) {
  const int64_t tokens = 24, heads = 8, rows = 64, columns = 256;
  const Ownership owners = Ownership::contiguous(tokens, 8);
  const std::vector<Mask> masks = {Mask::causal(Packing::single(tokens))};
  const auto layout = AttentionLayout::of(owners, masks);
  const Tensors whole = {
      drawn({tokens, heads, rows}, 1), drawn({tokens, heads}, 2).abs(),
      drawn({tokens, 1, columns}, 3), drawn({tokens, 1, columns}, 4)};
  const at::Tensor A = -0.1 * at::ones({heads}, at::kDouble);
  const auto scan = [&](const Tensors& t, const LayerShare& share) {
    return mamba2_scan({t[0], t[1], A, t[2], t[3], {}}, share, 2);
  };
  const at::Tensor alone = scan(
      whole,
      LayerShare(AttentionLayout::of(Ownership::contiguous(tokens, 1), masks),
                 Group::solo()));
  run_ranks(8, [&](const Group& group) {
    const at::Tensor mine = token_indices(owners, group.rank());
    Tensors own;
    for (const at::Tensor& x : whole) own.push_back(x.index_select(0, mine));
    const int64_t before = group.sent_bytes();
    const at::Tensor out = scan(own, LayerShare(layout, group));
    test::expect_near(out, alone.index_select(0, mine), "out");
    EXPECT_EQ(
        group.sent_bytes() - before,
        StatePlan::of(layout, group.rank(), 1, StateWay::scan)
            .sent_bytes(heads * 8, heads * rows * columns * 8, Pass::forward));
  });
}

TEST(States, HalfTypesAreSummedInFloat) {
  const LayerShare share(
      AttentionLayout::of(Ownership::contiguous(48, 1),
                          {Mask::causal(Packing::of({19, 29}))}),
      Group::solo());
  const Tensors t = delta_tokens(48);
  Tensors rounded, wide;
  for (const at::Tensor& x : t) {
    rounded.push_back(x.to(at::kBFloat16));
    wide.push_back(rounded.back().to(at::kDouble));
  }
  const at::Tensor found = delta_rule(
      {rounded[0], rounded[1], rounded[2], rounded[3], rounded[4]}, share);
  const at::Tensor exact =
      delta_rule({wide[0], wide[1], wide[2], wide[3], wide[4]}, share);
  EXPECT_EQ(found.scalar_type(), at::kBFloat16);
  // One rounding of the answer, and float32 before it.
  const at::Tensor allowed = exact.abs() * 0x1p-8 + 1e-5;
  EXPECT_TRUE(
      ((found.to(at::kDouble) - exact).abs() <= allowed).all().item<bool>());
}

// ---- Refusals.

LayerShare share_of(int64_t tokens) {
  return LayerShare(
      AttentionLayout::of(Ownership::contiguous(tokens, 1),
                          {Mask::causal(Packing::single(tokens))}),
      Group::solo());
}

TEST(LayerShare, RefusesWhatDoesNotFit) {
  const LayerShare share = share_of(8);
  EXPECT_EQ(message_of([&] {
              convolve_runs(drawn({7, 3}, 1), drawn({3, 1, 4}, 2), {}, share);
            }),
            "convolve_runs: `x` is float64 [7, 3]; expected floating [8, n], "
            "a row for each token of rank 0, on cpu");
  EXPECT_EQ(message_of([&] {
              convolve_runs(drawn({8, 3}, 1), drawn({4, 1, 4}, 2), {}, share);
            }),
            "convolve_runs: `weight` is float64 [4, 1, 4]; expected [3, 1, "
            "taps]");
  Tensors t = delta_tokens(8);
  EXPECT_EQ(message_of([&] {
              delta_rule({t[0], t[1], t[2], t[3], t[3].narrow(1, 0, 1)}, share);
            }),
            "delta_rule: `beta` is float64 [8, 1]; expected floating [8, 4], "
            "a row for each token of rank 0, on cpu");
  EXPECT_EQ(message_of([&] {
              delta_rule({t[0], t[1], t[2], t[3], t[4]}, share, {.chunk = 0});
            }),
            "chunks: `chunk` is 0; expected at least 1");
  t = mamba2_tokens(8);
  const at::Tensor A = -at::ones({kHeads}, at::kDouble);
  EXPECT_EQ(
      message_of([&] { mamba2_scan({t[0], t[1], {}, t[2], t[3], {}}, share); }),
      "mamba2_scan: `A` is not there; expected [4]");
  EXPECT_EQ(message_of([&] {
              mamba2_scan({t[0], t[1], A, drawn({8, 3, 2}, 1), t[3], {}},
                          share);
            }),
            "mamba2_scan: `B` is float64 [8, 3, 2]; expected a number of "
            "groups that divides 4 heads");
  EXPECT_EQ(message_of([&] {
              LayerShare(
                  AttentionLayout::of(Ownership::contiguous(8, 2),
                                      {Mask::causal(Packing::single(8))}),
                  Group::solo());
            }),
            "LayerShare: the ownership is over 2 ranks but the group has 1");
  const Packing packing = Packing::of({5, 3});
  for (const Mask& mask : {Mask::full(packing), Mask::sliding(packing, 4),
                           Mask::causal(packing).with_hidden({{0, 1}}),
                           Mask::causal(packing).with_groups({{1, 3}})}) {
    EXPECT_EQ(message_of([&] {
                LayerShare(
                    AttentionLayout::of(Ownership::contiguous(8, 1), {mask}),
                    Group::solo());
              }),
              "LayerShare: the mask has a window, groups, hidden tokens or "
              "compressed keys, which layers would not see; expected "
              "Mask::causal(packing)");
  }
}

}  // namespace
}  // namespace longspan::test
