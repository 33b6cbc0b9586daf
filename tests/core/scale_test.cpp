#include <gtest/gtest.h>

#include "longspan/core/mask.h"
#include "longspan/core/moves.h"
#include "longspan/core/ownership.h"
#include "longspan/core/packing.h"
#include "longspan/core/tile.h"
#include "longspan/core/work.h"

/// Ordinary sizes. Whatever costs O(tokens), O(tokens x ranks) or O(tokens^2)
/// does not finish here in the time the other tests take.
namespace longspan {
namespace {

constexpr int kRanks = 4096;
constexpr int64_t kDocuments = 10'000;
constexpr int64_t kLength = 10'000;
constexpr int64_t kTokens = kDocuments * kLength;  // 100 M

constexpr int64_t causal_pairs(int64_t tokens) {
  return tokens * (tokens + 1) / 2;
}

/// 100 M real tokens in a stream that every kind can cut.
Packing documents() {
  return Packing::rows(kDocuments, kLength)
      .with_slots_multiple_of(int64_t{2} * kRanks);
}

std::vector<Ownership> owners_of(const Packing& packing) {
  std::vector<int64_t> uneven(kRanks, packing.tokens() / kRanks);
  uneven.front() += uneven.back();
  uneven.back() = 0;
  return {Ownership::contiguous(packing.tokens(), kRanks),
          Ownership::head_tail(packing.tokens(), kRanks),
          Ownership::per_document_head_tail(packing, kRanks),
          Ownership::of_sizes(uneven)};
}

/// A few thousand tokens spread over a stream, both ends included.
std::vector<int64_t> probes(int64_t tokens) {
  std::vector<int64_t> probes{0, tokens - 1};
  for (int64_t token = 0; token < tokens; token += tokens / 3001) {
    probes.push_back(token);
  }
  return probes;
}

TEST(Scale, PackingFindsTokensOfTenThousandDocuments) {
  const Packing packing = documents();
  EXPECT_EQ(packing.real_tokens(), kTokens);
  EXPECT_EQ(packing.tokens(), kDocuments * 16'384);
  EXPECT_EQ(std::ssize(packing.pads()), kDocuments);
  for (int64_t token : probes(packing.tokens())) {
    EXPECT_EQ(packing.locate(token),
              (Packing::Place{token / 16'384, token % 16'384}));
    EXPECT_EQ(packing.is_pad(token), token % 16'384 >= kLength);
  }
}

TEST(Scale, OwnershipAnswersForFourThousandRanks) {
  const Packing packing = documents();
  for (const Ownership& ownership : owners_of(packing)) {
    SCOPED_TRACE(ownership.to_string());
    int64_t first = 0;
    for (int rank = 0; rank < kRanks; ++rank) {
      ASSERT_EQ(ownership.first_of(rank), first);
      first += ownership.local_tokens(rank);
    }
    ASSERT_EQ(first, packing.tokens());
    for (int64_t token : probes(packing.tokens())) {
      const int rank = ownership.owner_of(token);
      ASSERT_EQ(ownership.global_of(rank, ownership.local_of(token)), token);
      const Ownership::Holding holding = ownership.holding(token);
      ASSERT_EQ(holding.rank, rank);
      ASSERT_TRUE(holding.range.contains(token));
    }
    for (int rank : {0, 1, 2047, 4094, 4095}) {
      ASSERT_EQ(count_tokens(ownership.ranges_of(rank)),
                ownership.local_tokens(rank));
      ASSERT_EQ(ownership.to_rank(rank).moved_tokens(),
                ownership.local_tokens(rank));
    }
  }
}

TEST(Scale, MovesToAllRanksAndBack) {
  for (const Ownership& ownership :
       {Ownership::contiguous(100'007'936, kRanks),
        Ownership::head_tail(100'007'936, kRanks)}) {
    const Moves moves = ownership.to_all_ranks();
    EXPECT_TRUE(moves.then(moves.inverse()).is_identity());
  }
}

TEST(Scale, PairsAreCountedByDocument) {
  const Packing packing = documents();
  const TokenRange stream{0, packing.tokens()};
  const int64_t before = 1023;
  EXPECT_EQ(Mask::causal(packing).pairs(stream, stream),
            kDocuments * causal_pairs(kLength));
  EXPECT_EQ(Mask::full(packing).pairs(stream, stream),
            kDocuments * kLength * kLength);
  EXPECT_EQ(
      Mask::sliding(packing, before + 1).pairs(stream, stream),
      kDocuments * (causal_pairs(before) + (kLength - before) * (before + 1)));
  // Key p is complete at position 4p + 3, so 4p + 3 positions miss it.
  const Mask compressed = Mask::compressed(packing, 4);
  EXPECT_EQ(compressed.keys(), packing.tokens() / 4);
  const int64_t complete = kLength / 4;
  EXPECT_EQ(
      compressed.pairs(stream, {0, compressed.keys()}),
      kDocuments * (complete * (kLength - 3) - 4 * causal_pairs(complete - 1)));
}

TEST(Scale, PairsOfOneDocumentFit64Bits) {
  const Mask mask = Mask::causal(Packing::single(kTokens));
  EXPECT_EQ(mask.pairs({0, kTokens}, {0, kTokens}), causal_pairs(kTokens));
  EXPECT_EQ(mask.coverage({kTokens / 2, kTokens}, {0, kTokens / 2}),
            Coverage::all);
  EXPECT_EQ(mask.keys_of(kTokens - 1), (TokenRange{0, kTokens}));
}

TEST(Scale, ManyHolesAndGroupsAreOrdinary) {
  std::vector<TokenRange> holes, groups;
  for (int64_t d = 0; d < kDocuments; ++d) {
    holes.push_back({d * kLength, d * kLength + 10});
    groups.push_back({d * kLength + 100, d * kLength + 200});
  }
  const Mask mask = Mask::causal(Packing::rows(kDocuments, kLength))
                        .with_hidden(holes)
                        .with_groups(groups);
  const int64_t in_document = causal_pairs(kLength - 10) + 100 * 99 / 2;
  EXPECT_EQ(mask.pairs({0, kTokens}, {0, kTokens}), kDocuments * in_document);
  EXPECT_TRUE(mask.is_one_range());
}

TEST(Scale, WorkOfAllRanksAddsUp) {
  const Packing packing = documents();
  const Mask mask = Mask::causal(packing);
  for (const Ownership& ownership :
       {Ownership::contiguous(packing.tokens(), kRanks),
        Ownership::head_tail(packing.tokens(), kRanks)}) {
    int64_t tokens = 0, pairs = 0;
    for (const RankWork& work : work_per_rank(mask, ownership)) {
      tokens += work.tokens;
      pairs += work.pairs;
    }
    EXPECT_EQ(tokens, packing.tokens());
    EXPECT_EQ(pairs, kDocuments * causal_pairs(kLength));
  }
}

TEST(Scale, HeadTailEvensOutOneLongDocument) {
  constexpr int64_t kLong = int64_t{8192} * 12'208;  // about 100 M
  const Mask mask = Mask::causal(Packing::single(kLong));
  const Ownership ownership = Ownership::head_tail(kLong, kRanks);
  for (const RankWork& work : work_per_rank(mask, ownership)) {
    ASSERT_EQ(work.pairs * kRanks, causal_pairs(kLong));
  }
}

TEST(Scale, TilesOfARankAreThoseInReach) {
  constexpr int64_t kLong = int64_t{8192} * 12'208;
  const Mask causal = Mask::causal(Packing::single(kLong));
  const Ownership ownership = Ownership::head_tail(kLong, kRanks);
  for (int rank : {0, 1000, 4095}) {
    int64_t pairs = 0;
    for (const OwnedTile& owned : tiles_of(causal, ownership, rank)) {
      pairs += causal.pairs(owned.tile.queries, owned.tile.keys);
    }
    EXPECT_EQ(pairs * kRanks, causal_pairs(kLong));
  }
  // A window of two chunks reaches the chunk itself and two before it.
  const Mask window = Mask::sliding(Packing::single(kLong), 2 * 12'208);
  EXPECT_EQ(tiles_of(window, ownership, 2000).size(), 6);

  const Packing packing = documents();
  const Mask short_documents = Mask::causal(packing);
  for (const Ownership& owners :
       {Ownership::contiguous(packing.tokens(), kRanks),
        Ownership::head_tail(packing.tokens(), kRanks)}) {
    for (int rank : {0, 7, 4095}) {
      EXPECT_LE(tiles_of(short_documents, owners, rank).size(), 8);
    }
  }
}

}  // namespace
}  // namespace longspan
