#include "longspan/plan/halo_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <optional>

#include "longspan/plan/attention_layout.h"
#include "tests/support/property.h"
#include "tests/support/values.h"

namespace longspan {
namespace {

using test::at;

/// Two rows of different documents, cut by one ownership.
struct HaloCase {
  test::OwnershipCase owners;
  test::PackingCase other;  // of the second row, cut off or padded
  int64_t count = 0;

  Packing second_row() const {
    std::vector<int64_t> lengths, slots;
    int64_t left = owners.packing.tokens();
    for (const auto& [length, slot] : other.documents) {
      slots.push_back(std::min(slot, left));
      lengths.push_back(std::min(length, slots.back()));
      left -= slots.back();
    }
    return Packing::of(lengths, slots, owners.packing.tokens());
  }
  AttentionLayout layout() const {
    return AttentionLayout::of(
        owners.ownership(),
        {Mask::causal(owners.packing.packing()), Mask::causal(second_row())});
  }
  std::vector<HaloCase> smaller() const {
    std::vector<HaloCase> cases;
    for (const auto& less : owners.smaller()) {
      cases.push_back({less, other, count});
    }
    for (const auto& less : other.smaller()) {
      cases.push_back({owners, less, count});
    }
    if (count > 0) cases.push_back({owners, other, count - 1});
    return cases;
  }
  std::string to_string() const {
    return join(owners.to_string(), "; second row ", other.to_string(),
                "; count ", count);
  }
};

HaloCase draw(test::Random& random) {
  return {test::draw_ownership(random, test::draw_packing(random, 24, 4)),
          test::draw_packing(random, 24, 4), random.between(0, 9)};
}

using RowToken = std::pair<int64_t, int64_t>;

/// What comes to a rank, in order, if all ranks follow their sends.
std::vector<RowToken> arrivals(const HaloPlan& plan, const Ownership& owners) {
  std::vector<RowToken> tokens;
  for (int from = 0; from < owners.ranks(); ++from) {
    for (const RowSend& send : plan.sends()) {
      if (send.from != from || send.to != plan.rank()) continue;
      for (int64_t i = send.begin; i < send.begin + send.length; ++i) {
        const int64_t held = owners.local_tokens(from);
        tokens.emplace_back(i / held, owners.global_of(from, i % held));
      }
    }
  }
  return tokens;
}

void every_run_gets_the_tokens_before_it(const HaloCase& c) {
  const AttentionLayout layout = c.layout();
  std::optional<std::vector<RowSend>> sends;
  for (int rank = 0; rank < layout.ownership.ranks(); ++rank) {
    const HaloPlan plan = HaloPlan::of(layout, c.count, rank, 2);
    if (!sends) sends = plan.sends();
    ASSERT_EQ(plan.sends(), *sends) << "equal on all ranks";
    const auto came = arrivals(plan, layout.ownership);
    ASSERT_EQ(plan.received(), std::ssize(came));
    std::map<RowToken, int> wanted;
    std::size_t next = 0;
    for (const auto& [row, run] : plan.runs()) {
      for (int64_t back = c.count; back > 0; --back) {
        const int64_t place = at(plan.places(), next++);
        if (back > run.position) {
          ASSERT_EQ(place, plan.received()) << "before the document";
        } else {
          const RowToken token{row, run.tokens.begin - back};
          ASSERT_EQ(at(came, place), token);
          wanted[token] = 1;
        }
      }
    }
    ASSERT_EQ(next, plan.places().size());
    ASSERT_EQ(wanted.size(), came.size()) << "each once, and nothing else";
  }
}

TEST(HaloPlan, EveryRunGetsTheTokensBeforeIt) {
  test::for_all(400, draw, every_run_gets_the_tokens_before_it);
}

void a_window_shows_the_tokens_before(const HaloCase& c) {
  const AttentionLayout layout = c.layout();
  const Ownership& owners = layout.ownership;
  for (int rank = 0; rank < owners.ranks(); ++rank) {
    const HaloPlan plan = HaloPlan::of(layout, c.count, rank, 2);
    const auto came = arrivals(plan, owners);
    const auto seen = plan.seen();
    const int64_t held = owners.local_tokens(rank);
    ASSERT_EQ(std::ssize(seen), 2 * held * (c.count + 1));
    for (int64_t i = 0; i < 2 * held; ++i) {
      const int64_t row = i / held;
      const int64_t token = owners.global_of(rank, i % held);
      const Mask mask =
          Mask::sliding(layout.mask_of(row).packing(), c.count + 1);
      for (int64_t back = c.count; back >= 0; --back) {
        const int64_t place = at(seen, i * (c.count + 1) + c.count - back);
        if (token < back || !mask.allows(token, token - back)) {
          ASSERT_EQ(place, -1);
        } else if (place < 2 * held) {
          ASSERT_EQ(place / held, row);
          ASSERT_EQ(owners.global_of(rank, place % held), token - back);
        } else {
          ASSERT_EQ(at(came, place - 2 * held), RowToken(row, token - back));
        }
      }
    }
  }
}

TEST(HaloPlan, AWindowShowsTheTokensBefore) {
  test::for_all(200, draw, a_window_shows_the_tokens_before);
}

TEST(HaloPlan, SendsABorderOfEachRun) {
  // Ranks hold 8 tokens and need 3 before them.
  const auto layout = AttentionLayout::of(Ownership::contiguous(32, 4),
                                          {Mask::causal(Packing::single(32))});
  const HaloPlan plan = HaloPlan::of(layout, 3, 2);
  EXPECT_EQ(plan.sends(),
            (std::vector<RowSend>{{0, 1, 5, 3}, {1, 2, 5, 3}, {2, 3, 5, 3}}));
  EXPECT_EQ(plan.sent_bytes(10, Pass::forward), 30);
  EXPECT_EQ(plan.sent_bytes(10, Pass::backward), 30);
  EXPECT_EQ(HaloPlan::of(layout, 3, 0).sent_bytes(10, Pass::backward), 0);
}

TEST(HaloPlan, ReachesSeveralRanksBack) {
  const auto layout = AttentionLayout::of(Ownership::contiguous(8, 4),
                                          {Mask::causal(Packing::single(8))});
  const HaloPlan plan = HaloPlan::of(layout, 5, 3);
  EXPECT_EQ(plan.places(), (std::vector<int64_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(plan.received(), 5);
}

TEST(HaloPlan, RefusesWhatItCannotRead) {
  const auto layout = AttentionLayout::of(
      Ownership::contiguous(8, 2),
      {Mask::causal(Packing::single(8)), Mask::causal(Packing::single(8))});
  const auto message = [&](int64_t count, int rank, int64_t rows) {
    return test::message_of([&] { HaloPlan::of(layout, count, rank, rows); });
  };
  EXPECT_EQ(message(-1, 0, 2), "HaloPlan: a count of -1; expected 0 or more");
  EXPECT_EQ(message(1, 2, 2), "HaloPlan: rank 2 of 2");
  EXPECT_EQ(message(1, 0, 3),
            "HaloPlan: 2 masks for 3 rows; give one for all rows, or one for "
            "each");
  const auto hidden = AttentionLayout::of(
      Ownership::contiguous(8, 2),
      {Mask::causal(Packing::single(8)).with_hidden({{0, 2}})});
  EXPECT_THAT(test::message_of([&] { HaloPlan::of(hidden, 1, 0); }),
              ::testing::HasSubstr("hides tokens; give a packing"));
}

}  // namespace
}  // namespace longspan
