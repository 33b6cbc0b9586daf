#include "longspan/attention/state_tables.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "longspan/comm/run_ranks.h"
#include "longspan/plan/attention_layout.h"

namespace longspan {
namespace {

constexpr int64_t kTokens = 48, kHeads = 2, kRows = 3, kColumns = 4;

/// Without a generator, which the threads would share.
at::Tensor drawn(at::IntArrayRef sizes, int64_t seed) {
  return at::arange(c10::multiply_integers(sizes),
                    at::TensorOptions(at::kDouble))
      .mul_(1.7)
      .add_(0.31 * static_cast<double>(seed * seed + seed))
      .sin_()
      .view(sizes);
}

/// Of the run that begins at a token, whoever holds it.
at::Tensor state_of(int64_t token) {
  return drawn({kHeads, kRows, kColumns}, token);
}
at::Tensor transition_of(int64_t token, int64_t axes) {
  std::vector<int64_t> sizes(static_cast<std::size_t>(axes), kRows);
  sizes.insert(sizes.begin(), kHeads);
  return drawn(sizes, 1000 + token);
}

at::Tensor applied(const at::Tensor& transition, const at::Tensor& state) {
  if (transition.dim() == 3) return transition.matmul(state);
  if (transition.dim() == 2) return transition.unsqueeze(-1) * state;
  return transition.view({kHeads, 1, 1}) * state;
}

/// A rank's states are those of reading each document from its first token,
/// and it sends what its plan says.
void check_rank(const AttentionLayout& layout, int64_t axes, StateWay way,
                const Group& group) {
  const StatePlan plan = StatePlan::of(layout, group.rank(), 1, way);
  std::vector<at::Tensor> states, transitions, expected;
  for (const int64_t chained : plan.chained()) {
    const DocumentRun& run = plan.runs()[static_cast<std::size_t>(chained)].run;
    states.push_back(state_of(run.tokens.begin));
    transitions.push_back(transition_of(run.tokens.begin, axes));
    at::Tensor at_hand = at::zeros_like(states[0]);
    for (int64_t token = run.tokens.begin - run.position;
         token < run.tokens.begin;) {
      at_hand = applied(transition_of(token, axes), at_hand) + state_of(token);
      token =
          std::min(layout.ownership.holding(token).range.end, run.tokens.begin);
    }
    expected.push_back(at_hand);
  }
  const auto stacked = [&](const std::vector<at::Tensor>& rows,
                           const at::Tensor& like) {
    return rows.empty() ? at::empty_like(like).unsqueeze(0).narrow(0, 0, 0)
                        : at::stack(rows);
  };
  const int64_t before = group.sent_bytes();
  const at::Tensor incoming =
      carry_states(stacked(transitions, transition_of(0, axes)),
                   stacked(states, state_of(0)), state_tables(plan), group);
  EXPECT_EQ(group.sent_bytes() - before,
            plan.sent_bytes(transition_of(0, axes).numel() * 8,
                            state_of(0).numel() * 8, Pass::forward));
  EXPECT_TRUE(
      at::allclose(incoming, stacked(expected, state_of(0)), 1e-13, 1e-13))
      << layout.ownership.to_string() << " " << axes << " " << name_of(way);
}

/// Axes of a transition, and how pairs travel.
constexpr std::pair<int64_t, StateWay> kKinds[] = {
    {0, StateWay::direct}, {1, StateWay::direct}, {2, StateWay::direct},
    {0, StateWay::scan},   {1, StateWay::scan},   {2, StateWay::scan}};

TEST(CarryStates, GivesWhatReadingTheDocumentGives) {
  const Packing packing = Packing::of({19, 1, 28});
  for (const int ranks : {1, 2, 3, 4, 7}) {
    std::vector<int64_t> sizes(static_cast<std::size_t>(ranks), 5);
    sizes.back() = kTokens - 5 * (ranks - 1);
    std::vector<Ownership> ownerships = {Ownership::of_sizes(sizes)};
    if (kTokens % (2 * ranks) == 0) {
      ownerships.push_back(Ownership::contiguous(kTokens, ranks));
      ownerships.push_back(Ownership::head_tail(kTokens, ranks));
    }
    for (const Ownership& ownership : ownerships) {
      const auto layout =
          AttentionLayout::of(ownership, {Mask::causal(packing)});
      run_ranks(ranks, [&](const Group& group) {
        for (const auto& [axes, way] : kKinds) {
          check_rank(layout, axes, way, group);
        }
      });
    }
  }
}

}  // namespace
}  // namespace longspan
