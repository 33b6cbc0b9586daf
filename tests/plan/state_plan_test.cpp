#include "longspan/plan/state_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <map>
#include <optional>
#include <tuple>
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

using test::Random;

/// A run of a document: row, document and position.
using Name = std::tuple<int64_t, int64_t, int64_t>;

Name name_of(const StatePlan& plan, int64_t chained) {
  const auto& [row, run] = at(plan.runs(), at(plan.chained(), chained));
  return {row, run.document, run.position};
}

/// All runs of each document, in the order of a pass.
using Documents = std::map<std::pair<int64_t, int64_t>, std::vector<Name>>;

Documents documents_of(const std::vector<StatePlan>& plans, Pass pass) {
  Documents documents;
  for (const StatePlan& plan : plans) {
    for (const auto& [row, run] : plan.runs()) {
      documents[{row, run.document}].push_back(
          {row, run.document, run.position});
    }
  }
  for (auto& [document, names] : documents) {
    std::ranges::sort(names);
    if (pass == Pass::backward) std::ranges::reverse(names);
  }
  return documents;
}

/// A pair is known by the runs that it was made of, in order, and by whether it
/// has a transition.
struct Pair {
  std::vector<Name> runs;
  bool transition = true;
};

/// Does what the plans of all ranks say, with names in place of numbers.
class Play {
 public:
  Play(const std::vector<StatePlan>& plans, Pass pass)
      : plans_(plans),
        pass_(pass),
        places_(plans.size()),
        given_(plans.size()) {
    for (std::size_t rank = 0; rank < plans.size(); ++rank) {
      const int64_t chained = std::ssize(plans[rank].chained());
      for (int64_t i = 0; i < chained; ++i) {
        places_[rank].push_back({{name_of(plans[rank], i)}});
      }
      given_[rank].resize(static_cast<std::size_t>(chained));
    }
    constexpr int64_t kRounds = 12;
    for (int64_t round = 0; round < kRounds; ++round) {
      exchange(round);
      for (std::size_t rank = 0; rank < plans.size(); ++rank) {
        fold(rank, round);
      }
    }
  }

  /// What came into each chained run of a rank; nothing where nothing was
  /// given.
  const auto& given(std::size_t rank) const { return given_[rank]; }
  int64_t most_sent_a_round() const { return most_sent_; }

 private:
  void exchange(int64_t round) {
    std::vector<std::pair<StateSend, Pair>> letters;
    std::map<std::pair<int64_t, Name>, int64_t> sent;
    for (const StateSend& send : plans_[0].lists(pass_).sends) {
      if (send.round != round) continue;
      ASSERT_NE(send.from, send.to);
      Pair pair = at(at(places_, send.from), send.place);
      ASSERT_TRUE(send.transition == 0 || pair.transition);
      pair.transition = send.transition != 0;
      const Name last = pair.runs.back();
      most_sent_ = std::max(most_sent_, ++sent[{send.from, last}]);
      letters.emplace_back(send, std::move(pair));
    }
    std::ranges::stable_sort(letters, {},
                             [](const auto& each) { return each.first.from; });
    for (auto& [send, pair] : letters) {
      places_[static_cast<std::size_t>(send.to)].push_back(std::move(pair));
    }
  }

  void fold(std::size_t rank, int64_t round) {
    std::optional<Pair> at_hand;
    for (const StateStep& step : plans_[rank].lists(pass_).steps) {
      if (step.round != round) continue;
      if (step.gives != StateStep::kNone) {
        auto& given = given_[rank][static_cast<std::size_t>(step.gives)];
        ASSERT_FALSE(given.has_value()) << "given twice";
        given = at_hand ? at_hand->runs : std::vector<Name>();
        ASSERT_TRUE(!at_hand || !at_hand->transition) << "begins too late";
      }
      if (step.keeps != 0) {
        ASSERT_TRUE(at_hand.has_value());
        places_[rank].push_back(*at_hand);
      }
      if (step.place == StateStep::kNone) {
        at_hand.reset();
        continue;
      }
      const Pair& next = at(places_[rank], step.place);
      ASSERT_TRUE(step.transition == 0 || next.transition);
      if (!at_hand) {
        at_hand = {next.runs, step.transition != 0};
        continue;
      }
      ASSERT_EQ(step.transition, 1) << "what was at hand is lost";
      at_hand->runs.insert(at_hand->runs.end(), next.runs.begin(),
                           next.runs.end());
    }
    ASSERT_FALSE(at_hand.has_value()) << "not laid down";
  }

