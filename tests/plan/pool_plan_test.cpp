#include "longspan/plan/pool_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <set>

#include "longspan/plan/attention_layout.h"
#include "tests/support/property.h"
#include "tests/support/values.h"

namespace longspan {
namespace {

using test::at;

struct PoolCase {
  test::OwnershipCase owners;
  int64_t ratio = 1;
  PoolOverlap overlap = PoolOverlap::none;
  int64_t rows = 1;

  AttentionLayout layout() const {
    return AttentionLayout::of(owners.ownership(),
                               {Mask::causal(owners.packing.packing())});
  }
  std::vector<PoolCase> smaller() const {
    std::vector<PoolCase> cases;
    for (const auto& less : owners.smaller()) {
      cases.push_back({less, ratio, overlap, rows});
    }
    if (ratio > 1) cases.push_back({owners, ratio - 1, overlap, rows});
    if (rows > 1) cases.push_back({owners, ratio, overlap, rows - 1});
    if (overlap == PoolOverlap::previous) {
      cases.push_back({owners, ratio, PoolOverlap::none, rows});
    }
    return cases;
  }
  std::string to_string() const {
    return join(owners.to_string(), "; ratio ", ratio,
                overlap == PoolOverlap::previous ? ", overlapping" : "",
                ", rows ", rows);
  }
};

PoolCase draw(test::Random& random) {
  return {test::draw_ownership(random, test::draw_packing(random, 32, 4)),
          random.between(1, random.one_in(3) ? 9 : 4),
          random.one_in(2) ? PoolOverlap::previous : PoolOverlap::none,
          random.between(1, 2)};
}

/// One slot of a pool: a half of a token of a row.
struct Slot {
  int64_t row, token, half;
  friend auto operator<=>(const Slot&, const Slot&) = default;
};

/// A pool as it should be, slot by slot.
struct Expected {
  std::vector<std::optional<Slot>> slots;
  int owner = 0;
  int64_t position = 0;
};

std::vector<Expected> pools_of(const PoolCase& c) {
  const Packing packing = c.owners.packing.packing();
  const Ownership owners = c.owners.ownership();
  const bool overlaps = c.overlap == PoolOverlap::previous;
  std::vector<Expected> pools;
  for (int64_t row = 0; row < c.rows; ++row) {
    for (int64_t d = 0; d < packing.documents(); ++d) {
      for (int64_t w = 0; (w + 1) * c.ratio <= packing.length(d); ++w) {
        Expected pool;
        const int64_t begin = packing.offset(d) + w * c.ratio;
        for (int64_t j = 0; overlaps && j < c.ratio; ++j) {
          pool.slots.push_back(
              w == 0 ? std::nullopt
                     : std::optional(Slot{row, begin - c.ratio + j, 0}));
        }
        for (int64_t j = 0; j < c.ratio; ++j) {
          pool.slots.push_back(Slot{row, begin + j, overlaps ? 1 : 0});
        }
        pool.owner = owners.owner_of(begin + c.ratio - 1);
        pool.position = w * c.ratio;
        pools.push_back(pool);
      }
    }
  }
  return pools;
}

using Slots = std::vector<std::optional<Slot>>;

/// The slots behind one list of a rank.
Slots slots_of(const PoolPlan& plan, const Ownership& owners, int64_t index) {
  Slots slots;
  for (int64_t j = 0; j < plan.slots(); ++j) {
    const int64_t entry = at(plan.lists(), index * plan.slots() + j);
    if (entry < 0) {
      slots.emplace_back();
      continue;
    }
    const int64_t local = entry / plan.halves();
    const int64_t held = owners.local_tokens(plan.rank());
    slots.push_back(Slot{local / held,
                         owners.global_of(plan.rank(), local % held),
                         entry % plan.halves()});
  }
  return slots;
}

/// Two lists of slots that have none in common, as one.
Slots joined(Slots a, const Slots& b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_FALSE(a[i] && at(b, i)) << "a slot in two parts";
    if (!a[i]) a[i] = at(b, i);
  }
  return a;
}

void every_pool_is_made_once_from_all_its_slots(const PoolCase& c) {
  const AttentionLayout layout = c.layout();
  const Ownership& owners = layout.ownership;
  const auto expected = pools_of(c);
  std::vector<PoolPlan> plans;
  for (int rank = 0; rank < owners.ranks(); ++rank) {
    plans.push_back(PoolPlan::of(layout, c.ratio, c.overlap, rank, c.rows));
  }
  std::vector<std::pair<int, int64_t>> places;  // rank and its how many-th
  for (int rank = 0; rank < owners.ranks(); ++rank) {
    const PoolPlan& plan = at(plans, rank);
    ASSERT_EQ(plan.sends(), plans[0].sends()) << "equal on all ranks";
    ASSERT_EQ(plan.in_stream(), plans[0].in_stream());
    ASSERT_EQ(plan.sizes(), plans[0].sizes());
    ASSERT_EQ(std::ssize(plan.order()), plan.here());
    ASSERT_EQ(std::ssize(plan.positions()), plan.here());
    for (int64_t i = 0; i < plan.here(); ++i) places.emplace_back(rank, i);
    // What comes, if all ranks follow their sends.
    std::vector<Slots> came;
    for (int from = 0; from < owners.ranks(); ++from) {
      for (const RowSend& send : plan.sends()) {
        if (send.from != from || send.to != rank) continue;
        for (int64_t i = send.begin; i < send.begin + send.length; ++i) {
          came.push_back(
              slots_of(at(plans, from), owners, at(plans, from).whole() + i));
        }
      }
    }
    ASSERT_EQ(std::ssize(came), plan.received());
    std::vector<Slots> made;
    for (int64_t i = 0; i < plan.whole(); ++i) {
      made.push_back(slots_of(plan, owners, i));
    }
    std::set<int64_t> merged;
    for (std::size_t m = 0; m < plan.merges().size();
         m += static_cast<std::size_t>(plan.most_parts())) {
      Slots sum(static_cast<std::size_t>(plan.slots()));
      for (int64_t p = 0; p < plan.most_parts(); ++p) {
        const int64_t part = at(plan.merges(), static_cast<int64_t>(m) + p);
        if (part < 0) continue;
        ASSERT_TRUE(merged.insert(part).second);
        sum = joined(sum, at(came, part));
      }
      made.push_back(sum);
    }
    ASSERT_EQ(merged.size(), came.size()) << "every part is merged";
    int64_t mine = 0;
    for (const Expected& pool : expected) {
      if (pool.owner != rank) continue;
      ASSERT_EQ(at(made, at(plan.order(), mine)), pool.slots);
      ASSERT_EQ(at(plan.positions(), mine), pool.position);
      ++mine;
    }
    ASSERT_EQ(mine, plan.here());
    ASSERT_EQ(std::ssize(made), plan.here());
  }
  ASSERT_EQ(places.size(), expected.size());
  ASSERT_EQ(plans[0].in_stream().size(), expected.size());
  std::map<int, int64_t> next;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const int owner = expected[i].owner;
    ASSERT_EQ(at(places, at(plans[0].in_stream(), i)),
              std::pair(owner, next[owner]++));
  }
}

