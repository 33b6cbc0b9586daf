#include "longspan/ops/fused_segments.h"

#include <gtest/gtest.h>

#include <map>

#include "tests/support/masks.h"
#include "tests/support/property.h"

namespace longspan {
namespace {

using test::SharedMaskCase;

/// As torch's flash kernel sees it, from the last query and the last key: a
/// bound as wide as there are keys is none, and where there is one bound, the
/// missing one is that wide.
bool shows(const FusedSegment& segment, int64_t query, int64_t key) {
  const int64_t width = segment.keys.size();
  const auto bound = [&](int64_t of) { return of >= width ? -1 : of; };
  int64_t left = bound(segment.left), right = bound(segment.right);
  if (left < 0 && right >= 0) left = width;
  if (right < 0 && left >= 0) right = width;
  const int64_t apart =
      (key - segment.keys.end) - (query - segment.queries.end);
  return segment.queries.contains(query) && segment.keys.contains(key) &&
         (left < 0 || apart >= -left) && (right < 0 || apart <= right);
}

/// The lines of one rank against the keys of another.
std::vector<KeyLines> lines_of(const SharedMaskCase& c, int rank, int other) {
  const Ownership ownership = c.owners.ownership();
  return key_lines(c.mask.mask(), ownership.ranges_of(rank),
                   ownership.ranges_of(other));
}

void segments_hold_the_pairs_of_their_line(const SharedMaskCase& c) {
  const int last = c.owners.ownership().ranks() - 1;
  for (const KeyLines& line : lines_of(c, 0, last)) {
    const auto segments = fused_segments(line);
    ASSERT_LE(segments.size(), 5U);
    int64_t next = line.queries.begin;
    for (const FusedSegment& segment : segments) {
      ASSERT_EQ(segment.queries.begin, next);
      ASSERT_TRUE(segment.is_full() ||
                  segment.queries.size() <= segment.keys.size());
      next = segment.queries.end;
      for (int64_t q = segment.queries.begin; q < next; ++q) {
        const TokenRange keys = line.keys_of(q);
        for (int64_t k = segment.keys.begin; k < segment.keys.end; ++k) {
          ASSERT_EQ(shows(segment, q, k), keys.contains(k))
              << "query " << q << " key " << k;
        }
        ASSERT_TRUE(segment.keys.contains(keys)) << "query " << q;
      }
    }
    ASSERT_EQ(next, line.queries.end);
  }
}

TEST(FusedSegments, HoldThePairsOfTheirLine) {
  test::for_all(
      1500, [](test::Random& random) { return draw_shared_mask(random, 24); },
      segments_hold_the_pairs_of_their_line);
}

void joined_segments_hold_each_pair_once(const SharedMaskCase& c) {
  const Ownership ownership = c.owners.ownership();
  for (int other : {0, ownership.ranks() - 1}) {
    const auto lines = lines_of(c, 0, other);
    std::map<std::pair<int64_t, int64_t>, int> expected, held;
    std::size_t unjoined = 0;
    for (const KeyLines& line : lines) {
      unjoined += fused_segments(line).size();
      for (int64_t q = line.queries.begin; q < line.queries.end; ++q) {
        const TokenRange keys = line.keys_of(q);
        for (int64_t k = keys.begin; k < keys.end; ++k) ++expected[{q, k}];
      }
    }
    const auto segments = fused_segments(lines);
    ASSERT_LE(segments.size(), unjoined);
    for (const FusedSegment& segment : segments) {
      for (int64_t q = segment.queries.begin; q < segment.queries.end; ++q) {
        for (int64_t k = segment.keys.begin; k < segment.keys.end; ++k) {
          if (shows(segment, q, k)) ++held[{q, k}];
        }
      }
    }
    ASSERT_EQ(held, expected);
  }
}

TEST(FusedSegments, HoldEachPairOnceWhenJoined) {
  test::for_all(
      1500, [](test::Random& random) { return draw_shared_mask(random, 24); },
      joined_segments_hold_each_pair_once);
}

/// 8 ranks with 2 x 4 of 64 tokens each: one call for each step.
TEST(FusedSegments, OfAHeadTailRingAreOneForEachStep) {
  const Ownership owners = Ownership::head_tail(64, 8);
  const Mask mask = Mask::causal(Packing::single(64));
  for (int rank = 0; rank < 8; ++rank) {
    for (int other = 0; other < 8; ++other) {
      const auto segments = fused_segments(
          key_lines(mask, owners.ranges_of(rank), owners.ranges_of(other)));
      ASSERT_EQ(segments.size(), 1U) << rank << " sees " << other;
      const FusedSegment& all = segments[0];
      EXPECT_EQ(all.is_causal(), rank == other);
      EXPECT_EQ(all.is_full(), rank != other);
      EXPECT_EQ(all.queries.size(), rank >= other ? 8 : 4);
      EXPECT_EQ(all.keys.size(), rank > other ? 4 : 8);
    }
  }
}

TEST(FusedSegments, OfEachRowAreCountedWhenRowsAgree) {
  const FusedSegment a{.row = 0, .queries = {0, 4}, .keys = {0, 4}};
  FusedSegment b = a;
  b.row = 1;
  EXPECT_EQ(segments_of_each_row(std::vector{a, b}, 2), 1U);
  b.right = 0;
  EXPECT_EQ(segments_of_each_row(std::vector{a, b}, 2), 0U);
  EXPECT_EQ(segments_of_each_row(std::vector{a}, 2), 0U);
}

}  // namespace
}  // namespace longspan