  const std::vector<StatePlan>& plans_;
  Pass pass_;
  std::vector<std::vector<Pair>> places_;
  std::vector<std::vector<std::optional<std::vector<Name>>>> given_;
  int64_t most_sent_ = 0;
};

std::vector<StatePlan> plans_of(const AttentionLayout& layout, StateWay way,
                                int64_t rows) {
  std::vector<StatePlan> plans;
  for (int rank = 0; rank < layout.ownership.ranks(); ++rank) {
    plans.push_back(StatePlan::of(layout, rank, rows, way));
  }
  return plans;
}

/// Every run is given all runs of its document before it, in order.
void every_run_gets_what_lies_before_it(const AttentionLayout& layout,
                                        int64_t rows) {
  for (const StateWay way : {StateWay::direct, StateWay::scan}) {
    const auto plans = plans_of(layout, way, rows);
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      const Documents documents = documents_of(plans, pass);
      std::size_t longest = 1;
      for (const auto& [document, runs] : documents) {
        longest = std::max(longest, runs.size());
      }
      const Play play(plans, pass);
      int64_t sent = 0;
      for (std::size_t rank = 0; rank < plans.size(); ++rank) {
        const StatePlan& plan = plans[rank];
        ASSERT_EQ(plan.lists(pass).sends, plans[0].lists(pass).sends);
        for (int64_t i = 0; i < std::ssize(plan.chained()); ++i) {
          const Name name = name_of(plan, i);
          std::vector<Name> before =
              documents.at({std::get<0>(name), std::get<1>(name)});
          ASSERT_GT(before.size(), 1u);
          before.erase(std::ranges::find(before, name), before.end());
          ASSERT_EQ(play.given(rank)[static_cast<std::size_t>(i)].value_or(
                        std::vector<Name>()),
                    before)
              << longspan::name_of(way);
        }
        sent += plan.sent_bytes(1, 1000, pass);
      }
      int64_t expected = 0;
      for (const StateSend& send : plans[0].lists(pass).sends) {
        expected += 1000 + send.transition;
      }
      ASSERT_EQ(sent, expected);
      const int64_t rounds = plans[0].rounds(pass);
      if (way == StateWay::scan) {
        ASSERT_LE(play.most_sent_a_round(), 1);
        ASSERT_LE(rounds, std::bit_width(longest - 1));
      } else {
        ASSERT_LE(rounds, 1);
      }
    }
  }
}

TEST(StatePlan, EveryRunGetsWhatLiesBeforeIt) {
  test::for_all(
      300,
      [](Random& random) {
        return test::draw_ownership(random, test::draw_packing(random, 24, 4));
      },
      [](const test::OwnershipCase& owners) {
        every_run_gets_what_lies_before_it(layout_of(owners), 2);
      });
}

TEST(StatePlan, EveryRunOfManyGetsWhatLiesBeforeIt) {
  for (const int ranks : {1, 2, 3, 4, 7, 16, 33, 64}) {
    const int64_t tokens = int64_t{2} * 3 * ranks;
    for (const Ownership& owners : {Ownership::contiguous(tokens, ranks),
                                    Ownership::head_tail(tokens, ranks)}) {
      const Packing one = Packing::single(tokens);
      const Packing some =
          Packing::of({1, tokens / 2, tokens - tokens / 2 - 1});
      every_run_gets_what_lies_before_it(
          AttentionLayout::of(owners, {Mask::causal(one), Mask::causal(some)}),
          2);
    }
  }
}

/// Bytes that the busiest rank sends or gets, and pairs that the busiest one
/// combines, of all rounds: counted in the lists.
struct Counted {
  double bytes = 0, states = 0, transitions = 0;
};

Counted counted_in(const std::vector<StatePlan>& plans, Pass pass,
                   const StatePair& pair) {
  Counted all;
  for (int64_t round = 0; round < 12; ++round) {
    std::map<int64_t, double> sent, received;
    for (const StateSend& send : plans[0].lists(pass).sends) {
      if (send.round != round) continue;
      const auto bytes = static_cast<double>(
          pair.state_bytes + send.transition * pair.transition_bytes);
      sent[send.from] += bytes;
      received[send.to] += bytes;
    }
    double most = 0, states = 0, transitions = 0;
    for (const auto& [rank, bytes] : sent) most = std::max(most, bytes);
    for (const auto& [rank, bytes] : received) most = std::max(most, bytes);
    for (const StatePlan& plan : plans) {
      double own_states = 0, own_transitions = 0;
      bool at_hand = false, begins = false;
      for (const StateStep& step : plan.lists(pass).steps) {
        if (step.round != round) continue;
        const bool combines = at_hand && step.place != StateStep::kNone;
        own_states += combines ? 1 : 0;
        own_transitions += combines && !begins ? 1 : 0;
        if (!at_hand) begins = step.transition == 0;
        at_hand = step.place != StateStep::kNone;
      }
      states = std::max(states, own_states);
      transitions = std::max(transitions, own_transitions);
    }
    all.bytes += most;
    all.states += states;
    all.transitions += transitions;
  }
  return all;
}

