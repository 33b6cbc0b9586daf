#include "longspan/comm/detail/carry.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/comm/ranks.h"

namespace longspan {
namespace {

using ::testing::HasSubstr;

/// rank * 1000 + row * 10 + channel: a wrong element names its source.
at::Tensor marked(int rank, int64_t rows, at::ScalarType dtype) {
  const auto longs = at::TensorOptions(at::kLong);
  return (at::arange(rows, longs).view({-1, 1}) * 10 + at::arange(3, longs) +
          rank * 1000)
      .to(dtype);
}

std::vector<int64_t> sizes_for(int ranks) {
  std::vector<int64_t> sizes;
  for (int rank = 0; rank < ranks; ++rank) sizes.push_back((rank * 2) % 5);
  return sizes;
}

TEST(Carry, SeveralTensorsOfSeveralTypesTravelTogether) {
  for (const int ranks : test::kSizes) {
    run_ranks(ranks, [&](const Group& group) {
      const auto sizes = sizes_for(ranks);
      const int me = group.rank();
      int64_t all = 0;
      for (const int64_t size : sizes) all += size;
      std::vector<Cargo> cargo;
      const at::ScalarType types[] = {at::kFloat, at::kLong, at::kFloat,
                                      at::kBFloat16};
      for (const at::ScalarType type : types) {
        const int64_t held = sizes[static_cast<std::size_t>(me)];
        cargo.push_back({.x = marked(me, held, type),
                         .pieces = gather_pieces(0, sizes, me),
                         .target_sizes = {all, 3}});
      }
      const auto got = carry(cargo, group, {.purpose = "several"});
      ASSERT_EQ(got.size(), 4U);
      int64_t bytes = 0;
      for (std::size_t i = 0; i < got.size(); ++i) {
        std::vector<at::Tensor> parts;
        for (int rank = 0; rank < ranks; ++rank) {
          parts.push_back(
              marked(rank, sizes[static_cast<std::size_t>(rank)], types[i]));
        }
        EXPECT_TRUE(at::equal(got[i], at::cat(parts))) << "tensor " << i;
        bytes += static_cast<int64_t>(cargo[i].x.nbytes()) * (ranks - 1);
      }
      EXPECT_EQ(group.sent_bytes(), bytes);
    });
  }
}

TEST(Carry, SomeRanksMayTradeAmongThemselves) {
  run_ranks(4, [](const Group& group) {
    const int me = group.rank(), first = me / 2 * 2;
    // Both of a team split four columns, and join three rows each.
    const std::vector<Trader> team = {{first, {0, 1}, {0, 3}},
                                      {first + 1, {1, 4}, {3, 6}}};
    const at::Tensor x = at::arange(12).view({3, 4}) + me * 100;
    const int64_t mine = me == first ? 1 : 3;
    const Cargo there = {.x = x,
                         .pieces = trade_pieces(1, 0, team, me),
                         .target_sizes = {6, mine}};
    const at::Tensor traded = carry(there, group, {.purpose = "there"});
    const at::Tensor both =
        at::cat({at::arange(12).view({3, 4}) + first * 100,
                 at::arange(12).view({3, 4}) + (first + 1) * 100});
    EXPECT_TRUE(at::equal(traded, both.narrow(1, me == first ? 0 : 1, mine)));
    const at::Tensor back = carry(
        {.x = traded, .pieces = reversed(there.pieces), .target_sizes = {3, 4}},
        group, {.purpose = "back"});
    EXPECT_TRUE(at::equal(back, x));
  });
}

/// Rank r asks every rank p for its rows r, r + 2, ..; whole numbers, so that
/// sums are exact.
TEST(Carry, ListedPlacesComeAndGoHome) {
  constexpr int64_t kRows = 9;
  for (const int ranks : test::kSizes) {
    run_ranks(ranks, [&](const Group& group) {
      const int me = group.rank();
      const auto asked_by = [&](int rank) {
        return at::arange(rank % kRows, kRows, 2, at::TensorOptions(at::kInt));
      };
      const int64_t mine = asked_by(me).numel();
      std::vector<Piece> pieces;
      for (int from = 0; from < ranks; ++from) {
        for (int to = 0; to < ranks; ++to) {
          if (from != me && to != me) continue;
          pieces.push_back(
              {from, to, {.places = asked_by(to)}, {0, from * mine, mine}});
        }
      }
      const at::Tensor got = carry({.x = marked(me, kRows, at::kFloat),
                                    .pieces = pieces,
                                    .target_sizes = {ranks * mine, 3}},
                                   group, {.purpose = "rows"});
      for (int from = 0; from < ranks; ++from) {
        EXPECT_TRUE(at::equal(
            got.narrow(0, from * mine, mine),
            marked(from, kRows, at::kFloat).index_select(0, asked_by(me))));
      }
      const at::Tensor home = carry({.x = at::ones_like(got),
                                     .pieces = reversed(pieces),
                                     .target_sizes = {kRows, 3},
                                     .meeting = Meeting::add},
                                    group, {.purpose = "home"});
      at::Tensor expected = at::zeros({kRows, 3});
      for (int rank = 0; rank < ranks; ++rank) {
        expected.index_add_(0, asked_by(rank),
                            at::ones({asked_by(rank).numel(), 3}));
      }
      EXPECT_TRUE(at::equal(home, expected));
    });
  }
}

TEST(Carry, RanksOnDifferentErrandsNeverMeet) {
  EXPECT_THAT(test::loss_of([] {
                run_ranks(
                    2,
                    [](const Group& group) {
                      const auto common = static_cast<uint64_t>(group.rank());
                      gather_tokens(at::ones({2}), 0, {2, 2}, group,
                                    {"errand", common});
                    },
                    test::kShort);
              }),
              HasSubstr("errand: rank "));
}

}  // namespace
}  // namespace longspan
