#include "longspan/core/ownership.h"

#include <gtest/gtest.h>

#include <limits>
#include <numeric>

#include "tests/support/property.h"
#include "tests/support/values.h"

namespace longspan {
namespace {

using test::at;
using test::message_of;
using test::OwnershipCase;
using test::PackingCase;
using test::Refusal;

constexpr int kMostRanks = 9;
constexpr int64_t kLongest = 64;

/// Every length from 0 to 64 over 1 to 9 ranks, every kind: alone, and between
/// other documents that are empty, short and padded.
std::vector<OwnershipCase> every_length_and_group() {
  std::vector<OwnershipCase> cases;
  for (OwnershipKind kind : test::all_kinds()) {
    for (int ranks = 1; ranks <= kMostRanks; ++ranks) {
      for (int64_t length = 0; length <= kLongest; ++length) {
        const PackingCase alone{{{length, length}}};
        const PackingCase among{
            {{0, 0}, {3, 5}, {length, length}, {0, 0}, {0, 2}}, length % 3};
        for (const PackingCase& packing : {alone, among}) {
          OwnershipCase c{kind, ranks, packing};
          for (int64_t i = 0; i < length % 11; ++i) {
            const auto rank = static_cast<int>((i * 5 + length) % ranks);
            c.pieces.push_back({(i * i) % 7, rank, (i * 3) % 4});
          }
          cases.push_back(c.fitted());
        }
      }
    }
  }
  return cases;
}

/// Every order of up to 5 tokens, cut into 3 shares in every way.
std::vector<OwnershipCase> every_small_share() {
  std::vector<OwnershipCase> cases;
  for (int64_t tokens = 0; tokens <= 5; ++tokens) {
    std::vector<int64_t> order(static_cast<std::size_t>(tokens));
    std::iota(order.begin(), order.end(), 0);
    do {
      for (int64_t one = 0; one <= tokens; ++one) {
        for (int64_t two = one; two <= tokens; ++two) {
          OwnershipCase c{OwnershipKind::ranges, 3, {{{tokens, tokens}}}};
          for (int64_t turn : order) {
            c.pieces.push_back({1, (turn >= one) + (turn >= two), turn});
          }
          cases.push_back(c);
        }
      }
    } while (std::ranges::next_permutation(order).found);
  }
  return cases;
}

OwnershipCase draw(test::Random& random) {
  return test::draw_ownership(random, test::draw_packing(random));
}

/// All cases above against one law.
template <class Law>
void always(const Law& law) {
  test::for_each(every_length_and_group(), law);
  test::for_each(every_small_share(), law);
  test::for_all(500, draw, law);
}

TEST(Ownership, EveryTokenHasOneOwner) {
  always([](const OwnershipCase& c) {
    const Ownership ownership = c.ownership();
    ASSERT_EQ(ownership.tokens(), c.packing.tokens());
    ASSERT_EQ(ownership.ranks(), c.ranks);
    ASSERT_EQ(ownership.kind(), c.kind);
    std::vector<int> owners(static_cast<std::size_t>(ownership.tokens()));
    for (int rank = 0; rank < ownership.ranks(); ++rank) {
      for (int64_t local = 0; local < ownership.local_tokens(rank); ++local) {
        ++at(owners, ownership.global_of(rank, local));
      }
    }
    ASSERT_EQ(owners, std::vector<int>(owners.size(), 1));
  });
}

TEST(Ownership, GlobalOfOwnerAndLocalIsTheToken) {
  always([](const OwnershipCase& c) {
    const Ownership ownership = c.ownership();
    for (int64_t token = 0; token < ownership.tokens(); ++token) {
      const int rank = ownership.owner_of(token);
      const int64_t local = ownership.local_of(token);
      ASSERT_EQ(ownership.global_of(rank, local), token);
    }
  });
}

TEST(Ownership, SharesAreAsDefined) {
  always([](const OwnershipCase& c) {
    const Ownership ownership = c.ownership();
    const auto shares = c.shares();
    int64_t first = 0;
    for (int rank = 0; rank < c.ranks; ++rank) {
      const auto& share = at(shares, rank);
      ASSERT_EQ(ownership.local_tokens(rank), std::ssize(share)) << rank;
      ASSERT_EQ(ownership.first_of(rank), first) << rank;
      first += std::ssize(share);
      for (int64_t local = 0; local < std::ssize(share); ++local) {
        const int64_t token = at(share, local);
        ASSERT_EQ(ownership.global_of(rank, local), token) << rank;
        ASSERT_EQ(ownership.owner_of(token), rank) << token;
        ASSERT_EQ(ownership.local_of(token), local) << token;
      }
    }
    ASSERT_EQ(first, ownership.tokens());
  });
}

TEST(Ownership, RangesAreInLocalOrderAndJoined) {
  always([](const OwnershipCase& c) {
    const Ownership ownership = c.ownership();
    const auto shares = c.shares();
    for (int rank = 0; rank < c.ranks; ++rank) {
      const auto ranges = ownership.ranges_of(rank);
      ASSERT_EQ(ranges, test::runs_in(at(shares, rank))) << rank;
      ASSERT_EQ(count_tokens(ranges), ownership.local_tokens(rank)) << rank;
    }
  });
}

TEST(Ownership, HoldingIsTheRangeThatHoldsTheToken) {
  always([](const OwnershipCase& c) {
    const Ownership ownership = c.ownership();
    for (int rank = 0; rank < c.ranks; ++rank) {
      for (TokenRange range : ownership.ranges_of(rank)) {
        for (int64_t token = range.begin; token < range.end; ++token) {
          const Ownership::Holding holding = ownership.holding(token);
          ASSERT_EQ(holding.rank, rank) << token;
          ASSERT_EQ(holding.range, range) << token;
        }
      }
    }
  });
}

TEST(Ownership, ToRankTakesItsShareInLocalOrder) {
  always([](const OwnershipCase& c) {
    const Ownership ownership = c.ownership();
    const auto shares = c.shares();
    for (int rank = 0; rank < c.ranks; ++rank) {
      const Moves moves = ownership.to_rank(rank);
      ASSERT_EQ(moves.source_tokens(), ownership.tokens());
      ASSERT_EQ(moves.target_tokens(), ownership.local_tokens(rank));
      ASSERT_TRUE(moves.gaps().empty());
      for (const longspan::Run& run : moves.runs()) {
        for (int64_t i = 0; i < run.length; ++i) {
          ASSERT_EQ(at(at(shares, rank), run.target + i), run.source + i);
        }
      }
    }
  });
}

TEST(Ownership, ToAllRanksIsABijection) {
  always([](const OwnershipCase& c) {
    const Ownership ownership = c.ownership();
    const Moves moves = ownership.to_all_ranks();
    ASSERT_EQ(moves.source_tokens(), ownership.tokens());
    ASSERT_EQ(moves.target_tokens(), ownership.tokens());
    ASSERT_EQ(moves.moved_tokens(), ownership.tokens());
    ASSERT_TRUE(moves.then(moves.inverse()).is_identity());
    ASSERT_TRUE(moves.inverse().then(moves).is_identity());
    for (const longspan::Run& run : moves.runs()) {
      for (int64_t i = 0; i < run.length; ++i) {
        const int64_t token = run.source + i;
        ASSERT_EQ(run.target + i,
                  ownership.first_of(ownership.owner_of(token)) +
                      ownership.local_of(token));
      }
    }
  });
}

TEST(Ownership, OneRankHoldsTheStreamInOrder) {
  for (OwnershipKind kind : test::all_kinds()) {
    const OwnershipCase c =
        OwnershipCase{kind, 1, {{{3, 4}, {0, 0}, {5, 7}}, 2}}.fitted();
    EXPECT_TRUE(c.ownership().to_rank(0).is_identity()) << c.to_string();
  }
}

struct Example {
  std::string name;
  Ownership ownership;
  std::vector<std::vector<int64_t>> shares;
};

std::ostream& operator<<(std::ostream& out, const Example& example) {
  return out << example.name;
}

const std::vector<Example> kExamples{
    {"HeadTailOf8Over2",
     Ownership::head_tail(8, 2),
     {{0, 1, 6, 7}, {2, 3, 4, 5}}},
    {"Documents8And16Over2",
     Ownership::per_document_head_tail(Packing::of({8, 16}), 2),
     {{0, 1, 6, 7, 8, 9, 10, 11, 20, 21, 22, 23},
      {2, 3, 4, 5, 12, 13, 14, 15, 16, 17, 18, 19}}},
    {"EmptyDocumentOver2",
     Ownership::per_document_head_tail(Packing::of({4, 0, 8}), 2),
     {{0, 3, 4, 5, 10, 11}, {1, 2, 6, 7, 8, 9}}},
    {"StreamLongerThanItsDocumentsOver2",
     Ownership::per_document_head_tail(Packing::of({8, 8}, {8, 8}, 24), 2),
     {{0, 1, 6, 7, 8, 9, 14, 15, 16, 17, 22, 23},
      {2, 3, 4, 5, 10, 11, 12, 13, 18, 19, 20, 21}}},
    {"PadsCountAsTokens",
     Ownership::per_document_head_tail(Packing::of({3, 2}, {4, 4}), 2),
     {{0, 3, 4, 7}, {1, 2, 5, 6}}},
    {"ContiguousOf6Over3",
     Ownership::contiguous(6, 3),
     {{0, 1}, {2, 3}, {4, 5}}},
    {"UnevenWithAnEmptyRank",
     Ownership::of_sizes({3, 0, 1}),
     {{0, 1, 2}, {}, {3}}},
    {"RangesInTheirOwnOrder",
     Ownership::of_ranges({{{4, 6}, {0, 1}}, {}, {{1, 4}}}),
     {{4, 5, 0}, {}, {1, 2, 3}}},
    {"NoTokens", Ownership::head_tail(0, 3), {{}, {}, {}}},
};

class OwnershipExample : public ::testing::TestWithParam<Example> {};

TEST_P(OwnershipExample, HoldsItsShares) {
  const auto& [name, ownership, shares] = GetParam();
  ASSERT_EQ(ownership.ranks(), std::ssize(shares));
  for (int rank = 0; rank < ownership.ranks(); ++rank) {
    EXPECT_EQ(test::tokens_of(ownership.ranges_of(rank)), at(shares, rank));
  }
}

INSTANTIATE_TEST_SUITE_P(, OwnershipExample, ::testing::ValuesIn(kExamples),
                         [](const auto& info) { return info.param.name; });

TEST(Ownership, HeadTailIsChunkAndMirrorChunk) {
  for (int ranks = 1; ranks <= kMostRanks; ++ranks) {
    for (int64_t chunk = 1; chunk <= 4; ++chunk) {
      const int64_t chunks = int64_t{2} * ranks;
      const Ownership ownership = Ownership::head_tail(chunk * chunks, ranks);
      for (int64_t c = 0; c < chunks; ++c) {
        const int64_t rank = c < ranks ? c : chunks - 1 - c;
        const int64_t first_local = c < ranks ? 0 : chunk;
        EXPECT_EQ(ownership.owner_of(c * chunk), rank);
        EXPECT_EQ(ownership.local_of(c * chunk), first_local);
        EXPECT_EQ(ownership.owner_of((c + 1) * chunk - 1), rank);
      }
    }
  }
}

TEST(Ownership, HeadTailIsPerDocumentOfOneDocument) {
  for (int ranks = 1; ranks <= kMostRanks; ++ranks) {
    const int64_t tokens = int64_t{6} * ranks;
    const Ownership whole = Ownership::head_tail(tokens, ranks);
    const Ownership one =
        Ownership::per_document_head_tail(Packing::single(tokens), ranks);
    EXPECT_EQ(whole.to_all_ranks(), one.to_all_ranks());
  }
}

TEST(Ownership, OfPicksTheKind) {
  const Packing packing = Packing::of({8, 16});
  EXPECT_EQ(Ownership::of(OwnershipKind::contiguous, packing, 2),
            Ownership::contiguous(24, 2));
  EXPECT_EQ(Ownership::of(OwnershipKind::head_tail, packing, 2),
            Ownership::head_tail(24, 2));
  EXPECT_EQ(Ownership::of(OwnershipKind::per_document_head_tail, packing, 2),
            Ownership::per_document_head_tail(packing, 2));
}

TEST(Ownership, EqualityIsOfWhatIsHeld) {
  EXPECT_EQ(Ownership::of_sizes({2, 3}),
            Ownership::of_ranges({{{0, 1}, {1, 2}}, {{2, 5}}}));
  EXPECT_FALSE(Ownership::of_sizes({2, 3}) == Ownership::of_sizes({3, 2}));
  EXPECT_FALSE(Ownership::of_sizes({2, 0}) == Ownership::of_sizes({0, 2}));
  EXPECT_FALSE(Ownership::contiguous(8, 2) == Ownership::contiguous(8, 4));
  EXPECT_FALSE(Ownership::contiguous(8, 2) == Ownership::head_tail(8, 2));
  EXPECT_FALSE(Ownership::per_document_head_tail(Packing::of({4, 12}), 2) ==
               Ownership::per_document_head_tail(Packing::of({8, 8}), 2));
}

TEST(Ownership, MultipleIsWhatCanBeCut) {
  for (int ranks = 1; ranks <= kMostRanks; ++ranks) {
    for (OwnershipKind kind :
         {OwnershipKind::contiguous, OwnershipKind::head_tail,
          OwnershipKind::per_document_head_tail}) {
      for (int64_t tokens = 0; tokens <= kLongest; ++tokens) {
        const auto make = [&] {
          Ownership::of(kind, Packing::single(tokens), ranks);
        };
        const bool fits = tokens % tokens_multiple(kind, ranks) == 0;
        EXPECT_EQ(message_of(make) == "accepted", fits)
            << to_string(kind) << " " << tokens << " over " << ranks;
      }
    }
    EXPECT_EQ(tokens_multiple(OwnershipKind::ranges, ranks), 1);
  }
}

TEST(Ownership, KindsAreKnownByName) {
  for (OwnershipKind kind : test::all_kinds()) {
    EXPECT_EQ(ownership_kind(to_string(kind)), kind);
  }
  EXPECT_EQ(to_string(OwnershipKind::head_tail), "head-tail");
  EXPECT_EQ(ownership_kind("zigzag"), std::nullopt);
}

TEST(Ownership, PrintsItself) {
  EXPECT_EQ(Ownership::head_tail(8, 2).to_string(),
            "Ownership(head-tail, 8 tokens, 2 ranks)");
  EXPECT_EQ(Ownership::of_sizes({3}).to_string(),
            "Ownership(ranges, 3 tokens, 1 rank)");
}

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

const std::vector<Refusal> kRefused{
    {"UnevenHeadTail", [] { Ownership::head_tail(4098, 4); },
     "Ownership: 4098 tokens do not split over 4 ranks in 2 equal parts each; "
     "pad to 4104"},
    {"UnevenContiguous", [] { Ownership::contiguous(4098, 4); },
     "Ownership: 4098 tokens do not split over 4 ranks in equal parts; pad to "
     "4100"},
    {"UnevenDocument",
     [] {
       Ownership::per_document_head_tail(Packing::of({8, 3}, {8, 10}, 24), 2);
     },
     "Ownership: document 1 has a slot of 10 tokens, which does not split over "
     "2 ranks in 2 equal parts each; pad it to 12"},
    {"UnevenTail",
     [] { Ownership::per_document_head_tail(Packing::of({8}, {8}, 14), 2); },
     "Ownership: the 6 tokens after the last document do not split over 2 "
     "ranks in 2 equal parts each; pad them to 8"},
    {"NoRanks", [] { Ownership::contiguous(8, 0); },
     "Ownership: 0 ranks; expected at least 1"},
    {"NoRanksOfDocuments",
     [] { Ownership::per_document_head_tail(Packing::of({8}), -1); },
     "Ownership: -1 ranks; expected at least 1"},
    {"NoRanksOfRanges", [] { Ownership::of_ranges({}); },
     "Ownership: no ranks; expected at least 1"},
    {"NoSizes", [] { Ownership::of_sizes({}); },
     "Ownership: no ranks; expected at least 1"},
    {"NegativeTokens", [] { Ownership::head_tail(-8, 2); },
     "Ownership: -8 tokens; expected at least 0"},
    {"NegativeSize", [] { Ownership::of_sizes({4, -1}); },
     "Ownership: a rank of -1 tokens; sizes are not negative"},
    {"SizesAbove64Bits", [] { Ownership::of_sizes({kMost, 1}); },
     "Ownership: the ranks hold more tokens than 64 bits count"},
    {"RangesAbove64Bits",
     [] { Ownership::of_ranges({{{0, kMost}}, {{0, kMost}}}); },
     "Ownership: the ranks hold more tokens than 64 bits count"},
    {"TwoOwners", [] { Ownership::of_ranges({{{0, 4}}, {{3, 6}}}); },
     "Ownership: token 3 has two owners"},
    {"TwiceOnOneRank", [] { Ownership::of_ranges({{{0, 4}, {2, 3}}}); },
     "Ownership: token 2 has two owners"},
    {"NoOwner", [] { Ownership::of_ranges({{{0, 4}}, {{5, 6}}}); },
     "Ownership: token 4 has no owner"},
    {"NoOwnerOfTheFirst", [] { Ownership::of_ranges({{{1, 4}}}); },
     "Ownership: token 0 has no owner"},
    {"BackwardRange", [] { Ownership::of_ranges({{{4, 2}}}); },
     "Ownership: [4, 2) is not a range of tokens"},
    {"NegativeRange", [] { Ownership::of_ranges({{{-1, 2}}}); },
     "Ownership: [-1, 2) is not a range of tokens"},
    {"RangesByKind",
     [] { Ownership::of(OwnershipKind::ranges, Packing::single(4), 2); },
     "Ownership: 'ranges' has no closed form; use of_ranges or of_sizes"},
    {"TokenAbove", [] { Ownership::contiguous(8, 2).owner_of(8); },
     "Ownership: token 8 of 8"},
    {"TokenBelow", [] { Ownership::of_sizes({8}).local_of(-1); },
     "Ownership: token -1 of 8"},
    {"HoldingOfNothing", [] { Ownership::head_tail(0, 2).holding(0); },
     "Ownership: token 0 of 0"},
    {"RankAbove", [] { Ownership::contiguous(8, 2).ranges_of(2); },
     "Ownership::ranges_of: rank 2 of 2"},
    {"RankBelow", [] { Ownership::contiguous(8, 2).first_of(-1); },
     "Ownership::first_of: rank -1 of 2"},
    {"RankWithoutTokens", [] { Ownership::of_sizes({8, 0}).global_of(1, 0); },
     "Ownership::global_of: local 0 of 0 on rank 1"},
    {"LocalAbove", [] { Ownership::head_tail(8, 2).global_of(1, 4); },
     "Ownership::global_of: local 4 of 4 on rank 1"},
};

class OwnershipRefuses : public ::testing::TestWithParam<Refusal> {};

TEST_P(OwnershipRefuses, ByMessage) {
  EXPECT_EQ(message_of(GetParam().call), GetParam().message);
}

INSTANTIATE_TEST_SUITE_P(, OwnershipRefuses, ::testing::ValuesIn(kRefused),
                         test::refusal_name);

}  // namespace
}  // namespace longspan
