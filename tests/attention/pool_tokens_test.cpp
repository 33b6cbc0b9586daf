#include "longspan/attention/pool_tokens.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "longspan/batch/cut.h"
#include "longspan/comm/run_ranks.h"
#include "longspan/comm/tokens_before.h"
#include "longspan/plan/attention_layout.h"

namespace longspan {
namespace {

constexpr int64_t kTokens = 48, kRatio = 4, kChannels = 3;

AttentionLayout layout_over(const Ownership& ownership) {
  return AttentionLayout::of(ownership,
                             {Mask::causal(Packing::of({19, 1, 28}))});
}

std::vector<Ownership> ownerships(int ranks) {
  std::vector<int64_t> sizes(static_cast<std::size_t>(ranks), 5);
  sizes.back() = kTokens - 5 * (ranks - 1);
  return {Ownership::contiguous(kTokens, ranks),
          Ownership::head_tail(kTokens, ranks), Ownership::of_sizes(sizes)};
}

at::Tensor drawn(at::IntArrayRef sizes, uint64_t seed) {
  at::manual_seed(seed);
  return at::randn(sizes, at::TensorOptions(at::kDouble));
}

TEST(PoolTokens, GivesThePoolsOfOneRank) {
  const at::Tensor values = drawn({kTokens, 2 * kChannels}, 1);
  const at::Tensor gates = drawn({kTokens, 2 * kChannels}, 2);
  const at::Tensor bias = drawn({kRatio, 2 * kChannels}, 3);
  const auto pools_on = [&](const Group& group, const Ownership& ownership) {
    const auto plan = PoolPlan::of(layout_over(ownership), kRatio,
                                   PoolOverlap::previous, group.rank());
    const auto tables = PoolTables::of(plan, at::kCPU);
    const at::Tensor mine = token_indices(ownership, group.rank());
    const at::Tensor made =
        pool_tokens(values.index_select(0, mine), gates.index_select(0, mine),
                    bias, tables, group);
    EXPECT_EQ(made.size(0), plan.here());
    return gather_pools(made, plan, tables, group);
  };
  const at::Tensor alone =
      pools_on(Group::solo(), Ownership::contiguous(kTokens, 1));
  EXPECT_EQ(alone.size(0), 4 + 7);
  for (const int ranks : {2, 3, 4}) {
    for (const Ownership& ownership : ownerships(ranks)) {
      run_ranks(ranks, [&](const Group& group) {
        EXPECT_TRUE(
            at::allclose(pools_on(group, ownership), alone, 1e-13, 1e-13))
            << ownership.to_string();
      });
    }
  }
}

TEST(TokensBefore, BringsTheTokensBeforeEachRun) {
  // A token's own index, so that a wrong one names its source.
  const at::Tensor stream =
      at::arange(1, kTokens + 1, at::TensorOptions(at::kDouble)).unsqueeze(1);
  constexpr int64_t kCount = 7;
  for (const int ranks : {1, 2, 3, 4}) {
    for (const Ownership& ownership : ownerships(ranks)) {
      run_ranks(ranks, [&](const Group& group) {
        const auto plan =
            HaloPlan::of(layout_over(ownership), kCount, group.rank());
        const at::Tensor before = tokens_before(
            stream.index_select(0, token_indices(ownership, group.rank())),
            sends_tensor(plan.sends()),
            at::tensor(plan.places(), at::TensorOptions(at::kLong)),
            plan.received(), group);
        std::vector<double> expected;
        for (const auto& [row, run] : plan.runs()) {
          for (int64_t back = kCount; back > 0; --back) {
            expected.push_back(
                back > run.position
                    ? 0
                    : static_cast<double>(run.tokens.begin - back + 1));
          }
        }
        EXPECT_TRUE(
            at::equal(before.flatten(),
                      at::tensor(expected, at::TensorOptions(at::kDouble))))
            << ownership.to_string();
      });
    }
  }
}

}  // namespace
}  // namespace longspan
