#include "longspan/plan/state_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "longspan/plan/attention_layout.h"
#include "tests/support/property.h"
#include "tests/support/values.h"

namespace longspan {
namespace {

using test::at;

/// Two rows with the same documents in two orders, cut by one ownership.
AttentionLayout layout_of(const test::OwnershipCase& owners) {
  const Packing packing = owners.packing.packing();
  return AttentionLayout::of(
      owners.ownership(),
      {Mask::causal(packing), Mask::causal(Packing::single(packing.tokens()))});
}

/// A run of a document: row, document and position.
using Name = std::tuple<int64_t, int64_t, int64_t>;

/// What a rank holds of each pass: names of its own chained runs and of those
/// whose states and transitions came.
struct Held {
  std::vector<Name> states, transitions;
};

Name name_of(const StatePlan& plan, int64_t chained) {
  const auto& [row, run] = at(plan.runs(), at(plan.chained(), chained));
  return {row, run.document, run.position};
}

Held held_by(const StatePlan& plan, const std::vector<StatePlan>& all,
             Pass pass) {
  Held held;
  for (int64_t i = 0; i < std::ssize(plan.chained()); ++i) {
    held.states.push_back(name_of(plan, i));
  }
  held.transitions = held.states;
  for (int from = 0; from < std::ssize(all); ++from) {
    for (const StateSend& send : plan.lists(pass).sends) {
      if (send.from != from || send.to != plan.rank()) continue;
      const Name name = name_of(at(all, from), send.run);
      held.states.push_back(name);
      if (send.transition != 0) held.transitions.push_back(name);
    }
  }
  return held;
}

void every_run_gets_what_lies_before_it(const test::OwnershipCase& owners) {
  const AttentionLayout layout = layout_of(owners);
  std::vector<StatePlan> plans;
  for (int rank = 0; rank < layout.ownership.ranks(); ++rank) {
    plans.push_back(StatePlan::of(layout, rank, 2));
  }
  // All runs of each document, in order.
  std::map<std::pair<int64_t, int64_t>, std::vector<int64_t>> documents;
  for (const StatePlan& plan : plans) {
    for (const auto& [row, run] : plan.runs()) {
      documents[{row, run.document}].push_back(run.position);
    }
  }
  for (auto& [document, positions] : documents) std::ranges::sort(positions);
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    for (const StatePlan& plan : plans) {
      ASSERT_EQ(plan.lists(pass).sends, plans[0].lists(pass).sends);
      const Held held = held_by(plan, plans, pass);
      std::vector<bool> given(plan.chained().size());
      // Positions folded so far; of all but the first by their transition.
      std::vector<int64_t> folded;
      for (const StateStep& step : plan.lists(pass).steps) {
        if (step.gives != StateStep::kNone) {
          const auto [row, document, position] = name_of(plan, step.gives);
          std::vector<int64_t> before = documents.at({row, document});
          ASSERT_GT(before.size(), 1u);
          if (pass == Pass::backward) std::ranges::reverse(before);
          before.erase(std::ranges::find(before, position), before.end());
          ASSERT_EQ(folded, before);
          given[static_cast<std::size_t>(step.gives)] = true;
        }
        if (step.state == StateStep::kNone) {
          folded.clear();
          continue;
        }
        const Name name = at(held.states, step.state);
        if (folded.empty()) {
          ASSERT_EQ(step.transition, StateStep::kNone);
        } else {
          ASSERT_EQ(at(held.transitions, step.transition), name);
        }
        folded.push_back(std::get<2>(name));
      }
      ASSERT_THAT(given, ::testing::Each(true));
      // Nothing comes twice.
      std::vector<Name> names = held.states;
      std::ranges::sort(names);
      ASSERT_EQ(std::ranges::adjacent_find(names), names.end());
    }
  }
}

TEST(StatePlan, EveryRunGetsWhatLiesBeforeIt) {
  test::for_all(
      300,
      [](test::Random& random) {
        return test::draw_ownership(random, test::draw_packing(random, 24, 4));
      },
      every_run_gets_what_lies_before_it);
}

TEST(StatePlan, SendsPairsToLaterRuns) {
  const auto layout = AttentionLayout::of(Ownership::contiguous(12, 3),
                                          {Mask::causal(Packing::single(12))});
  const StatePlan plan = StatePlan::of(layout, 1);
  EXPECT_EQ(plan.lists(Pass::forward).sends,
            (std::vector<StateSend>{{0, 1, 0, 0}, {0, 2, 0, 0}, {1, 2, 0, 1}}));
  EXPECT_EQ(plan.lists(Pass::backward).sends,
            (std::vector<StateSend>{{1, 0, 0, 1}, {2, 0, 0, 0}, {2, 1, 0, 0}}));
  EXPECT_EQ(plan.lists(Pass::forward).steps,
            (std::vector<StateStep>{{-1, 1, -1}, {0, -1, -1}}));
  EXPECT_EQ(plan.sent_bytes(100, 10, Pass::forward), 110);
  EXPECT_EQ(StatePlan::of(layout, 0).sent_bytes(100, 10, Pass::forward), 20);
  EXPECT_EQ(StatePlan::of(layout, 2).sent_bytes(100, 10, Pass::forward), 0);
}

TEST(StatePlan, DocumentsOfOneRunCarryNothing) {
  const auto layout = AttentionLayout::of(
      Ownership::contiguous(8, 2), {Mask::causal(Packing::of({3, 1, 4}))});
  const StatePlan plan = StatePlan::of(layout, 0);
  EXPECT_EQ(plan.runs().size(), 2u);
  EXPECT_TRUE(plan.chained().empty());
  EXPECT_TRUE(plan.lists(Pass::forward).sends.empty());
  EXPECT_TRUE(plan.lists(Pass::forward).steps.empty());
}

TEST(StatePlan, RefusesWhatItCannotRead) {
  const auto layout = AttentionLayout::of(Ownership::contiguous(8, 2),
                                          {Mask::causal(Packing::single(8))});
  EXPECT_EQ(test::message_of([&] { StatePlan::of(layout, 2); }),
            "StatePlan: rank 2 of 2");
  EXPECT_EQ(test::message_of([&] {
              StatePlan::of(layout, 0).sent_bytes(-1, 4, Pass::forward);
            }),
            "StatePlan: transitions of -1 and states of 4 bytes");
}

}  // namespace
}  // namespace longspan
