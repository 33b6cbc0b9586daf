#include "longspan/attention/selected.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "longspan/attention/attend.h"
#include "longspan/attention/detail/selected_work.h"
#include "longspan/batch/cut.h"
#include "longspan/comm/run_ranks.h"
#include "longspan/core/detail/even_pieces.h"

namespace longspan {
namespace {

constexpr int64_t kTokens = 24, kRows = 2, kChannels = 3;

std::vector<Ownership> ownerships(int ranks) {
  std::vector<int64_t> sizes(static_cast<std::size_t>(ranks), 0);
  sizes.back() = kTokens;
  std::vector<std::vector<TokenRange>> pieces(static_cast<std::size_t>(ranks));
  for (int64_t i = 0; i < kTokens / 2; ++i) {
    auto& held = pieces[static_cast<std::size_t>((5 * i + 2) % ranks)];
    held.insert(held.begin(), {2 * i, 2 * i + 2});
  }
  return {Ownership::contiguous(kTokens, ranks),
          Ownership::head_tail(kTokens, ranks), Ownership::of_sizes(sizes),
          Ownership::of_ranges(pieces)};
}

Traffic traffic(const Group& group, const Ownership& ownership) {
  const auto layout =
      AttentionLayout::of(ownership, {Mask::causal(Packing::single(kTokens))});
  return {group, RankLayout::of("test", layout_tensor(layout), group), "test"};
}

/// token * 100 + row * 10 + channel: a wrong element names its source.
at::Tensor stream() {
  const auto numbers = at::TensorOptions(at::kDouble);
  return at::arange(kTokens, numbers).view({-1, 1, 1}) * 100 +
         at::arange(kRows, numbers).view({1, -1, 1}) * 10 +
         at::arange(kChannels, numbers);
}

/// Wild and empty slots among the others, another list on every rank.
at::Tensor lists(int rank, int64_t queries) {
  const at::Tensor wild =
      at::arange(kRows * queries * 4, at::kLong) * (7 + rank) % 31 - 3;
  return wild.view({kRows, queries, 4});
}

constexpr int kRankCounts[] = {1, 2, 3, 4};

TEST(GatherStream, PutsEveryTokenInItsPlace) {
  for (const int ranks : kRankCounts) {
    for (const Ownership& ownership : ownerships(ranks)) {
      run_ranks(ranks, [&](const Group& group) {
        const at::Tensor mine =
            stream().index_select(0, token_indices(ownership, group.rank()));
        const at::Tensor all =
            gather_stream(mine, traffic(group, ownership), "tokens");
        EXPECT_TRUE(at::equal(all, stream())) << ownership.to_string();
      });
    }
  }
}

TEST(SumHome, AddsWhatAllRanksFound) {
  for (const int ranks : kRankCounts) {
    for (const Ownership& ownership : ownerships(ranks)) {
      run_ranks(ranks, [&](const Group& group) {
        const at::Tensor found = stream() * (group.rank() + 1);
        const at::Tensor before = found.clone();
        const at::Tensor home =
            sum_home(found, traffic(group, ownership), "gradients");
        const at::Tensor mine =
            stream().index_select(0, token_indices(ownership, group.rank()));
        const int times = ranks * (ranks + 1) / 2;
        EXPECT_TRUE(at::equal(home, mine * times)) << ownership.to_string();
        EXPECT_TRUE(at::equal(found, before));
      });
    }
  }
}

TEST(FetchedKeys, ListsLeadToTheirRows) {
  for (const int ranks : kRankCounts) {
    for (const Ownership& ownership : ownerships(ranks)) {
      for (const Fetch fetch : {Fetch::gathered, Fetch::needed}) {
        run_ranks(ranks, [&](const Group& group) {
          const at::Tensor tokens = token_indices(ownership, group.rank());
          const at::Tensor wanted = lists(group.rank(), tokens.size(0));
          const FetchedKeys fetched(wanted, fetch, traffic(group, ownership));
          const auto rows = fetched.rows_of(
              {stream().index_select(0, tokens),
               -stream().index_select(0, tokens).narrow(2, 0, 1)},
              "keys");
          const at::Tensor places =
              fetched.lists().to(at::kLong).reshape(wanted.sizes());
          for (int64_t row = 0; row < kRows; ++row) {
            const at::Tensor listed = wanted[row].flatten();
            const at::Tensor place = places[row].flatten();
            const int64_t at = rows[0].size(0) == 1 ? 0 : row;
            for (int64_t i = 0; i < listed.numel(); ++i) {
              const auto token = listed[i].item<int64_t>();
              if (token < 0 || token >= kTokens) {
                const auto nothing = place[i].item<int64_t>();
                EXPECT_TRUE(nothing < 0 || nothing >= rows[0].size(1));
                continue;
              }
              const auto p = place[i].item<int64_t>();
              EXPECT_TRUE(at::equal(rows[0][at][p], stream()[token][row]));
              EXPECT_EQ(rows[1][at][p][0].item<double>(),
                        -stream()[token][row][0].item<double>());
            }
          }
        });
      }
    }
  }
}

/// <rows_of(x), y> = <x, home(y)>, summed over the ranks; whole numbers, so
/// that sums are exact.
TEST(FetchedKeys, HomeIsTheAdjoint) {
  for (const int ranks : kRankCounts) {
    for (const Ownership& ownership : ownerships(ranks)) {
      for (const Fetch fetch : {Fetch::gathered, Fetch::needed}) {
        std::vector<double> there(static_cast<std::size_t>(ranks)),
            back(static_cast<std::size_t>(ranks));
        run_ranks(ranks, [&](const Group& group) {
          const at::Tensor tokens = token_indices(ownership, group.rank());
          const FetchedKeys fetched(lists(group.rank(), tokens.size(0)), fetch,
                                    traffic(group, ownership));
          const at::Tensor x = stream().index_select(0, tokens);
          const at::Tensor rows = fetched.rows_of({x}, "keys")[0];
          const at::Tensor y = at::arange(rows.numel(), at::kDouble)
                                   .remainder(17)
                                   .view(rows.sizes());
          const auto here = static_cast<std::size_t>(group.rank());
          there[here] = (rows * y).sum().item<double>();
          back[here] =
              (x * fetched.home({y}, "gradients")[0]).sum().item<double>();
        });
        double left = 0, right = 0;
        for (const double part : there) left += part;
        for (const double part : back) right += part;
        EXPECT_EQ(left, right) << ownership.to_string();
      }
    }
  }
}

TEST(WorkTrade, BringsQueriesToWorkersAndBack) {
  const auto mask = Mask::causal(Packing::single(kTokens));
  for (const int ranks : kRankCounts) {
    for (const Ownership& ownership : ownerships(ranks)) {
      run_ranks(ranks, [&](const Group& group) {
        const WorkTrade trade(traffic(group, ownership),
                              even_pieces({mask}, ranks));
        const at::Tensor mine =
            stream().index_select(0, token_indices(ownership, group.rank()));
        const auto work = trade.to_workers({mine, -mine}, "there");
        int64_t at = 0;
        for (const TokenRange range : trade.queries()) {
          EXPECT_TRUE(at::equal(work[0].narrow(0, at, range.size()),
                                stream().narrow(0, range.begin, range.size())));
          at += range.size();
        }
        EXPECT_EQ(at, work[0].size(0));
        const auto back = trade.to_owners(work, "back");
        EXPECT_TRUE(at::equal(back[0], mine));
        EXPECT_TRUE(at::equal(back[1], -mine));
      });
    }
  }
}

TEST(SelectAndAttend, GivesWhatOneRankGives) {
  at::manual_seed(4);
  const auto draw = [](at::IntArrayRef sizes) {
    return at::randn(sizes, at::kDouble);
  };
  const SelectedLayer all{draw({kTokens, 4, 6}), draw({kTokens, 6}),
                          draw({kTokens, 2, 3}), draw({kTokens, 3}),
                          draw({kTokens, 2})};
  const auto mask = Mask::causal(Packing::of({13, 7}, {14, 10}));
  const SelectOptions selection{.slots = 4, .scores = true, .balanced = true};
  const SelectedOptions attention{.scale = 0.5, .value_dim = 5};
  const auto alone = select_and_attend(
      all, AttentionLayout::of(Ownership::contiguous(kTokens, 1), {mask}),
      Group::solo(), selection, attention, Fetch::gathered, true);
  for (const Ownership& ownership : ownerships(3)) {
    for (const Fetch fetch : {Fetch::gathered, Fetch::needed}) {
      run_ranks(3, [&](const Group& group) {
        const at::Tensor tokens = token_indices(ownership, group.rank());
        const auto mine = [&](const at::Tensor& t) {
          return t.index_select(0, tokens);
        };
        const auto found =
            select_and_attend({mine(all.q), mine(all.kv), mine(all.index_q),
                               mine(all.index_k), mine(all.weights)},
                              AttentionLayout::of(ownership, {mask}), group,
                              selection, attention, fetch, true);
        EXPECT_TRUE(at::equal(found.indices, mine(alone.indices)));
        EXPECT_TRUE(at::allclose(found.out, mine(alone.out), 1e-12, 1e-13));
        EXPECT_TRUE(at::allclose(found.lse, mine(alone.lse), 1e-12, 1e-13));
        EXPECT_TRUE(
            at::allclose(found.scores, mine(alone.scores), 1e-12, 1e-13));
        EXPECT_TRUE(
            at::allclose(found.target, mine(alone.target), 1e-12, 1e-13));
      });
    }
  }
}

}  // namespace
}  // namespace longspan
