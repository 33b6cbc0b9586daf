#include "longspan/core/multiple.h"

#include <gtest/gtest.h>

#include <limits>
#include <numeric>
#include <stdexcept>
#include <vector>

namespace longspan {
namespace {

TEST(Multiple, RoundUpIsTheSmallestMultipleNotBelow) {
  for (int64_t multiple = 1; multiple <= 9; ++multiple) {
    for (int64_t value = 0; value <= 64; ++value) {
      const int64_t rounded = round_up(value, multiple);
      EXPECT_EQ(rounded % multiple, 0);
      EXPECT_GE(rounded, value);
      EXPECT_LT(rounded - value, multiple);
    }
  }
}

TEST(Multiple, RoundUpRefusesWhat64BitsDoNotHold) {
  EXPECT_THROW(round_up(std::numeric_limits<int64_t>::max(), 2),
               std::invalid_argument);
  EXPECT_THROW(round_up(-1, 2), std::invalid_argument);
  EXPECT_THROW(round_up(1, 0), std::invalid_argument);
}

TEST(Multiple, CommonMultipleIsTheLeastOne) {
  for (int64_t a = 1; a <= 12; ++a) {
    for (int64_t b = 1; b <= 12; ++b) {
      EXPECT_EQ(common_multiple(a, b), std::lcm(a, b));
    }
    EXPECT_EQ(common_multiple(a, 0), a);
    EXPECT_EQ(common_multiple(0, a), a);
  }
  EXPECT_THROW(common_multiple(std::numeric_limits<int64_t>::max(),
                               std::numeric_limits<int64_t>::max() - 1),
               std::invalid_argument);
}

struct Ratios {
  std::vector<int64_t> ratios;
  int64_t expected;
};

TEST(Multiple, SharesHoldWholeCompressedKeys) {
  const std::vector<Ratios> cases{
      {.ratios = {}, .expected = 1},
      {.ratios = {0, 0}, .expected = 1},
      {.ratios = {2}, .expected = 2},
      {.ratios = {4}, .expected = 8},
      {.ratios = {128}, .expected = 128},
      {.ratios = {0, 4, 128}, .expected = 128},
      {.ratios = {2, 3}, .expected = 6},
      {.ratios = {6, 4}, .expected = 24},
      {.ratios = {-3, 5}, .expected = 5},
  };
  for (const Ratios& each : cases) {
    EXPECT_EQ(share_multiple(each.ratios), each.expected);
  }
}

}  // namespace
}  // namespace longspan