void a_token_sees_the_pools_that_ended(const PoolCase& c) {
  const AttentionLayout layout = c.layout();
  const Packing packing = c.owners.packing.packing();
  const Ownership& owners = layout.ownership;
  const auto expected = pools_of(c);
  for (int rank = 0; rank < owners.ranks(); ++rank) {
    const auto plan = PoolPlan::of(layout, c.ratio, c.overlap, rank, c.rows);
    const int64_t held = owners.local_tokens(rank);
    ASSERT_EQ(std::ssize(plan.windows()), c.rows * held);
    for (int64_t row = 0; row < c.rows; ++row) {
      for (int64_t local = 0; local < held; ++local) {
        const int64_t token = owners.global_of(rank, local);
        const TokenRange window = at(plan.windows(), row * held + local);
        for (int64_t p = 0; p < std::ssize(expected); ++p) {
          const Slot last = *at(expected, p).slots.back();
          const bool ended =
              last.row == row && last.token <= token &&
              !packing.is_pad(token) &&
              packing.document_of(last.token) == packing.document_of(token);
          ASSERT_EQ(window.contains(p), ended) << "token " << token;
        }
      }
    }
  }
}

TEST(PoolPlan, EveryPoolIsMadeOnceFromAllItsSlots) {
  test::for_all(400, draw, every_pool_is_made_once_from_all_its_slots);
}

TEST(PoolPlan, ATokenSeesThePoolsThatEnded) {
  test::for_all(200, draw, a_token_sees_the_pools_that_ended);
}

TEST(PoolPlan, AlignedSharesSendNothing) {
  const auto layout = AttentionLayout::of(Ownership::contiguous(64, 4),
                                          {Mask::causal(Packing::single(64))});
  const auto plan = PoolPlan::of(layout, 4, PoolOverlap::none, 1);
  EXPECT_TRUE(plan.sends().empty());
  EXPECT_EQ(plan.whole(), 4);
  EXPECT_EQ(plan.total(), 16);
  EXPECT_EQ(plan.gathered_bytes(10, Pass::forward), 3 * 4 * 10);
  EXPECT_EQ(plan.gathered_bytes(10, Pass::backward), 12 * 10);
}

TEST(PoolPlan, AnOverlapSendsOnePartOverEachBorder) {
  const auto layout = AttentionLayout::of(Ownership::contiguous(64, 4),
                                          {Mask::causal(Packing::single(64))});
  const auto plan = PoolPlan::of(layout, 4, PoolOverlap::previous, 1);
  // The owner's own part is one too, and stays.
  EXPECT_EQ(plan.sends(), (std::vector<RowSend>{{0, 1, 0, 1},
                                                {1, 1, 0, 1},
                                                {1, 2, 1, 1},
                                                {2, 2, 0, 1},
                                                {2, 3, 1, 1},
                                                {3, 3, 0, 1}}));
  EXPECT_EQ(plan.sent_bytes(8, 4, Pass::forward), 2 * 8 * 4);
  EXPECT_EQ(plan.sent_bytes(8, 4, Pass::backward), 2 * 8 * 4);
}

TEST(PoolPlan, RefusesRatiosOfNothing) {
  const auto layout = AttentionLayout::of(Ownership::contiguous(8, 1),
                                          {Mask::causal(Packing::single(8))});
  EXPECT_EQ(
      test::message_of([&] { PoolPlan::of(layout, 0, PoolOverlap::none, 0); }),
      "PoolPlan: pools of 0 tokens; expected 1 to 134217728");
}

}  // namespace
}  // namespace longspan
