#include "longspan/core/work.h"

#include <gtest/gtest.h>

#include <set>

#include "longspan/core/tile.h"
#include "tests/support/masks.h"
#include "tests/support/property.h"

namespace longspan {
namespace {

using test::message_of;
using test::Random;
using test::SharedMaskCase;

std::vector<int64_t> pairs_per_rank(const Mask& mask,
                                    const Ownership& ownership) {
  std::vector<int64_t> pairs;
  for (const RankWork& work : work_per_rank(mask, ownership)) {
    pairs.push_back(work.pairs);
  }
  return pairs;
}

TEST(Work, HeadTailEvensOutCausalWork) {
  const Mask mask = Mask::causal(Packing::single(64));
  EXPECT_EQ(pairs_per_rank(mask, Ownership::contiguous(64, 4)),
            (std::vector<int64_t>{136, 392, 648, 904}));
  EXPECT_EQ(pairs_per_rank(mask, Ownership::head_tail(64, 4)),
            (std::vector<int64_t>{520, 520, 520, 520}));
}

TEST(Work, HeadTailIsEvenForEveryGroup) {
  for (int ranks = 1; ranks <= 9; ++ranks) {
    const int64_t multiple = int64_t{2} * ranks;
    const Packing packing = Packing::of({multiple, 0, 3 * multiple});
    const Mask mask = Mask::causal(packing);
    const auto pairs =
        pairs_per_rank(mask, Ownership::per_document_head_tail(packing, ranks));
    EXPECT_EQ(pairs, std::vector<int64_t>(pairs.size(), pairs[0])) << ranks;
  }
}

/// Pair by pair. A rank needs, for each of its ranges, everything from the
/// first to the last key that the range sees.
void work_is_what_is_counted(const SharedMaskCase& c) {
  const Mask mask = c.mask.mask();
  const Ownership ownership = c.owners.ownership();
  const auto all = work_per_rank(mask, ownership);
  ASSERT_EQ(std::ssize(all), ownership.ranks());
  for (int rank = 0; rank < ownership.ranks(); ++rank) {
    int64_t pairs = 0;
    std::set<int64_t> seen, needed;
    for (TokenRange range : ownership.ranges_of(rank)) {
      std::set<int64_t> of_range;
      for (int64_t q = range.begin; q < range.end; ++q) {
        for (int64_t k = 0; k < mask.keys(); ++k) {
          if (!mask.allows(q, k)) continue;
          ++pairs;
          of_range.insert(k);
        }
      }
      if (of_range.empty()) continue;
      for (int64_t k = *of_range.begin(); k <= *of_range.rbegin(); ++k) {
        if (ownership.owner_of(k) != rank) needed.insert(k);
      }
      for (int64_t k : of_range) {
        if (ownership.owner_of(k) != rank) seen.insert(k);
      }
    }
    const RankWork work = work_of(mask, ownership, rank);
    ASSERT_EQ(work.tokens, ownership.local_tokens(rank)) << "rank " << rank;
    ASSERT_EQ(work.pairs, pairs) << "rank " << rank;
    ASSERT_EQ(test::at(all, rank).pairs, pairs) << "rank " << rank;
    ASSERT_EQ(test::at(all, rank).foreign_keys, work.foreign_keys);
    const bool pads = c.mask.packing.packing().real_tokens() < mask.keys() ||
                      !c.mask.hidden.empty();
    if (!pads) {
      ASSERT_EQ(work.foreign_keys, std::ssize(seen)) << "rank " << rank;
    } else if (c.mask.pads == PadQueries::see_nothing) {
      ASSERT_EQ(work.foreign_keys, std::ssize(needed)) << "rank " << rank;
    } else {
      ASSERT_GE(work.foreign_keys, std::ssize(seen)) << "rank " << rank;
    }
  }
}

TEST(Work, IsWhatIsCountedForEveryLength) {
  std::vector<SharedMaskCase> cases;
  for (int64_t length = 0; length <= 20; ++length) {
    for (OwnershipKind kind : test::all_kinds()) {
      for (int ranks : {1, 2, 3, 5}) {
        for (test::MaskKind mask : test::token_masks()) {
          SharedMaskCase c{{{{{length, length}, {3, 4}}}, mask, 3, 1},
                           {kind, ranks, {}}};
          c.owners.pieces = {{3, 1, 1}, {2, 0, 0}, {4, 1, 0}, {0, 2, 0}};
          cases.push_back(c.fitted());
        }
      }
    }
  }
  test::for_each(cases, work_is_what_is_counted);
}

TEST(Work, IsWhatIsCountedOnRandomStreams) {
  test::for_all(
      500, [](Random& random) { return test::draw_shared_mask(random); },
      work_is_what_is_counted);
}

TEST(Work, OneRankNeedsNoForeignKey) {
  const Mask mask = Mask::full(Packing::of({5, 9}));
  const RankWork work = work_of(mask, Ownership::contiguous(14, 1), 0);
  EXPECT_EQ(work.tokens, 14);
  EXPECT_EQ(work.pairs, 25 + 81);
  EXPECT_EQ(work.foreign_keys, 0);
}

TEST(Work, ARankWithoutTokensHasNone) {
  const Mask mask = Mask::causal(Packing::single(4));
  const RankWork work = work_of(mask, Ownership::of_sizes({4, 0}), 1);
  EXPECT_EQ(work.tokens, 0);
  EXPECT_EQ(work.pairs, 0);
  EXPECT_EQ(work.foreign_keys, 0);
}

TEST(Work, AWindowNeedsOnlyItsNeighbours) {
  const Mask mask = Mask::sliding(Packing::single(64), 5);
  const Ownership ownership = Ownership::contiguous(64, 4);
  EXPECT_EQ(work_of(mask, ownership, 0).foreign_keys, 0);
  for (int rank = 1; rank < 4; ++rank) {
    EXPECT_EQ(work_of(mask, ownership, rank).foreign_keys, 4);
  }
}

constexpr AttentionShape kShape{.heads = 8,
                                .key_heads = 2,
                                .head_dim = 192,
                                .value_dim = 128,
                                .bytes_per_element = 2};

TEST(Work, FlopsAreTwoProductsForEachPairAndHead) {
  // 10 pairs x 8 heads x (192 for q.k + 128 for p.v) x 2.
  EXPECT_EQ(forward_flops(10, kShape), 51200);
  EXPECT_EQ(forward_flops(0, kShape), 0);
}

TEST(Work, BytesAreThoseOfKeysAndValues) {
  // 3 tokens x 2 key heads x (192 + 128) x 2 bytes.
  EXPECT_EQ(key_value_bytes(3, kShape), 3840);
  EXPECT_EQ(key_value_bytes(0, kShape), 0);
}

TEST(Work, ReceivedBytesAreThoseOfForeignTokens) {
  const Ownership ownership = Ownership::of_sizes({10, 0, 6});
  EXPECT_EQ(received_bytes_all(ownership, 0, kShape),
            key_value_bytes(6, kShape));
  EXPECT_EQ(received_bytes_all(ownership, 1, kShape),
            key_value_bytes(16, kShape));
  const Mask mask = Mask::sliding(Packing::single(16), 3);
  EXPECT_EQ(received_bytes_needed(work_of(mask, ownership, 2), kShape),
            key_value_bytes(2, kShape));
}

TEST(Work, RefusesAnOwnershipOfAnotherStream) {
  const Mask mask = Mask::causal(Packing::single(8));
  EXPECT_EQ(
      message_of([&] { work_of(mask, Ownership::contiguous(6, 2), 0); }),
      "work_of: a mask of 8 queries and 8 keys over an ownership of 6 tokens");
}

}  // namespace
}  // namespace longspan
