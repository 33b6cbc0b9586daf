#include "longspan/core/document_runs.h"

#include <gtest/gtest.h>

#include "tests/support/property.h"
#include "tests/support/values.h"

namespace longspan {
namespace {

using test::at;
using test::OwnershipCase;

/// Token by token, against where every token lies.
void runs_hold_every_real_token_once(const OwnershipCase& c) {
  const Packing packing = c.packing.packing();
  const Ownership owners = c.ownership();
  std::vector<int> held(static_cast<std::size_t>(packing.tokens()), 0);
  for (int rank = 0; rank < owners.ranks(); ++rank) {
    int64_t next = 0;
    const DocumentRun* last = nullptr;
    const auto runs = runs_of(packing, owners, rank);
    for (const DocumentRun& run : runs) {
      ASSERT_FALSE(run.tokens.empty());
      ASSERT_GE(run.local, next) << "in local order";
      next = run.local + run.size();
      for (int64_t i = 0; i < run.size(); ++i) {
        const int64_t token = run.tokens.begin + i;
        ++at(held, token);
        ASSERT_FALSE(packing.is_pad(token)) << token;
        ASSERT_EQ(owners.owner_of(token), rank);
        ASSERT_EQ(owners.local_of(token), run.local + i);
        ASSERT_EQ(packing.locate(token),
                  (Packing::Place{run.document, run.position + i}));
      }
      if (last != nullptr && last->document == run.document &&
          last->tokens.end == run.tokens.begin) {
        ASSERT_NE(last->local + last->size(), run.local)
            << "two runs that are one";
      }
      last = &run;
    }
  }
  for (int64_t token = 0; token < packing.tokens(); ++token) {
    ASSERT_EQ(at(held, token), packing.is_pad(token) ? 0 : 1) << token;
  }
}

void the_run_before_is_a_run_that_ends_here(const OwnershipCase& c) {
  const Packing packing = c.packing.packing();
  const Ownership owners = c.ownership();
  for (int rank = 0; rank < owners.ranks(); ++rank) {
    for (const DocumentRun& run : runs_of(packing, owners, rank)) {
      if (run.position == 0) {
        ASSERT_EQ(run.before_rank, DocumentRun::kNobody);
        ASSERT_TRUE(run.before.empty());
        continue;
      }
      const auto theirs = runs_of(packing, owners, run.before_rank);
      ASSERT_EQ(std::ranges::count_if(theirs,
                                      [&](const DocumentRun& other) {
                                        return other.document == run.document &&
                                               other.tokens == run.before;
                                      }),
                1);
      ASSERT_EQ(run.before.end, run.tokens.begin);
    }
  }
}

OwnershipCase draw(test::Random& random) {
  return test::draw_ownership(random, test::draw_packing(random, 32, 4));
}

TEST(DocumentRuns, HoldEveryRealTokenOnce) {
  test::for_all(500, draw, runs_hold_every_real_token_once);
}

TEST(DocumentRuns, FollowARunOfTheSameDocument) {
  test::for_all(500, draw, the_run_before_is_a_run_that_ends_here);
}

TEST(DocumentRuns, HeadTailHasTwoRunsARank) {
  const auto runs =
      runs_of(Packing::single(64), Ownership::head_tail(64, 4), 1);
  ASSERT_EQ(runs.size(), 2U);
  EXPECT_EQ(runs[0], (DocumentRun{0, {8, 16}, 0, 8, 0, {0, 8}}));
  EXPECT_EQ(runs[1], (DocumentRun{0, {48, 56}, 8, 48, 2, {40, 48}}));
}

TEST(DocumentRuns, OneTokenIsARun) {
  const auto runs =
      runs_of(Packing::of({1, 1, 0, 2}), Ownership::contiguous(4, 2), 0);
  ASSERT_EQ(runs.size(), 2U);
  EXPECT_EQ(runs[0], (DocumentRun{0, {0, 1}, 0, 0}));
  EXPECT_EQ(runs[1], (DocumentRun{1, {1, 2}, 1, 0}));
}

TEST(DocumentRuns, RefusesOtherTokens) {
  EXPECT_EQ(test::message_of([] {
              runs_of(Packing::single(6), Ownership::contiguous(8, 2), 0);
            }),
            "runs_of: a packing of 6 tokens over an ownership of 8; both must "
            "have the same tokens");
}

}  // namespace
}  // namespace longspan