/// Each figure by itself, so that a slip in one of them shows.
void a_way_costs_what_its_lists_say(const AttentionLayout& layout,
                                    int64_t rows) {
  const double never = std::numeric_limits<double>::infinity();
  for (const StateWay way : {StateWay::direct, StateWay::scan}) {
    const auto plans = plans_of(layout, way, rows);
    const StatePair pair = {100, 1000, 1};
    Counted both;
    int64_t rounds = 0;
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      const Counted one = counted_in(plans, pass, pair);
      both.bytes += one.bytes;
      both.states += one.states;
      both.transitions += one.transitions;
      rounds += plans[0].rounds(pass);
    }
    const auto seconds = [&](const StatePair& weight, const StateCosts& costs) {
      return StatePlan::seconds(layout, way, weight, rows, costs);
    };
    ASSERT_EQ(seconds(pair, {1, never, never}), rounds);
    ASSERT_EQ(seconds(pair, {0, 1, never}), both.bytes);
    // 8 numbers of float32, each multiplied and added three times.
    ASSERT_EQ(seconds({0, 32, 3}, {0, never, 1}), both.states * 8 * 3 * 2);
    ASSERT_EQ(seconds({32, 0, 3}, {0, never, 1}), both.transitions * 8 * 3 * 2);
  }
}

TEST(StatePlan, AWayCostsWhatItsListsSay) {
  test::for_all(
      200,
      [](Random& random) {
        return test::draw_ownership(random, test::draw_packing(random, 24, 4));
      },
      [](const test::OwnershipCase& owners) {
        a_way_costs_what_its_lists_say(layout_of(owners), 2);
      });
}

/// Of one document over ranks of their own.
AttentionLayout over(int ranks) {
  return AttentionLayout::of(Ownership::contiguous(ranks, ranks),
                             {Mask::causal(Packing::single(ranks))});
}

TEST(StatePlan, SendsPairsToLaterRuns) {
  const auto layout = over(3);
  const StatePlan plan = StatePlan::of(layout, 1);
  EXPECT_EQ(plan.lists(Pass::forward).sends,
            (std::vector<StateSend>{
                {0, 0, 1, 0, 0}, {0, 0, 2, 0, 0}, {0, 1, 2, 0, 1}}));
  EXPECT_EQ(plan.lists(Pass::backward).sends,
            (std::vector<StateSend>{
                {0, 1, 0, 0, 1}, {0, 2, 0, 0, 0}, {0, 2, 1, 0, 0}}));
  EXPECT_EQ(plan.lists(Pass::forward).steps,
            (std::vector<StateStep>{{0, -1, 0, 1, 0}, {0, 0, 0, -1, 0}}));
  EXPECT_EQ(plan.sent_bytes(100, 10, Pass::forward), 110);
  EXPECT_EQ(StatePlan::of(layout, 0).sent_bytes(100, 10, Pass::forward), 20);
  EXPECT_EQ(StatePlan::of(layout, 2).sent_bytes(100, 10, Pass::forward), 0);
}

