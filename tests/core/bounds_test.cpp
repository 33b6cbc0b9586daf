/// Small words that would cost gigabytes, hours or an overflow are refused,
/// with the number in the message; what lies just inside still answers.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <stdexcept>
#include <string>

#include "longspan/core/detail/even_pieces.h"
#include "longspan/core/mask.h"
#include "longspan/core/multiple.h"
#include "longspan/core/tile.h"
#include "longspan/core/work.h"
#include "longspan/plan/attention_layout.h"
#include "longspan/plan/plan.h"

namespace longspan {
namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();

template <class Call>
std::string refusal(const Call& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "no refusal";
}

AttentionLayout causal(const Ownership& ownership) {
  return AttentionLayout::of(
      ownership, {Mask::causal(Packing::single(ownership.tokens()))});
}

TEST(Bounds, AMaskAnswersAboutTheLastTokensThatNumbersReach) {
  const Mask mask = Mask::causal(Packing::single(3));
  EXPECT_EQ(refusal([&] { (void)mask.allows(kMost, 0); }),
            "Mask::allows: query 9223372036854775807 of 3");
  EXPECT_EQ(refusal([&] { (void)mask.allows(0, kMost); }),
            "Mask::allows: key 9223372036854775807 of 3");
  EXPECT_EQ(refusal([&] { (void)mask.keys_of(kMost); }),
            "Mask::keys_of: query 9223372036854775807 of 3");
  EXPECT_EQ(refusal([&] { (void)mask.key_ranges_of(kLeast); }),
            "Mask::key_ranges_of: query -9223372036854775808 of 3");
}

TEST(Bounds, HeadAndTailMeetInTheLongestStream) {
  const int64_t tokens = kMost - 7;
  const Ownership ownership = Ownership::head_tail(tokens, 2);
  for (int64_t token : {int64_t{0}, tokens / 2, tokens - 1}) {
    const int rank = ownership.owner_of(token);
    EXPECT_EQ(ownership.global_of(rank, ownership.local_of(token)), token);
  }
  EXPECT_EQ(ownership.local_of(tokens - 1), tokens / 2 - 1);
}

TEST(Bounds, DocumentsAreCountedBeforeTheyAreMade) {
  EXPECT_EQ(refusal([] { (void)Packing::rows(int64_t{1} << 33, 0); }),
            "Packing: 8589934592 documents; a stream has at most 16777216");
  EXPECT_EQ(Packing::rows(1 << 16, 0).documents(), 1 << 16);
}

TEST(Bounds, RangesOfRanksAreCountedBeforeTheyAreListed) {
  const Ownership many =
      Ownership::contiguous(0, std::numeric_limits<int>::max());
  const Mask nothing = Mask::causal(Packing::single(0));
  EXPECT_EQ(refusal([&] { (void)work_per_rank(nothing, many); }),
            "work_per_rank: Ownership(contiguous, 0 tokens, 2147483647 ranks) "
            "has up to 2147483647 ranges on its ranks; at most 4194304 are "
            "looked at, so take fewer ranks or documents");
  EXPECT_EQ(refusal([&] { (void)Plan::of(causal(many), Strategy{}, 0); }),
            "Plan: 2147483647 ranks; plans go up to 1048576");
  EXPECT_EQ(work_per_rank(nothing, Ownership::contiguous(0, 1 << 12)).size(),
            1U << 12);
}

TEST(Bounds, ThereAreAtLeastAsManyRangesAsRanksHold) {
  for (const Ownership& ownership :
       {Ownership::contiguous(24, 4), Ownership::head_tail(24, 3),
        Ownership::per_document_head_tail(Packing::of({8, 4}, {8, 8}, 24), 2),
        Ownership::of_sizes({3, 0, 4}),
        Ownership::of_ranges({{{4, 6}, {0, 1}}, {{1, 4}}})}) {
    int64_t held = 0;
    for (int rank = 0; rank < ownership.ranks(); ++rank) {
      held += std::ssize(ownership.ranges_of(rank));
    }
    EXPECT_GE(ownership.most_ranges(), held) << ownership.to_string();
    EXPECT_GE(ownership.most_ranges(), ownership.ranks());
  }
}

TEST(Bounds, RowsOfAPlanAreCountedBeforeTheyAreRepeated) {
  const AttentionLayout layout = causal(Ownership::head_tail(18 * 4, 2));
  EXPECT_EQ(
      refusal([&] { (void)Plan::of(layout, Strategy{}, 0, int64_t{1} << 40); }),
      "Plan: 1099511627776 rows; plans go up to 16777216");
  EXPECT_EQ(
      refusal([&] { (void)Plan::of(layout, Strategy{}, 0, int64_t{1} << 24); }),
      "Plan: 16777216 rows with 3 stretches of queries in a step each; at most "
      "4194304 are planned, so cut the rows");
  // Rows without tokens cost nothing.
  const Plan plan = Plan::of(causal(Ownership::contiguous(0, 1)), Strategy{}, 0,
                             int64_t{1} << 24);
  EXPECT_EQ(plan.steps()[0].lines.size(), 0U);
  EXPECT_EQ(Plan::of(layout, Strategy{}, 0, 1000).steps()[0].lines.size(),
            1000 * Plan::of(layout, Strategy{}, 0, 1).steps()[0].lines.size());
}

/// Ranges of one document that all see each other: their pairs are counted
/// while they are found.
TEST(Bounds, PairsOfRangesAreCountedBeforeTheyFillTheMemory) {
  const int64_t documents = 4096, tokens = 4 * documents;
  const Packing packing =
      Packing::of(std::vector<int64_t>(static_cast<std::size_t>(documents), 4));
  const Ownership ownership = Ownership::per_document_head_tail(packing, 2);
  const Mask mask = Mask::causal(Packing::single(tokens));
  EXPECT_EQ(refusal([&] { (void)tiles_of(mask, ownership, 0); }),
            "tiles_of: more than 4194304 pairs of a range of queries and one "
            "of keys within its reach; deal tokens out in longer ranges");
  EXPECT_EQ(refusal([&] { (void)tiles(mask, ownership, 0, 1); }),
            "tiles: more than 4194304 pairs of a range of queries and one of "
            "keys within its reach; deal tokens out in longer ranges");
  const auto layout = AttentionLayout::of(ownership, {mask});
  EXPECT_THAT(refusal([&] { (void)Plan::of(layout, Strategy{}, 0); }),
              ::testing::HasSubstr("of keys see each other in more than "
                                   "4194304 pairs; deal tokens out in longer"));
  // With the packing that the owners were made for, each sees its document.
  EXPECT_LE(tiles_of(Mask::causal(packing), ownership, 0).size(),
            static_cast<std::size_t>(4 * documents));
}

TEST(Bounds, PairsAndBytesDoNotWrap) {
  const AttentionLayout layout =
      causal(Ownership::contiguous(2'000'000'000, 2));
  EXPECT_EQ(refusal([&] {
              (void)Plan::of(layout, Strategy{}, 1, 1 << 20);
            }).substr(0, 6),
            "Plan: ");
  const Plan plan = Plan::of(layout, Strategy{}, 1);
  const AttentionShape wide{1 << 30, 1 << 30, kMost, kMost, 2};
  EXPECT_EQ(refusal([&] { (void)plan.sent(wide, Pass::forward); }),
            "Plan: 9223372036854775807 and 9223372036854775807 add up to more "
            "than 64 bits count");
  EXPECT_EQ(refusal([&] { (void)plan.sent({-1, 1, 1, 1, 1}, Pass::forward); }),
            "Plan: a shape with -1 heads, channels or bytes; none of them is "
            "negative");
  EXPECT_EQ(refusal([] { (void)forward_flops(kMost, {}); }),
            "forward_flops: 2 times 9223372036854775807 is more than 64 bits "
            "count");
  EXPECT_EQ(refusal([] { (void)key_value_bytes(kMost, {}); }),
            "key_value_bytes: 9223372036854775807 times 256 is more than 64 "
            "bits count");
  const Mask full = Mask::full(Packing::single(Mask::kMostTokens));
  EXPECT_EQ(refusal([&] { (void)even_pieces({full, full}, 2); }).substr(0, 13),
            "even_pieces: ");
}

TEST(Bounds, HeadsAndMultiplesStayInside64Bits) {
  EXPECT_EQ(refusal([] { (void)HeadShare::of(kMost, 1, 1, 2); }),
            "HeadShare: 9223372036854775807 heads; expected 0 to 2147483647");
  EXPECT_EQ(refusal([] { (void)Strategy{}.over(2, kLeast); }),
            "Strategy: -9223372036854775808 key heads; expected 0 or more");
  EXPECT_EQ(refusal([] { (void)common_multiple(kLeast, 3); }),
            "common_multiple: -9223372036854775808 has none in 64 bits");
}

}  // namespace
}  // namespace longspan
