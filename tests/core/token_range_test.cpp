#include "longspan/core/token_range.h"

#include <gtest/gtest.h>

#include <set>
#include <sstream>

#include "tests/support/property.h"
#include "tests/support/values.h"

namespace longspan {
namespace {

using test::Random;

struct RangesCase {
  std::vector<TokenRange> ranges;

  std::vector<RangesCase> smaller() const {
    std::vector<RangesCase> cases;
    for (const auto& fewer : test::without_one(ranges)) {
      cases.push_back({fewer});
    }
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      if (ranges[i].empty()) continue;
      cases.push_back(*this);
      --cases.back().ranges[i].end;
    }
    return cases;
  }
  std::string to_string() const { return test::listed(ranges); }
};

RangesCase draw_ranges(Random& random) {
  RangesCase drawn;
  for (int64_t i = random.between(0, 8); i > 0; --i) {
    drawn.ranges.push_back(test::draw_range(random, 64));
  }
  return drawn;
}

TEST(TokenRange, KnowsItsTokens) {
  const TokenRange range{3, 6};
  EXPECT_EQ(range.size(), 3);
  EXPECT_FALSE(range.empty());
  EXPECT_FALSE(range.contains(2));
  EXPECT_TRUE(range.contains(3));
  EXPECT_TRUE(range.contains(5));
  EXPECT_FALSE(range.contains(6));
  EXPECT_TRUE((TokenRange{4, 4}).empty());
  EXPECT_EQ((TokenRange{}).size(), 0);
}

TEST(TokenRange, PrintsItself) {
  std::ostringstream text;
  text << TokenRange{3, 6};
  EXPECT_EQ(text.str(), "[3, 6)");
}

TEST(TokenRange, HoldsAnotherWhoseTokensItHolds) {
  for (TokenRange a : test::all_ranges(5)) {
    for (TokenRange b : test::all_ranges(5)) {
      bool all = true;
      for (int64_t t = b.begin; t < b.end; ++t) all = all && a.contains(t);
      EXPECT_EQ(a.contains(b), all) << a << " " << b;
    }
  }
}

TEST(TokenRange, IntersectionHoldsTheTokensInBoth) {
  for (TokenRange a : test::all_ranges(5)) {
    for (TokenRange b : test::all_ranges(5)) {
      const TokenRange both = intersect(a, b);
      EXPECT_LE(both.begin, both.end);
      for (int64_t t = 0; t < 6; ++t) {
        EXPECT_EQ(both.contains(t), a.contains(t) && b.contains(t))
            << a << " " << b << " at " << t;
      }
    }
  }
}

void normalized_keeps_the_tokens(const RangesCase& c) {
  const std::vector<TokenRange> normal = normalized(c.ranges);
  const auto given = test::tokens_of(c.ranges);
  const std::set<int64_t> expected(given.begin(), given.end());
  const auto kept = test::tokens_of(normal);
  ASSERT_EQ(kept, std::vector<int64_t>(expected.begin(), expected.end()));
  ASSERT_EQ(normal, test::runs_in(kept));
  ASSERT_EQ(count_tokens(normal), std::ssize(kept));
  ASSERT_EQ(count_tokens(c.ranges), std::ssize(given));
}

TEST(TokenRange, NormalizedKeepsTheTokensOfEveryThreeRanges) {
  std::vector<RangesCase> cases{{}};
  const auto ranges = test::all_ranges(4);
  for (TokenRange a : ranges) {
    for (TokenRange b : ranges) {
      for (TokenRange c : ranges) cases.push_back({{a, b, c}});
    }
  }
  test::for_each(cases, normalized_keeps_the_tokens);
}

TEST(TokenRange, NormalizedKeepsTheTokensOfRandomRanges) {
  test::for_all(300, draw_ranges, normalized_keeps_the_tokens);
}

TEST(TokenRange, AppendJoinsWhatContinues) {
  std::vector<TokenRange> ranges;
  append_range(ranges, {4, 4});
  EXPECT_TRUE(ranges.empty());
  append_range(ranges, {4, 6});
  append_range(ranges, {6, 7});
  append_range(ranges, {9, 10});
  append_range(ranges, {10, 10});
  append_range(ranges, {2, 4});
  EXPECT_EQ(ranges, (std::vector<TokenRange>{{4, 7}, {9, 10}, {2, 4}}));
}

// The generator behind all property tests.

void fewer_than_ten_tokens(const RangesCase& c) {
  EXPECT_LT(count_tokens(c.ranges), 10);
}

TEST(Property, ShrinksAFailingCase) {
  const RangesCase failing{{{0, 40}, {3, 3}, {7, 31}}};
  const RangesCase small = test::shrunk(failing, fewer_than_ten_tokens);
  EXPECT_EQ(small.ranges.size(), 1);
  EXPECT_EQ(count_tokens(small.ranges), 10);
}

TEST(Property, ReportsTheSeedAndTheSmallestCase) {
  ::testing::TestPartResultArray results;
  {
    ::testing::ScopedFakeTestPartResultReporter keep(
        ::testing::ScopedFakeTestPartResultReporter::
            INTERCEPT_ONLY_CURRENT_THREAD,
        &results);
    test::for_all(100, draw_ranges, fewer_than_ten_tokens);
  }
  ASSERT_EQ(results.size(), 1);
  const std::string text = results.GetTestPartResult(0).message();
  EXPECT_NE(text.find("LONGSPAN_SEED="), std::string::npos) << text;
  EXPECT_NE(text.find("smallest failing case: {["), std::string::npos) << text;
}

TEST(Property, ALawThatThrowsFails) {
  const auto law = [](const RangesCase&) { throw std::runtime_error("oh"); };
  EXPECT_NE(test::failure_of(RangesCase{}, law).find("the law threw: oh"),
            std::string::npos);
}

}  // namespace
}  // namespace longspan
