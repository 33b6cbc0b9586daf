#include "longspan/core/detail/even_pieces.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "longspan/core/mask.h"

namespace longspan {
namespace {

using ::testing::ElementsAre;

const int kRanks[] = {1, 2, 3, 4, 7, 50};

std::vector<Mask> some_masks() {
  const Packing documents = Packing::of({9, 0, 4, 5}, {10, 1, 4, 8}, 30);
  return {
      Mask::causal(Packing::single(40)), Mask::full(Packing::single(1)),
      Mask::causal(Packing()),           Mask::causal(documents),
      Mask::sliding(documents, 3),       Mask::causal(Packing::of({0}, {8}))};
}

TEST(EvenPieces, CoverTheStreamInOrder) {
  for (const Mask& mask : some_masks()) {
    for (const int ranks : kRanks) {
      int64_t at = 0;
      const auto pieces = even_pieces({mask}, ranks);
      ASSERT_EQ(std::ssize(pieces), ranks);
      for (const TokenRange piece : pieces) {
        EXPECT_EQ(piece.begin, at);
        EXPECT_LE(piece.begin, piece.end);
        at = piece.end;
      }
      EXPECT_EQ(at, mask.queries());
    }
  }
}

TEST(EvenPieces, HoldTheirShareAndNotAQueryMore) {
  for (const Mask& mask : some_masks()) {
    const TokenRange keys{0, mask.keys()};
    const int64_t total = mask.pairs({0, mask.queries()}, keys);
    for (const int ranks : kRanks) {
      const auto pieces = even_pieces({mask}, ranks);
      for (int r = 0; r + 1 < ranks; ++r) {
        const int64_t end = pieces[static_cast<std::size_t>(r)].end;
        EXPECT_GE(mask.pairs({0, end}, keys) * ranks, total * (r + 1));
        if (end > 0) {
          EXPECT_LT(mask.pairs({0, end - 1}, keys) * ranks, total * (r + 1));
        }
      }
    }
  }
}

TEST(EvenPieces, CountTheRowsOfABatchTogether) {
  const Packing stream = Packing::single(8);
  EXPECT_THAT(even_pieces({Mask::full(stream)}, 2),
              ElementsAre(TokenRange{0, 4}, TokenRange{4, 8}));
  EXPECT_THAT(even_pieces({Mask::causal(stream)}, 2),
              ElementsAre(TokenRange{0, 6}, TokenRange{6, 8}));
  // 64 + 36 pairs: the first five queries have 40 + 15 of them.
  EXPECT_THAT(even_pieces({Mask::full(stream), Mask::causal(stream)}, 2),
              ElementsAre(TokenRange{0, 5}, TokenRange{5, 8}));
}

TEST(EvenPieces, SumsSayTheSameAsAMask) {
  for (const Mask& mask : some_masks()) {
    std::vector<int64_t> sums;
    for (int64_t t = 0; t < mask.queries(); ++t) {
      sums.push_back(mask.pairs({0, t + 1}, {0, mask.keys()}));
    }
    for (const int ranks : kRanks) {
      EXPECT_EQ(even_pieces(sums, ranks), even_pieces({mask}, ranks));
    }
  }
}

TEST(EvenPieces, RefuseNothingToCutOrNobody) {
  const Packing stream = Packing::single(8);
  EXPECT_THROW(even_pieces(std::vector<Mask>{}, 2), std::invalid_argument);
  EXPECT_THROW(even_pieces({Mask::causal(stream)}, 0), std::invalid_argument);
  EXPECT_THROW(even_pieces({Mask::causal(stream), Mask::causal(Packing())}, 1),
               std::invalid_argument);
}

}  // namespace
}  // namespace longspan
