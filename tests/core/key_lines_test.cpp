#include "longspan/core/key_lines.h"

#include <gtest/gtest.h>

#include <map>

#include "longspan/core/mask.h"
#include "tests/support/masks.h"
#include "tests/support/property.h"

namespace longspan {
namespace {

using test::at;
using test::SharedMaskCase;

void lines_hold_every_pair_once(const SharedMaskCase& c) {
  const Mask mask = c.mask.mask();
  const Ownership ownership = c.owners.ownership();
  for (int rank = 0; rank < ownership.ranks(); ++rank) {
    const auto queries = test::tokens_of(ownership.ranges_of(rank));
    for (int owner = 0; owner < ownership.ranks(); ++owner) {
      const auto keys = test::tokens_of(ownership.ranges_of(owner));
      std::map<std::pair<int64_t, int64_t>, int> seen;
      int64_t counted = 0;
      int64_t first = 0;
      for (const KeyLines& line :
           key_lines(mask, ownership.ranges_of(rank),
                     ownership.ranges_of(owner), /*row=*/3)) {
        ASSERT_EQ(line.row, 3);
        ASSERT_GE(line.queries.begin, first);
        first = line.queries.begin;
        ASSERT_LE(0, line.begin_min);
        ASSERT_LE(line.begin_min, line.begin_max);
        ASSERT_LE(line.end_min, line.end_max);
        ASSERT_LE(line.end_max, std::ssize(keys));
        counted += count_pairs(line);
        for (int64_t q = line.queries.begin; q < line.queries.end; ++q) {
          const TokenRange visible = line.keys_of(q);
          ASSERT_FALSE(visible.empty()) << "query " << q;
          for (int64_t k = visible.begin; k < visible.end; ++k) {
            ++seen[{at(queries, q), at(keys, k)}];
          }
        }
      }
      int64_t pairs = 0;
      for (int64_t q : queries) {
        for (int64_t k : keys) {
          const int expected = mask.allows(q, k) ? 1 : 0;
          pairs += expected;
          const auto found = seen.find({q, k});
          ASSERT_EQ(found == seen.end() ? 0 : found->second, expected)
              << "query " << q << " key " << k;
        }
      }
      ASSERT_EQ(counted, pairs);
    }
  }
}

TEST(KeyLines, HoldEveryVisiblePairOnce) {
  test::for_all(
      1500, [](test::Random& random) { return draw_shared_mask(random, 24); },
      lines_hold_every_pair_once);
}

TEST(KeyLines, OfADocumentAreOneStretch) {
  const Mask mask = Mask::causal(Packing::of({5, 3}));
  const auto lines = key_lines(mask, {{0, 8}}, {{0, 8}});
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_EQ(lines[1].queries, (TokenRange{5, 8}));
  EXPECT_EQ(lines[1].keys_of(6), (TokenRange{5, 7}));
}

TEST(KeyLines, SkipWhatNobodySees) {
  const Mask mask = Mask::sliding(Packing::single(100), 10);
  // Queries 50 to 58 still see a key before 50.
  const auto lines = key_lines(mask, {{50, 100}}, {{0, 50}});
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_EQ(lines[0].queries, (TokenRange{0, 9}));
  EXPECT_TRUE(key_lines(mask, {{0, 50}}, {{50, 100}}).empty());
}

}  // namespace
}  // namespace longspan
