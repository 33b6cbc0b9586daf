#include "longspan/plan/plan.h"

#include <gtest/gtest.h>

#include <map>

#include "longspan/plan/attention_layout.h"
#include "longspan/plan/detail/ring.h"
#include "tests/support/masks.h"
#include "tests/support/property.h"

namespace longspan {
namespace {

using test::at;
using test::message_of;
using test::SharedMaskCase;

std::vector<Strategy> strategies(int ranks) {
  std::vector<Strategy> all;
  for (int team = 1; team <= ranks; ++team) {
    if (ranks % team != 0) continue;
    for (auto transport :
         {KeyTransport::ring, KeyTransport::gathered, KeyTransport::needed}) {
      all.push_back({transport, team});
    }
  }
  return all;
}

AttentionLayout layout_of(const SharedMaskCase& c) {
  return AttentionLayout::of(c.owners.ownership(), {c.mask.mask()});
}

std::vector<Plan> plans_of(const AttentionLayout& layout,
                           const Strategy& strategy) {
  std::vector<Plan> plans;
  for (int rank = 0; rank < layout.ownership.ranks(); ++rank) {
    plans.push_back(Plan::of(layout, strategy, rank));
  }
  return plans;
}

/// The queries of a rank's team, token by token.
std::vector<int64_t> queries_of(const AttentionLayout& layout,
                                const Plan& plan) {
  std::vector<int64_t> queries;
  for (int i = 0; i < plan.strategy().head_ranks; ++i) {
    const auto held =
        test::tokens_of(layout.ownership.ranges_of(plan.first_of_team() + i));
    queries.insert(queries.end(), held.begin(), held.end());
  }
  return queries;
}

void steps_hold_every_pair_once(const SharedMaskCase& c) {
  const AttentionLayout layout = layout_of(c);
  const Mask& mask = layout.masks[0];
  for (const Strategy& strategy : strategies(layout.ownership.ranks())) {
    for (const Plan& plan : plans_of(layout, strategy)) {
      const auto queries = queries_of(layout, plan);
      std::map<std::pair<int64_t, int64_t>, int> seen;
      for (const PlanStep& step : plan.steps()) {
        const auto keys = test::tokens_of(step.keys);
        for (const KeyLines& line : step.lines) {
          for (int64_t q = line.queries.begin; q < line.queries.end; ++q) {
            const TokenRange visible = line.keys_of(q);
            for (int64_t k = visible.begin; k < visible.end; ++k) {
              ++seen[{at(queries, q), at(keys, k)}];
            }
          }
        }
      }
      std::size_t pairs = 0;
      for (int64_t q : queries) {
        for (int64_t k = 0; k < mask.keys(); ++k) {
          if (!mask.allows(q, k)) continue;
          ++pairs;
          ASSERT_EQ((seen[{q, k}]), 1)
              << strategy.to_string() << " query " << q << " key " << k;
        }
      }
      ASSERT_EQ(seen.size(), pairs) << strategy.to_string();
    }
  }
}

TEST(Plan, StepsHoldEveryVisiblePairOnce) {
  test::for_all(
      200, [](test::Random& random) { return draw_shared_mask(random, 20); },
      steps_hold_every_pair_once);
}

std::vector<PlannedParcel> from(const std::vector<Plan>& plans, int receiver,
                                std::size_t step,
                                std::vector<PlannedParcel> PlanStep::* list) {
  std::vector<PlannedParcel> found;
  for (const Plan& plan : plans) {
    if (step >= plan.steps().size()) continue;
    for (const PlannedParcel& parcel : plan.steps()[step].*list) {
      if (parcel.peer == receiver)
        found.push_back({plan.rank(), parcel.tokens});
    }
  }
  return found;
}

std::vector<PlannedParcel> by_peer(std::vector<PlannedParcel> parcels) {
  std::ranges::stable_sort(parcels, {}, &PlannedParcel::peer);
  return parcels;
}

void what_is_sent_arrives(const SharedMaskCase& c) {
  const AttentionLayout layout = layout_of(c);
  for (const Strategy& strategy : strategies(layout.ownership.ranks())) {
    const std::vector<Plan> plans = plans_of(layout, strategy);
    for (const Plan& plan : plans) {
      for (std::size_t i = 0; i < plan.steps().size(); ++i) {
        const PlanStep& step = plan.steps()[i];
        ASSERT_EQ(by_peer(step.arrivals),
                  from(plans, plan.rank(), i, &PlanStep::sends));
        ASSERT_EQ(by_peer(step.homecomings),
                  from(plans, plan.rank(), i, &PlanStep::returns));
        // Sends and returns can be cut from the keys at hand.
        for (const PlannedParcel& parcel : step.sends) {
          ASSERT_NO_THROW(places_in(step.keys, parcel.tokens));
          ASSERT_NE(parcel.peer, plan.rank());
        }
        for (const PlannedParcel& parcel : step.returns) {
          ASSERT_NO_THROW(places_in(step.keys, parcel.tokens));
        }
        for (const PlannedParcel& parcel : step.homecomings) {
          ASSERT_NO_THROW(places_in(plan.steps()[0].keys, parcel.tokens));
        }
        std::vector<TokenRange> arrived;
        for (const PlannedParcel& parcel : step.arrivals) {
          arrived.insert(arrived.end(), parcel.tokens.begin(),
                         parcel.tokens.end());
        }
        if (i + 1 < plan.steps().size()) {
          ASSERT_EQ(test::tokens_of(arrived),
                    test::tokens_of(plan.steps()[i + 1].keys));
        } else {
          ASSERT_TRUE(arrived.empty());
        }
      }
    }
  }
}

TEST(Plan, WhatIsSentArrives) {
  test::for_all(
      300, [](test::Random& random) { return draw_shared_mask(random, 20); },
      what_is_sent_arrives);
}

void gradients_of_seen_keys_go_home(const SharedMaskCase& c) {
  const AttentionLayout layout = layout_of(c);
  for (const Strategy& strategy : strategies(layout.ownership.ranks())) {
    for (const Plan& plan : plans_of(layout, strategy)) {
      for (std::size_t i = 1; i < plan.steps().size(); ++i) {
        const PlanStep& step = plan.steps()[i];
        std::vector<int> returned(
            static_cast<std::size_t>(count_tokens(step.keys)));
        for (const PlannedParcel& parcel : step.returns) {
          for (int64_t place :
               test::tokens_of(places_in(step.keys, parcel.tokens))) {
            ++at(returned, place);
          }
        }
        for (const KeyLines& line : step.lines) {
          for (int64_t q = line.queries.begin; q < line.queries.end; ++q) {
            const TokenRange keys = line.keys_of(q);
            for (int64_t k = keys.begin; k < keys.end; ++k) {
              ASSERT_EQ(at(returned, k), 1) << "step " << i << " key " << k;
            }
          }
        }
      }
    }
  }
}

TEST(Plan, GradientsOfSeenKeysGoHome) {
  test::for_all(
      200, [](test::Random& random) { return draw_shared_mask(random, 20); },
      gradients_of_seen_keys_go_home);
}

/// Hops that rank 0..N-1 take together.
int hops_of(const AttentionLayout& layout, const Strategy& strategy) {
  int hops = 0;
  for (const Plan& plan : plans_of(layout, strategy)) {
    hops = std::max(hops, plan.hops());
  }
  return hops;
}

TEST(Plan, AWindowTakesAsManyHopsAsItReaches) {
  for (int ranks : {1, 2, 3, 4, 7}) {
    const int64_t local = 16;
    const int64_t tokens = local * ranks;
    for (int64_t window : {1, 2, 15, 16, 17, 18, 32, 33, 34, 200}) {
      const auto layout =
          AttentionLayout::of(Ownership::contiguous(tokens, ranks),
                              {Mask::sliding(Packing::single(tokens), window)});
      const int64_t reach = (window - 1 + local - 1) / local;
      EXPECT_EQ(hops_of(layout, {KeyTransport::ring, 1}),
                std::min<int64_t>(reach, ranks - 1))
          << ranks << " ranks, window " << window;
    }
  }
}

TEST(Plan, HeadTailSendsTheTailOnlyAsFarAsItIsSeen) {
  // 16 tokens, 2 ranks: rank 0 has 0-3 and 12-15, rank 1 has 4-11.
  const auto layout = AttentionLayout::of(Ownership::head_tail(16, 2),
                                          {Mask::causal(Packing::single(16))});
  const Plan first = Plan::of(layout, {}, 0);
  ASSERT_EQ(first.steps().size(), 2U);
  EXPECT_EQ(first.steps()[0].sends,
            (std::vector<PlannedParcel>{{1, {{0, 4}}}}));
  EXPECT_EQ(first.steps()[1].keys, (std::vector<TokenRange>{{4, 12}}));
  EXPECT_EQ(first.steps()[0].pairs, 10 + 4 * 4 + 10);
  EXPECT_EQ(first.steps()[1].pairs, 32);
  const AttentionShape shape{.heads = 4,
                             .key_heads = 2,
                             .head_dim = 8,
                             .value_dim = 4,
                             .bytes_per_element = 2};
  EXPECT_EQ(first.sent_bytes(shape, Pass::forward), 4 * 2 * 12 * 2);
  // Backward sends them again, and the gradients of 8 keys home in float32.
  EXPECT_EQ(first.sent_bytes(shape, Pass::backward),
            4 * 2 * 12 * 2 + 8 * 2 * 12 * 4);
  EXPECT_EQ(first.to_string(),
            "Plan(ring, rank 0 of 2, 1 hops)\n"
            "  step 0: 8 keys, 3 stretches, 36 pairs; sends 4 to 1; gets 8 "
            "from 1\n"
            "  step 1: 8 keys, 1 stretches, 32 pairs; backward returns 8 to 1");
}

TEST(Plan, DocumentsThatStayOnARankSendNothing) {
  const auto layout = AttentionLayout::of(Ownership::contiguous(32, 4),
                                          {Mask::full(Packing::rows(4, 8))});
  for (const char* name : {"ring", "needed"}) {
    for (const Plan& plan :
         plans_of(layout, Strategy::named(name).over(4, /*key_heads=*/1))) {
      EXPECT_EQ(plan.sent_bytes({}, Pass::backward), 0) << name;
      EXPECT_EQ(plan.hops(), 0);
    }
  }
}

TEST(HeadShare, CoversEveryHeadOnce) {
  for (int64_t key_heads : {1, 2, 3, 8}) {
    for (int64_t group : {1, 2, 8}) {
      for (int members : {1, 2, 3, 4, 7, 16}) {
        int64_t next = 0;
        for (int member = 0; member < members; ++member) {
          const auto share =
              HeadShare::of(key_heads * group, key_heads, member, members);
          if (share.heads.empty()) {
            EXPECT_TRUE(share.key_heads.empty());
            continue;
          }
          EXPECT_EQ(share.heads.begin, next);
          next = share.heads.end;
          EXPECT_EQ(share.key_heads.begin, share.heads.begin / group);
          EXPECT_EQ(share.key_heads.end - 1, (share.heads.end - 1) / group);
        }
        EXPECT_EQ(next, key_heads * group);
      }
    }
  }
}

TEST(Strategy, HasNames) {
  for (std::string_view name : Strategy::names()) {
    EXPECT_EQ(Strategy::named(name).name(), name);
  }
  const auto over = [](std::string_view name, int ranks, int head_ranks = 0) {
    return Strategy::named(name, head_ranks).over(ranks, /*key_heads=*/4);
  };
  EXPECT_EQ(over("ring", 4), (Strategy{KeyTransport::ring, 1}));
  EXPECT_EQ(over("head_parallel", 4).head_ranks, 4);
  EXPECT_EQ(over("head_parallel", 4).name(4), "head_parallel");
  EXPECT_EQ(over("head_parallel_ring", 8).head_ranks, 4);
  EXPECT_EQ(over("head_parallel_ring", 8, 2).head_ranks, 2);
  EXPECT_EQ(message_of([] { Strategy::named("rign"); }),
            "Strategy: 'rign' is not one of ring, gathered, needed, "
            "head_parallel, head_parallel_ring; did you mean ring?");
  EXPECT_EQ(message_of([] { Strategy::named("ulysses"); }),
            "Strategy: 'ulysses' is not one of ring, gathered, needed, "
            "head_parallel, head_parallel_ring; did you mean head_parallel?");
  EXPECT_EQ(message_of([&] { over("head_parallel_ring", 4, 3); }),
            "Strategy: 4 ranks do not form teams of 3; head_ranks must divide "
            "the ranks");
}

TEST(Strategy, OverAGroupItStaysWhatItIs) {
  for (std::string_view name : Strategy::names()) {
    for (int ranks : {1, 2, 3, 4, 7, 8}) {
      const Strategy once = Strategy::named(name).over(ranks, 4);
      EXPECT_EQ(once.over(ranks, 4), once) << name << " over " << ranks;
      EXPECT_GE(once.head_ranks, 1);
      EXPECT_EQ(ranks % once.head_ranks, 0);
    }
  }
}

void code_comes_back(const SharedMaskCase& c) {
  const AttentionLayout layout = layout_of(c);
  const auto code = layout.encode();
  const AttentionLayout back = AttentionLayout::decode(code);
  ASSERT_EQ(back.ownership, layout.ownership);
  ASSERT_EQ(back.encode(), code);
  for (int64_t q = 0; q < layout.masks[0].queries(); ++q) {
    ASSERT_EQ(back.masks[0].key_ranges_of(q), layout.masks[0].key_ranges_of(q));
  }
}

TEST(AttentionLayout, ComesBackFromItsCode) {
  test::for_all(
      300, [](test::Random& random) { return draw_shared_mask(random, 20); },
      code_comes_back);
}

TEST(AttentionLayout, RefusesABrokenCode) {
  const auto code =
      AttentionLayout::of(
          Ownership::of_ranges({{{0, 2}, {5, 8}}, {{2, 5}}}),
          {Mask::causal(Packing::of({3, 4}, {3, 5})).with_hidden({{1, 2}})})
          .encode();
  // Whatever number is changed: refused, or another layout that is sound.
  for (std::size_t i = 0; i < code.size(); ++i) {
    for (int64_t value : {int64_t{-1}, int64_t{0}, int64_t{1}, int64_t{7},
                          int64_t{1} << 40, std::numeric_limits<int64_t>::min(),
                          std::numeric_limits<int64_t>::max()}) {
      auto broken = code;
      broken[i] = value;
      EXPECT_NO_FATAL_FAILURE(message_of([&] {
        AttentionLayout::decode(broken).encode();
      })) << "entry "
          << i << " = " << value;
    }
    auto shorter = code;
    shorter.resize(i);
    EXPECT_NE(message_of([&] { AttentionLayout::decode(shorter); }),
              "accepted");
  }
  EXPECT_EQ(
      message_of([] { AttentionLayout::decode(std::vector<int64_t>{1}); }),
      "AttentionLayout: this is no layout of attention (1 numbers); make "
      "one with AttentionLayout");
}

TEST(AttentionLayout, RefusesMasksThatDoNotFit) {
  EXPECT_EQ(message_of([] {
              AttentionLayout::of(Ownership::contiguous(8, 2),
                                  {Mask::causal(Packing::single(6))});
            }),
            "AttentionLayout: Mask(causal, 6 tokens, 1 document) over " +
                Ownership::contiguous(8, 2).to_string() +
                "; mask and ownership must have the same tokens");
  EXPECT_EQ(
      message_of([] { AttentionLayout::of(Ownership::contiguous(8, 2), {}); }),
      "AttentionLayout: no mask; give one, or one a row");
}

}  // namespace
}  // namespace longspan
