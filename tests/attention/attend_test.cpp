#include "longspan/attention/attend.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <mutex>

#include "longspan/batch/cut.h"
#include "longspan/comm/run_ranks.h"
#include "tests/support/values.h"

namespace longspan {
namespace {

constexpr int64_t kHeads = 6, kKeyHeads = 2, kDim = 8;

struct Inputs {
  at::Tensor q, k, v, dout, sink;
  explicit Inputs(int64_t tokens) {
    at::manual_seed(3);
    const auto draw = [&](int64_t heads) {
      return at::randn({tokens, heads, kDim}, at::kDouble);
    };
    q = draw(kHeads);
    k = draw(kKeyHeads);
    v = draw(kKeyHeads);
    dout = draw(kHeads);
    sink = at::linspace(-1, 1, kHeads, at::kDouble);
  }
};

/// out, lse, dq, dk, dv of some tokens, and dsink.
std::vector<at::Tensor> answer_of(const Inputs& all, const at::Tensor& tokens,
                                  const AttentionLayout& layout,
                                  const Group& group, AttendOptions options) {
  const auto share = [&](const at::Tensor& tensor) {
    return tensor.index_select(0, tokens).requires_grad_();
  };
  const at::Tensor q = share(all.q), k = share(all.k), v = share(all.v);
  options.sink = all.sink.clone().requires_grad_();
  const Attended answer = attend(q, k, v, layout, group, options);
  answer.out.backward(all.dout.index_select(0, tokens));
  return {answer.out.detach(), answer.lse, q.grad(), k.grad(), v.grad(),
          options.sink.grad()};
}

class AttendOverRanks : public ::testing::TestWithParam<const char*> {};

TEST_P(AttendOverRanks, GivesWhatOneRankGives) {
  // 96 tokens, which every number of ranks below splits into even halves.
  const auto packing = Packing::of({30, 1, 17, 20}, {32, 4, 20, 28}, 96);
  const Inputs all(packing.tokens());
  const auto mask = Mask::causal(packing);
  const auto alone = answer_of(
      all, at::arange(packing.tokens()),
      AttentionLayout::of(Ownership::contiguous(packing.tokens(), 1), {mask}),
      Group::solo(), {});
  for (int ranks : {2, 3, 4}) {
    for (const Ownership& ownership :
         {Ownership::contiguous(packing.tokens(), ranks),
          Ownership::head_tail(packing.tokens(), ranks)}) {
      const auto layout = AttentionLayout::of(ownership, {mask});
      std::vector<std::vector<at::Tensor>> parts(
          static_cast<std::size_t>(ranks));
      run_ranks(ranks, [&](const Group& group) {
        AttendOptions options;
        options.strategy = Strategy::named(GetParam());
        parts[static_cast<std::size_t>(group.rank())] =
            answer_of(all, token_indices(ownership, group.rank()), layout,
                      group, options);
      });
      at::Tensor dsink = at::zeros({kHeads}, at::kDouble);
      for (int rank = 0; rank < ranks; ++rank) {
        const auto& part = parts[static_cast<std::size_t>(rank)];
        const at::Tensor tokens = token_indices(ownership, rank);
        for (std::size_t i = 0; i < 5; ++i) {
          EXPECT_TRUE(at::allclose(part[i], alone[i].index_select(0, tokens),
                                   1e-10, 1e-12))
              << ranks << " ranks, rank " << rank << ", answer " << i;
        }
        dsink += part[5];
      }
      EXPECT_TRUE(at::allclose(dsink, alone[5], 1e-10, 1e-12));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Strategies, AttendOverRanks,
                         ::testing::Values("ring", "gathered", "needed",
                                           "head_parallel",
                                           "head_parallel_ring"),
                         [](const auto& info) {
                           return std::string(info.param);
                         });

TEST(Attend, RefusesAGroupOfAnotherSize) {
  const Inputs all(8);
  const auto layout = AttentionLayout::of(Ownership::contiguous(8, 2),
                                          {Mask::causal(Packing::single(8))});
  EXPECT_EQ(test::message_of(
                [&] { attend(all.q, all.k, all.v, layout, Group::solo()); }),
            "attend: the ownership is over 2 ranks but the group has 1");
}

TEST(Attend, RefusesAStrategyThatHasNoName) {
  const Inputs all(8);
  const auto layout = AttentionLayout::of(Ownership::contiguous(8, 1),
                                          {Mask::causal(Packing::single(8))});
  AttendOptions options;
  options.strategy = {KeyTransport::gathered, 2};
  EXPECT_EQ(test::message_of([&] {
              attend(all.q, all.k, all.v, layout, Group::solo(), options);
            }),
            "attend: the strategy is gathered of teams of 2; teams of several "
            "ranks pass keys on in a ring");
}

TEST(Attend, KeepsRecentPlans) {
  const auto layout = layout_tensor(AttentionLayout::of(
      Ownership::contiguous(8, 1), {Mask::causal(Packing::single(8))}));
  const auto plan = plan_for(layout, "ring", 0, 1, 1, Group::solo());
  EXPECT_EQ(plan_for(layout.clone(), "ring", 0, 1, 1, Group::solo()), plan);
  EXPECT_NE(plan_for(layout, "ring", 0, 1, 2, Group::solo()), plan);
}

}  // namespace
}  // namespace longspan