/// Eight runs, as docs/states.md has them.
TEST(StatePlan, AScanDoublesItsReach) {
  const auto plans = plans_of(over(8), StateWay::scan, 1);
  EXPECT_EQ(plans[0].rounds(Pass::forward), 3);
  EXPECT_EQ(plans[0].to_string(),
            "StatePlan(1 of 1 runs of rank 0 carry a state, in rounds)");
  std::vector<std::vector<int64_t>> sent(3);
  for (const StateSend& send : plans[0].lists(Pass::forward).sends) {
    EXPECT_EQ(send.to - send.from, int64_t{1} << send.round);
    EXPECT_EQ(send.transition, send.from < (int64_t{1} << send.round) ? 0 : 1);
    sent[static_cast<std::size_t>(send.round)].push_back(send.from);
  }
  EXPECT_EQ(sent,
            (std::vector<std::vector<int64_t>>{
                {0, 1, 2, 3, 4, 5, 6}, {0, 1, 2, 3, 4, 5}, {0, 1, 2, 3}}));
  const auto states = [&](StateWay way) {
    std::vector<std::pair<int64_t, int64_t>> found;
    for (const StatePlan& plan : plans_of(over(8), way, 1)) {
      found.emplace_back(plan.sent_bytes(0, 1, Pass::forward),
                         plan.sent_bytes(1, 0, Pass::forward));
    }
    return found;
  };
  using Sent = std::vector<std::pair<int64_t, int64_t>>;
  EXPECT_EQ(
      states(StateWay::direct),
      (Sent{{7, 0}, {6, 6}, {5, 5}, {4, 4}, {3, 3}, {2, 2}, {1, 1}, {0, 0}}));
  EXPECT_EQ(
      states(StateWay::scan),
      (Sent{{3, 0}, {3, 1}, {3, 2}, {3, 2}, {2, 2}, {2, 2}, {1, 1}, {0, 0}}));
}

// ---- Which way is taken.

constexpr int64_t kMega = 1'000'000;

TEST(StatePlan, TakesTheWayThatIsQuicker) {
  const auto chosen = [](int ranks, const StatePair& pair,
                         const StateCosts& costs = {}) {
    return StatePlan::choose(over(ranks), pair, 1, costs);
  };
  // Nothing but exchanges counts; three runs send as much either way.
  for (const int ranks : {1, 2, 3, 4, 64}) {
    EXPECT_EQ(chosen(ranks, {}), StateWay::direct) << ranks;
  }
  EXPECT_EQ(chosen(3, {2 * kMega, 2 * kMega, 1}), StateWay::direct);
  // An exchange takes as long as 500 kB, and a scan of 4 saves a state of 3,
  // one of 64 57 of 63.
  EXPECT_EQ(chosen(4, {0, 499'000, 1}), StateWay::direct);
  EXPECT_EQ(chosen(4, {0, 501'000, 1}), StateWay::scan);
  EXPECT_EQ(chosen(64, {0, 40'000, 1}), StateWay::direct);
  EXPECT_EQ(chosen(64, {0, 48'000, 1}), StateWay::scan);
  // Where exchanges cost nothing bytes decide alone.
  EXPECT_EQ(chosen(4, {0, 1, 1}, {.exchange_seconds = 0}), StateWay::scan);
  // Combining matrices costs: over 5 runs a scan multiplies transitions with
  // each other, over 4 it does not, and of 8 the last run of a direct plan has
  // more to fold.
  const StatePair matrices = {2 * kMega, 2 * kMega, 128};
  const StateCosts slow = {.operations_per_second = 20e9};
  EXPECT_EQ(chosen(5, matrices), StateWay::scan);
  EXPECT_EQ(chosen(5, matrices, slow), StateWay::direct);
  EXPECT_EQ(chosen(4, matrices, slow), StateWay::scan);
  EXPECT_EQ(chosen(8, matrices, slow), StateWay::scan);
}

TEST(StatePlan, ARankByItselfSendsNothing) {
  const auto layout = AttentionLayout::of(
      Ownership::of_ranges({{{6, 8}, {4, 6}, {2, 4}, {0, 2}}}),
      {Mask::causal(Packing::single(8))});
  const StatePair heavy = {kMega, kMega, 128};
  EXPECT_EQ(StatePlan::choose(layout, heavy), StateWay::direct);
  const StatePlan plan = StatePlan::of(layout, 0, 1, StateWay::scan);
  EXPECT_EQ(plan.rounds(Pass::forward), 0);
  EXPECT_FALSE(plan.lists(Pass::forward).steps.empty());
}

TEST(StatePlan, WaysHaveNames) {
  for (const StateWay way : {StateWay::direct, StateWay::scan}) {
    EXPECT_EQ(state_way_named(longspan::name_of(way)), way);
  }
  EXPECT_EQ(test::message_of([] { state_way_named("ring"); }),
            "StatePlan: way 'ring' is not one of direct, scan");
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
  EXPECT_EQ(
      test::message_of([&] { StatePlan::choose(layout, {1, 1, 0}); }),
      "StatePlan: transitions of 1 bytes and 0 rows, and states of 1 bytes");
}

}  // namespace
}  // namespace longspan
