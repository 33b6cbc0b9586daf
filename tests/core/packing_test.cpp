#include "longspan/core/packing.h"

#include <gtest/gtest.h>

#include <limits>

#include "tests/support/property.h"
#include "tests/support/values.h"

namespace longspan {
namespace {

using test::message_of;
using test::PackingCase;
using test::Refusal;

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

std::vector<PackingCase> small_packings() {
  return test::all_packings(3, 3, {0, 1, 2});
}

PackingCase draw(test::Random& random) {
  return test::draw_packing(random);
}

/// Walks the stream once and compares every token with where it must lie.
void every_token_has_its_place(const PackingCase& c) {
  const Packing packing = c.packing();
  ASSERT_EQ(packing.documents(), std::ssize(c.documents));
  ASSERT_EQ(packing.tokens(), c.tokens());
  int64_t token = 0, real = 0;
  std::vector<int64_t> pads;
  for (int64_t d = 0; d < packing.documents(); ++d) {
    const auto [length, slot] = test::at(c.documents, d);
    ASSERT_EQ(packing.length(d), length);
    ASSERT_EQ(packing.padded_length(d), slot);
    ASSERT_EQ(packing.offset(d), token);
    ASSERT_EQ(packing.slot(d), (TokenRange{token, token + slot}));
    ASSERT_EQ(packing.real(d), (TokenRange{token, token + length}));
    ASSERT_EQ(test::at(packing.lengths(), d), length);
    ASSERT_EQ(test::at(packing.offsets(), d), token);
    ASSERT_EQ(test::at(packing.offsets(), d + 1), token + slot);
    for (int64_t position = 0; position < slot; ++position, ++token) {
      const Packing::Place place{d, position};
      ASSERT_EQ(packing.locate(token), place) << token;
      ASSERT_EQ(packing.document_of(token), d) << token;
      ASSERT_EQ(packing.token_of(place), token);
      ASSERT_EQ(packing.is_pad(token), position >= length) << token;
      if (position >= length) pads.push_back(token);
      if (position < length) ++real;
    }
  }
  ASSERT_EQ(packing.tail(), (TokenRange{token, c.tokens()}));
  for (int64_t position = 0; position < c.tail; ++position, ++token) {
    const Packing::Place place{Packing::kTail, position};
    ASSERT_EQ(packing.locate(token), place) << token;
    ASSERT_EQ(packing.token_of(place), token);
    ASSERT_TRUE(packing.is_pad(token)) << token;
    pads.push_back(token);
  }
  ASSERT_EQ(token, packing.tokens());
  ASSERT_EQ(packing.real_tokens(), real);
  ASSERT_EQ(packing.pads(), test::runs_in(pads));
  ASSERT_EQ(packing.real_tokens() + count_tokens(packing.pads()),
            packing.tokens());
}

TEST(Packing, EveryTokenHasItsPlaceInSmallPackings) {
  test::for_each(small_packings(), every_token_has_its_place);
}

TEST(Packing, EveryTokenHasItsPlaceInRandomPackings) {
  test::for_all(500, draw, every_token_has_its_place);
}

void sums_and_extremes_agree(const PackingCase& c) {
  const Packing packing = c.packing();
  std::vector<int64_t> sums{0};
  int64_t longest = 0, longest_padded = 0;
  for (const auto& [length, slot] : c.documents) {
    sums.push_back(sums.back() + length);
    longest = std::max(longest, length);
    longest_padded = std::max(longest_padded, slot);
  }
  ASSERT_EQ(packing.cumulative_lengths(), sums);
  ASSERT_EQ(packing.longest(), longest);
  ASSERT_EQ(packing.longest_padded(), longest_padded);
}

TEST(Packing, SumsAndExtremesAgreeWithTheDocuments) {
  test::for_each(test::all_packings(2, 3, {0, 2}), sums_and_extremes_agree);
  test::for_all(200, draw, sums_and_extremes_agree);
}

/// For every multiple from 1 to 9.
void rounding_is_the_least_that_fits(const PackingCase& c) {
  const Packing packing = c.packing();
  for (int64_t multiple = 1; multiple <= 9; ++multiple) {
    const auto is_least = [&](int64_t rounded, int64_t tokens) {
      return rounded % multiple == 0 && rounded >= tokens &&
             rounded < tokens + multiple;
    };
    const Packing slots = packing.with_slots_multiple_of(multiple);
    ASSERT_EQ(slots.documents(), packing.documents());
    for (int64_t d = 0; d < packing.documents(); ++d) {
      ASSERT_EQ(slots.length(d), packing.length(d));
      ASSERT_TRUE(is_least(slots.padded_length(d), packing.padded_length(d)));
    }
    ASSERT_TRUE(is_least(slots.tail().size(), packing.tail().size()));

    const Packing stream = packing.with_tokens_multiple_of(multiple);
    ASSERT_TRUE(is_least(stream.tokens(), packing.tokens()));
    ASSERT_EQ(stream.real_tokens(), packing.real_tokens());
    ASSERT_EQ(stream.documents(), packing.documents());
    for (int64_t d = 0; d < packing.documents(); ++d) {
      ASSERT_EQ(stream.slot(d), packing.slot(d));
      ASSERT_EQ(stream.real(d), packing.real(d));
    }
  }
}

TEST(Packing, RoundingUpIsTheLeastThatFits) {
  test::for_each(test::all_packings(2, 3, {0, 2}),
                 rounding_is_the_least_that_fits);
  test::for_all(200, draw, rounding_is_the_least_that_fits);
}

TEST(Packing, RoundUpIsTheSmallestMultipleNotBelow) {
  for (int64_t value = 0; value <= 64; ++value) {
    for (int64_t multiple = 1; multiple <= 18; ++multiple) {
      int64_t expected = value;
      while (expected % multiple != 0) ++expected;
      EXPECT_EQ(round_up(value, multiple), expected);
    }
  }
  EXPECT_EQ(round_up(kMost, 1), kMost);
  EXPECT_EQ(round_up(kMost - 1, 2), kMost - 1);
}

TEST(Packing, HoldsNothingByDefault) {
  const Packing packing;
  EXPECT_EQ(packing.documents(), 0);
  EXPECT_EQ(packing.tokens(), 0);
  EXPECT_EQ(packing, Packing::of({}));
  EXPECT_TRUE(packing.pads().empty());
  EXPECT_EQ(packing.tail(), (TokenRange{0, 0}));
}

TEST(Packing, SingleIsOneDocument) {
  for (int64_t tokens = 0; tokens <= 64; ++tokens) {
    EXPECT_EQ(Packing::single(tokens), Packing::of({tokens}));
    EXPECT_EQ(Packing::single(tokens).tokens(), tokens);
  }
}

TEST(Packing, RowsAreEqualDocuments) {
  EXPECT_EQ(Packing::rows(3, 5), Packing::of({5, 5, 5}));
  EXPECT_EQ(Packing::rows(2, 0), Packing::of({0, 0}));
  EXPECT_EQ(Packing::rows(0, 7), Packing());
}

TEST(Packing, TokensOfEmptyDocumentsGoToTheNextOne) {
  const Packing packing = Packing::of({0, 2, 0, 0, 1, 0});
  EXPECT_EQ(packing.document_of(0), 1);
  EXPECT_EQ(packing.document_of(1), 1);
  EXPECT_EQ(packing.document_of(2), 4);
  EXPECT_EQ(packing.offset(5), 3);
}

TEST(Packing, PadsAreKnownByCounting) {
  const Packing packing = Packing::of({2, 0, 3}, {4, 2, 3}, 12);
  const std::vector<TokenRange> expected{{2, 6}, {9, 12}};
  EXPECT_EQ(packing.pads(), expected);
}

TEST(Packing, EqualityIsOfAllParts) {
  const Packing packing = Packing::of({2, 3}, {4, 4}, 10);
  EXPECT_EQ(packing, Packing::of({2, 3}, {4, 4}, 10));
  EXPECT_FALSE(packing == Packing::of({2, 3}, {4, 4}, 11));
  EXPECT_FALSE(packing == Packing::of({2, 3}, {4, 5}, 10));
  EXPECT_FALSE(packing == Packing::of({2, 4}, {4, 4}, 10));
  EXPECT_FALSE(packing == Packing::of({2, 3, 0}, {4, 4, 0}, 10));
}

TEST(Packing, PrintsItself) {
  EXPECT_EQ(Packing::of({2, 3}, {4, 3}).to_string(),
            "Packing(7 tokens, 2 documents: 2/4 3)");
  EXPECT_EQ(Packing::single(5).to_string(), "Packing(5 tokens, 1 document: 5)");
  EXPECT_EQ(Packing().to_string(), "Packing(0 tokens, 0 documents)");
  EXPECT_EQ(Packing::rows(9, 1).to_string(),
            "Packing(9 tokens, 9 documents: 1 1 1 1 1 1 1 1 ...)");
}

TEST(Packing, HoldsTheLargestStream) {
  const Packing packing = Packing::of({kMost - 4, 3}, {kMost - 4, 4});
  EXPECT_EQ(packing.tokens(), kMost);
  EXPECT_EQ(packing.locate(kMost - 1), (Packing::Place{1, 3}));
  EXPECT_TRUE(packing.is_pad(kMost - 1));
}

const Packing kFive = Packing::of({2, 1}, {3, 1}, 5);

const std::vector<Refusal> kRefused{
    {"NegativeLength", [] { Packing::of({3, -2}, {3, 4}); },
     "Packing: document 1 has length -2; lengths are not negative (drop "
     "sentinels first)"},
    {"SentinelInLengths", [] { Packing::of({3, -1000}, {4, 4}); },
     "Packing: document 1 has length -1000; lengths are not negative (drop "
     "sentinels first)"},
    {"SentinelInBoth", [] { Packing::of({3, -1000}, {4, -1000}); },
     "Packing: a padded length is -1000; lengths are not negative (drop "
     "sentinels first)"},
    {"SentinelInPaddedLengthsOfAStream",
     [] { Packing::of({3, 0}, {4, -1000}, 8); },
     "Packing: document 1 has 0 tokens but a slot of -1000; the padded length "
     "must be at least the length"},
    {"LengthAboveSlot", [] { Packing::of({3, 5}, {3, 4}); },
     "Packing: document 1 has 5 tokens but a slot of 4; the padded length must "
     "be at least the length"},
    {"SlotsAboveStream", [] { Packing::of({3, 5}, {4, 6}, 9); },
     "Packing: the slots hold 10 tokens but the stream has 9; shorten the "
     "documents or lengthen the stream"},
    {"NegativeStream", [] { Packing::of({}, {}, -1); },
     "Packing: the slots hold 0 tokens but the stream has -1; shorten the "
     "documents or lengthen the stream"},
    {"OneSlotTooFew", [] { Packing::of({3, 5}, {3}); },
     "Packing: 2 lengths but 1 padded lengths; expected one padded length for "
     "each document"},
    {"SlotsAbove64Bits", [] { Packing::of({kMost, 1}); },
     "Packing: the padded lengths add up to more than 64 bits hold"},
    {"SlotsOfAStreamAbove64Bits",
     [] { Packing::of({0, 0}, {kMost, kMost}, kMost); },
     "Packing: the padded lengths add up to more than 64 bits hold"},
    {"RoundedSlotsAbove64Bits",
     [] {
       constexpr int64_t kHalf = int64_t{1} << 62;
       Packing::of({kHalf - 1, kHalf - 1}).with_slots_multiple_of(kHalf);
     },
     "Packing: the padded lengths add up to more than 64 bits hold"},
    {"RoundedStreamAbove64Bits",
     [] { Packing::single(kMost).with_tokens_multiple_of(2); },
     "round_up: 9223372036854775807 has no multiple of 2 in 64 bits"},
    {"NegativeSingle", [] { Packing::single(-1); },
     "Packing: a stream of -1 tokens; expected at least 0"},
    {"NegativeRows", [] { Packing::rows(-1, 4); },
     "Packing: -1 rows of 4 tokens; neither may be negative"},
    {"MultipleOfNothing", [] { kFive.with_tokens_multiple_of(0); },
     "round_up: multiple is 0; expected at least 1"},
    {"RoundingUpANegative", [] { round_up(-1, 2); },
     "round_up: value is -1; expected at least 0"},
    {"TokenBelow", [] { kFive.locate(-1); }, "Packing::locate: token -1 of 5"},
    {"TokenAbove", [] { kFive.is_pad(5); }, "Packing::locate: token 5 of 5"},
    {"TokenOfNothing", [] { Packing().document_of(0); },
     "Packing::locate: token 0 of 0"},
    {"DocumentAbove", [] { kFive.length(2); },
     "Packing::length: document 2 of 2"},
    {"DocumentBelow", [] { kFive.slot(-1); },
     "Packing::slot: document -1 of 2"},
    {"PositionAbove", [] { kFive.token_of({0, 3}); },
     "Packing::token_of: position 3 of 3"},
    {"PositionBelow", [] { kFive.token_of({0, -1}); },
     "Packing::token_of: position -1 of 3"},
    {"PositionAboveTheTail", [] { kFive.token_of({Packing::kTail, 1}); },
     "Packing::token_of: position 1 of 1"},
};

class PackingRefuses : public ::testing::TestWithParam<Refusal> {};

TEST_P(PackingRefuses, ByMessage) {
  EXPECT_EQ(message_of(GetParam().call), GetParam().message);
}

INSTANTIATE_TEST_SUITE_P(, PackingRefuses, ::testing::ValuesIn(kRefused),
                         test::refusal_name);

}  // namespace
}  // namespace longspan
