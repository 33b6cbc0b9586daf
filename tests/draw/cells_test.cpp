#include "longspan/draw/detail/cells.h"

#include <gtest/gtest.h>

#include <set>

#include "longspan/plan/detail/ring.h"
#include "tests/support/values.h"

namespace longspan {
namespace {

using test::message_of;

void covers_once(const std::vector<TokenRange>& cells, int64_t tokens,
                 int64_t most) {
  EXPECT_LE(std::ssize(cells), most);
  int64_t next = 0;
  for (TokenRange cell : cells) {
    EXPECT_EQ(cell.begin, next);
    EXPECT_FALSE(cell.empty());
    next = cell.end;
  }
  EXPECT_EQ(next, tokens);
}

TEST(Cells, CoverTheStreamOnceWithinTheLimit) {
  for (int64_t tokens = 0; tokens <= 40; ++tokens) {
    for (int64_t most = 1; most <= 12; ++most) {
      covers_once(cut_cells(tokens, {}, most), tokens, most);
      covers_once(cut_cells(tokens, {3, 7, 20}, most), tokens, most);
    }
  }
}

TEST(Cells, AreCutAtEveryBorderThatFits) {
  for (int64_t tokens = 21; tokens <= 90; ++tokens) {
    const auto cells = cut_cells(tokens, {1, 7, 20}, 8);
    for (int64_t border : {1, 7, 20}) {
      EXPECT_TRUE(std::ranges::count(cells, border, &TokenRange::begin) == 1)
          << border << " of " << tokens;
    }
  }
}

TEST(Cells, AreEvenWhereBordersAllow) {
  for (TokenRange cell : cut_cells(64, {8, 16, 24, 40}, 32)) {
    EXPECT_EQ(cell.size(), 2);
  }
}

TEST(Cells, AHugeStreamIsCutInTime) {
  covers_once(cut_cells(kMostDrawnTokens, {1, kMostDrawnTokens - 1}, 64),
              kMostDrawnTokens, 64);
}

TEST(Spread, KeepsBothEndsAndNeverRepeats) {
  for (int count = 1; count <= 50; ++count) {
    for (int most = 1; most <= 20; ++most) {
      const std::vector<int> shown = spread(count, most);
      ASSERT_EQ(std::ssize(shown), std::min(count, most));
      EXPECT_EQ(std::set<int>(shown.begin(), shown.end()).size(), shown.size());
      EXPECT_EQ(shown.front(), 0);
      EXPECT_EQ(shown.back(), most == 1 ? 0 : count - 1);
    }
  }
}

TEST(Ring, EveryRankMeetsEveryOwnerOnce) {
  for (int ranks = 1; ranks <= 9; ++ranks) {
    for (int rank = 0; rank < ranks; ++rank) {
      std::set<int> owners;
      for (int step = 0; step < ranks; ++step) {
        const int owner = ring_owner(rank, step, ranks);
        EXPECT_EQ(ring_step(rank, owner, ranks), step);
        owners.insert(owner);
      }
      EXPECT_EQ(std::ssize(owners), ranks);
      EXPECT_EQ(ring_owner(rank, 0, ranks), rank);
    }
  }
}

TEST(Ring, RefusesStepsOutsideTheRing) {
  EXPECT_EQ(message_of([] { ring_owner(1, 4, 4); }),
            "ring_owner: rank 1 at step 4 of a ring of 4");
}

TEST(ShortCount, KeepsThreeDigitsAboveAMillion) {
  EXPECT_EQ(short_count(0), "0");
  EXPECT_EQ(short_count(999'999), "999999");
  EXPECT_EQ(short_count(1'000'000), "1.00M");
  EXPECT_EQ(short_count(24'416'000), "24.4M");
  EXPECT_EQ(short_count(999'900'000), "1.00G");
  EXPECT_EQ(short_count(1'220'000'000'000), "1.22T");
}

}  // namespace
}  // namespace longspan
