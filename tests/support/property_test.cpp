#include "tests/support/property.h"

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

namespace longspan::test {
namespace {

/// A number; smaller ones are one less.
struct NumberCase {
  int64_t number = 0;
  std::vector<NumberCase> smaller() const {
    return number == 0 ? std::vector<NumberCase>{}
                       : std::vector<NumberCase>{{number - 1}};
  }
  std::string to_string() const { return std::to_string(number); }
};

void is_small_where_odd(const NumberCase& c) {
  if (c.number % 2 == 0) return pass_over();
  EXPECT_LT(c.number, 5);
}

NumberCase draw_even(Random& random) {
  return {2 * random.between(0, 3)};
}

TEST(Property, ALawThatSpeaksOfSomeCasesHolds) {
  for_each(std::vector<NumberCase>{{0}, {2}, {3}}, is_small_where_odd);
}

TEST(Property, ALawThatPassesOverAllListedCasesFails) {
  const std::vector<NumberCase> cases{{0}, {2}};
  EXPECT_NONFATAL_FAILURE(for_each(cases, is_small_where_odd),
                          "the law passed over all of 2 cases");
}

TEST(Property, ALawThatPassesOverAllRandomCasesFails) {
  EXPECT_NONFATAL_FAILURE(for_all(5, draw_even, is_small_where_odd),
                          "the law passed over all of 5 cases");
}

TEST(Property, ALawWithoutCasesFails) {
  const std::vector<NumberCase> none;
  EXPECT_NONFATAL_FAILURE(for_each(none, is_small_where_odd),
                          "the law passed over all of 0 cases");
}

TEST(Property, ABrokenLawShowsTheSmallestCase) {
  const std::vector<NumberCase> cases{{9}};
  EXPECT_NONFATAL_FAILURE(
      for_each(cases, [](const NumberCase& c) { EXPECT_LT(c.number, 5); }),
      "smallest failing case: 5");
}

}  // namespace
}  // namespace longspan::test
