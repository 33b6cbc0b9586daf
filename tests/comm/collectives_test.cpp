#include "longspan/comm/collectives.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <mutex>

#include "longspan/comm/needed.h"
#include "longspan/core/detail/check.h"
#include "longspan/core/mask.h"
#include "tests/comm/ranks.h"
#include "tests/support/values.h"

namespace longspan {
namespace {

using test::message_of;
using ::testing::HasSubstr;

using Sizes = std::vector<int64_t>;

int64_t total(const Sizes& sizes) {
  int64_t sum = 0;
  for (const int64_t size : sizes) sum += size;
  return sum;
}

int64_t first(const Sizes& sizes, int rank) {
  return total({sizes.begin(), sizes.begin() + rank});
}

/// Equal, uneven, and with ranks that hold nothing.
std::vector<Sizes> cuts(int ranks) {
  Sizes equal;
  Sizes uneven;
  Sizes gaps;
  for (int rank = 0; rank < ranks; ++rank) {
    equal.push_back(3);
    uneven.push_back(1 + rank * 2 % 5);
    gaps.push_back(rank % 2 == 0 ? 0 : 2 + rank);
  }
  return {equal, uneven, gaps};
}

at::Tensor part(const at::Tensor& whole, int64_t axis, const Sizes& sizes,
                int rank) {
  return whole.narrow(axis, first(sizes, rank), test::at(sizes, rank));
}

/// Entry (row, token, head, channel) names its place; `extra` tells ranks
/// apart.
at::Tensor numbered(int64_t tokens, int64_t heads, double extra = 0) {
  const auto along = [](int64_t n, double step) {
    return at::arange(n, at::kDouble) * step;
  };
  return along(2, 1e6).view({2, 1, 1, 1}) +
         along(tokens, 1e3).view({1, tokens, 1, 1}) +
         along(heads, 10).view({1, 1, heads, 1}) +
         along(2, 1).view({1, 1, 1, 2}) + extra;
}

/// Sums numbers over the ranks of a run.
class Sum {
 public:
  void add(const at::Tensor& value) {
    const std::lock_guard lock(mutex_);
    sum_ += value.item<double>();
  }
  double value() const { return sum_; }

 private:
  std::mutex mutex_;
  double sum_ = 0;
};

/// A collective, what its argument looks like on a rank, and its adjoint.
struct Law {
  std::string name;
  std::function<at::Tensor(const Group&)> argument;
  std::function<at::Tensor(const at::Tensor&, const Group&)> map;
  std::function<at::Tensor(const at::Tensor&, const Group&)> adjoint;
};

at::Tensor table_of(const std::vector<std::vector<int64_t>>& rows) {
  at::Tensor table = at::empty({std::ssize(rows), 4}, at::kLong);
  int64_t* entry = table.mutable_data_ptr<int64_t>();
  for (const auto& row : rows) entry = std::copy(row.begin(), row.end(), entry);
  return table;
}

/// Everyone sends its first half to all, and all of it to the next rank.
at::Tensor some_sends(const Sizes& sizes) {
  const auto ranks = std::ssize(sizes);
  std::vector<std::vector<int64_t>> rows;
  for (int64_t from = 0; from < ranks; ++from) {
    const int64_t size = test::at(sizes, from);
    for (int64_t to = 0; to < ranks; ++to) {
      rows.push_back({from, to, 0, size / 2});
    }
    rows.push_back({from, (from + 1) % ranks, 0, size});
  }
  return table_of(rows);
}

std::vector<Law> laws(const Sizes& sizes) {
  // Small whole numbers: sums are exact in any order.
  const auto drawn = [](at::IntArrayRef shape, const Group& group) {
    const auto seed = static_cast<uint64_t>(group.rank()) + 1;
    return at::randint(-9, 10, shape,
                       at::make_generator<at::CPUGeneratorImpl>(seed),
                       at::TensorOptions(at::kDouble));
  };
  Sizes heads;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    heads.push_back(1 + static_cast<int64_t>(i) % 2);
  }
  const auto local = [=](const Group& group) {
    return drawn({2, test::at(sizes, group.rank()), total(heads)}, group);
  };
  const auto whole = [=](const Group& group) {
    return drawn({2, total(sizes), test::at(heads, group.rank())}, group);
  };
  std::vector<Law> list = {
      {"all_gather_tokens", local,
       [=](const auto& x, const auto& group) {
         return all_gather_tokens(x, 1, sizes, group);
       },
       [=](const auto& y, const auto& group) {
         return reduce_scatter_tokens(y, 1, sizes, group);
       }},
      {"reduce_scatter_tokens",
       [=](const Group& group) { return drawn({total(sizes), 3}, group); },
       [=](const auto& x, const auto& group) {
         return reduce_scatter_tokens(x, 0, sizes, group);
       },
       [=](const auto& y, const auto& group) {
         return all_gather_tokens(y, 0, sizes, group);
       }},
      {"all_to_all_heads", local,
       [=](const auto& x, const auto& group) {
         return all_to_all_heads(x, 1, 2, sizes, heads, group);
       },
       [=](const auto& y, const auto& group) {
         return all_to_all_tokens(y, 1, 2, sizes, heads, group);
       }},
      {"all_to_all_tokens", whole,
       [=](const auto& x, const auto& group) {
         return all_to_all_tokens(x, 1, -1, sizes, heads, group);
       },
       [=](const auto& y, const auto& group) {
         return all_to_all_heads(y, 1, -1, sizes, heads, group);
       }},
      {"exchange_needed", local,
       [=](const auto& x, const auto& group) {
         return exchange_needed(x, 1, some_sends(sizes), group);
       },
       [=](const auto& y, const auto& group) {
         return return_needed(y, 1, some_sends(sizes),
                              test::at(sizes, group.rank()), group);
       }},
      {"return_needed",
       [=](const Group& group) {
         return drawn({received_tokens(some_sends(sizes), group.rank()), 2},
                      group);
       },
       [=](const auto& x, const auto& group) {
         return return_needed(x, 0, some_sends(sizes),
                              test::at(sizes, group.rank()), group);
       },
       [=](const auto& y, const auto& group) {
         return exchange_needed(y, 0, some_sends(sizes), group);
       }}};
  const auto ranks = static_cast<int64_t>(sizes.size());
  for (const int64_t hops : {int64_t{1}, int64_t{-1}, 2 * ranks + 1}) {
    Sizes arrived = sizes;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      test::at(arrived, ((rank + hops) % ranks + ranks) % ranks) =
          test::at(sizes, rank);
    }
    list.push_back({join("rotate by ", hops), local,
                    [=](const auto& x, const auto& group) {
                      return rotate(x, hops, 1, sizes, group);
                    },
                    [=](const auto& y, const auto& group) {
                      return rotate(y, -hops, 1, arrived, group);
                    }});
  }
  for (const int64_t shift : {1, -2, 5, 1000}) {
    list.push_back({join("roll by ", shift), local,
                    [=](const auto& x, const auto& group) {
                      return roll(x, 1, shift, sizes, group);
                    },
                    [=](const auto& y, const auto& group) {
                      return roll(y, 1, -shift, sizes, group);
                    }});
  }
  return list;
}

TEST(Collectives, BackwardIsTheAdjoint) {
  for (const int ranks : test::kSizes) {
    for (const Sizes& sizes : cuts(ranks)) {
      // All laws in one run: making groups costs more than the laws.
      const std::size_t count = laws(sizes).size();
      std::vector<Sum> left(count);
      std::vector<Sum> right(count);
      run_ranks(ranks, [&](const Group& group) {
        const auto list = laws(sizes);
        for (std::size_t i = 0; i < count; ++i) {
          SCOPED_TRACE(list[i].name);
          const at::Tensor x = list[i].argument(group).requires_grad_(true);
          const at::Tensor z = list[i].map(x, group);
          const at::Tensor y = z.detach().mul(3).add(group.rank() + 1);
          left[i].add((z.detach() * y).sum());
          const at::Tensor grad = torch::autograd::grad({z}, {x}, {y})[0];
          right[i].add((x.detach() * grad).sum());
          EXPECT_TRUE(at::equal(grad, list[i].adjoint(y, group)));
        }
      });
      for (std::size_t i = 0; i < count; ++i) {
        EXPECT_EQ(left[i].value(), right[i].value())
            << laws(sizes)[i].name << " with " << ranks << " ranks";
      }
    }
  }
}

TEST(Collectives, MoveWhatTheyPromise) {
  for (const int ranks : test::kSizes) {
    for (const Sizes& sizes : cuts(ranks)) {
      run_ranks(ranks, [&](const Group& group) {
        const int me = group.rank();
        const at::Tensor whole = numbered(total(sizes), 2 * ranks);
        const at::Tensor mine = part(whole, 1, sizes, me);
        EXPECT_TRUE(at::equal(all_gather_tokens(mine, 1, sizes, group), whole));
        EXPECT_TRUE(
            at::equal(all_gather_tokens(mine.transpose(0, 1).contiguous(), 0,
                                        sizes, group),
                      whole.transpose(0, 1)));
        const Sizes heads(static_cast<std::size_t>(ranks), 2);
        const at::Tensor some = part(whole, 2, heads, me);
        EXPECT_TRUE(
            at::equal(all_to_all_heads(mine, 1, 2, sizes, heads, group), some));
        EXPECT_TRUE(at::equal(
            all_to_all_tokens(some, 1, 2, sizes, heads, group), mine));
        const int before = (me + ranks - 1) % ranks;
        EXPECT_TRUE(at::equal(rotate(mine, 1, 1, sizes, group),
                              part(whole, 1, sizes, before)));
        for (int64_t shift = -3; shift <= total(sizes) + 1; ++shift) {
          EXPECT_TRUE(at::equal(roll(mine, 1, shift, sizes, group),
                                part(whole.roll(shift, 1), 1, sizes, me)))
              << "shift " << shift;
        }
        at::Tensor summed = at::zeros_like(whole);
        for (int rank = 0; rank < ranks; ++rank) {
          summed += numbered(total(sizes), 2 * ranks, rank * 1e8);
        }
        EXPECT_TRUE(at::equal(
            reduce_scatter_tokens(numbered(total(sizes), 2 * ranks, me * 1e8),
                                  1, sizes, group),
            part(summed, 1, sizes, me)));
      });
    }
  }
}

TEST(Collectives, OneRankReturnsItsArgument) {
  const Group group = Group::solo();
  const at::Tensor x = numbered(4, 2);
  EXPECT_TRUE(all_gather_tokens(x, 1, {4}, group).is_same(x));
  EXPECT_TRUE(reduce_scatter_tokens(x, 1, {4}, group).is_same(x));
  EXPECT_TRUE(all_to_all_heads(x, 1, 2, {4}, {2}, group).is_same(x));
  EXPECT_TRUE(all_to_all_tokens(x, 1, 2, {4}, {2}, group).is_same(x));
  EXPECT_TRUE(rotate(x, 5, group).is_same(x));
  EXPECT_TRUE(roll(x, 1, 8, {4}, group).is_same(x));
  EXPECT_TRUE(
      exchange_needed(x, 1, table_of({{0, 0, 0, 4}}), group).is_same(x));
  EXPECT_TRUE(at::equal(roll(x, 1, 1, {4}, group), x.roll(1, 1)));
  EXPECT_TRUE(at::equal(
      exchange_needed(x, 1, table_of({{0, 0, 2, 1}, {0, 0, 0, 2}}), group),
      at::cat({x.narrow(1, 2, 1), x.narrow(1, 0, 2)}, 1)));
}

TEST(Collectives, HalfTypesAreSummedInFloat32) {
  // 256 + 1 + ... + 1: bfloat16 has no 257, so a bfloat16 sum stays at 256.
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const double big = dtype == at::kBFloat16 ? 256 : 2048;
    run_ranks(7, [&](const Group& group) {
      const at::Tensor x =
          at::full({7}, group.rank() == 0 ? big : 1, at::TensorOptions(dtype));
      const Sizes sizes(7, 1);
      const at::Tensor sum = reduce_scatter_tokens(x, 0, sizes, group);
      EXPECT_EQ(sum.scalar_type(), dtype);
      EXPECT_EQ(sum.item<double>(), big + 6);
    });
  }
}

TEST(Collectives, SumsRepeatBitForBit) {
  std::vector<at::Tensor> runs;
  std::mutex mutex;
  for (int run = 0; run < 3; ++run) {
    run_ranks(4, [&](const Group& group) {
      const auto seed = static_cast<uint64_t>(group.rank());
      const at::Tensor x =
          at::randn({400}, at::make_generator<at::CPUGeneratorImpl>(seed),
                    at::TensorOptions(at::kFloat));
      const at::Tensor sum =
          reduce_scatter_tokens(x, 0, {100, 100, 100, 100}, group);
      if (group.rank() != 2) return;
      const std::lock_guard lock(mutex);
      runs.push_back(sum);
    });
  }
  EXPECT_TRUE(at::equal(runs[0], runs[1]));
  EXPECT_TRUE(at::equal(runs[0], runs[2]));
}

TEST(Collectives, OnlyBoundaryTokensTravelInARoll) {
  run_ranks(4, [](const Group& group) {
    roll(at::ones({100}, at::kFloat), 0, 3, {100, 100, 100, 100}, group);
    EXPECT_EQ(group.sent_bytes(), 3 * 4);
  });
}

// ---- Needed keys.

TEST(Needed, RanksReceiveExactlyWhatTheirQueriesSee) {
  const Packing packing = Packing::of({5, 9, 2, 8}, {6, 9, 3, 14}, 32);
  const std::vector<Mask> masks = {Mask::causal(packing), Mask::full(packing),
                                   Mask::sliding(packing, 3)};
  for (const Mask& mask : masks) {
    for (const Ownership& ownership :
         {Ownership::contiguous(32, 4), Ownership::head_tail(32, 4),
          Ownership::of_sizes({0, 7, 25, 0})}) {
      const at::Tensor table = needed_table(mask, ownership);
      run_ranks(ownership.ranks(), [&](const Group& group) {
        const int me = group.rank();
        const at::Tensor stream = at::arange(32, at::kLong);
        std::vector<at::Tensor> held = {stream.narrow(0, 0, 0)};
        for (const TokenRange range : ownership.ranges_of(me)) {
          held.push_back(stream.narrow(0, range.begin, range.size()));
        }
        const at::Tensor got = exchange_needed(at::cat(held), 0, table, group);
        std::vector<at::Tensor> expected = {stream.narrow(0, 0, 0)};
        for (const TokenRange range : received_ranges(table, ownership, me)) {
          expected.push_back(stream.narrow(0, range.begin, range.size()));
        }
        EXPECT_TRUE(at::equal(got, at::cat(expected)));
        // Each key that some query sees came once, and no range that none sees.
        std::vector<int> came(32);
        for (int64_t i = 0; i < got.numel(); ++i) {
          ++test::at(came, got[i].item<int64_t>());
        }
        for (int64_t key = 0; key < 32; ++key) {
          bool seen = false;
          for (const TokenRange range : ownership.ranges_of(me)) {
            for (int64_t query = range.begin; query < range.end; ++query) {
              seen = seen || mask.allows(query, key);
            }
          }
          EXPECT_LE(test::at(came, key), 1);
          if (seen || packing.is_pad(key)) {
            EXPECT_GE(test::at(came, key), seen ? 1 : 0);
          } else {
            EXPECT_EQ(test::at(came, key), 0) << "key " << key;
          }
        }
      });
    }
  }
}

TEST(Needed, RefusesOtherKeys) {
  const Packing packing = Packing::single(8);
  EXPECT_THAT(message_of([&] {
                needed_table(Mask::compressed(packing, 2),
                             Ownership::contiguous(8, 2));
              }),
              HasSubstr("the mask is compressed"));
  EXPECT_EQ(message_of([&] {
              needed_table(Mask::causal(packing), Ownership::contiguous(6, 2));
            }),
            "needed_table: the mask has 8 tokens, the ownership 6");
}

// ---- Refusals.

TEST(Collectives, RefuseBeforeAnythingIsSent) {
  run_ranks(2, [](const Group& group) {
    const at::Tensor x = at::ones({4, 3});
    const auto refusal = [](const std::function<void()>& call) {
      return message_of(call);
    };
    EXPECT_EQ(refusal([&] { all_gather_tokens(x, 2, {4, 4}, group); }),
              "all_gather_tokens: axis 2 of a tensor with 2 axes");
    EXPECT_EQ(refusal([&] { all_gather_tokens(x, 0, {4}, group); }),
              "all_gather_tokens: `sizes` has 1 entries; expected one for each "
              "of the 2 ranks");
    EXPECT_EQ(refusal([&] { all_gather_tokens(x, 0, {5, 5}, group); }),
              join("all_gather_tokens: axis 0 of float32 [4, 3] is not the 5 "
                   "tokens that `sizes` gives rank ",
                   group.rank()));
    EXPECT_EQ(refusal([&] { reduce_scatter_tokens(x, 0, {4, 4}, group); }),
              "reduce_scatter_tokens: axis 0 of float32 [4, 3] is not the 8 "
              "tokens of all ranks");
    EXPECT_EQ(refusal([&] { reduce_scatter_tokens(x, 0, {-1, 5}, group); }),
              "reduce_scatter_tokens: `sizes` has an entry -1");
    EXPECT_EQ(
        refusal([&] { all_to_all_heads(x, 0, 0, {4, 4}, {1, 2}, group); }),
        "all_to_all_heads: tokens and heads are both axis 0");
    EXPECT_EQ(
        refusal([&] { all_to_all_heads(x, 0, 1, {4, 4}, {2, 2}, group); }),
        "all_to_all_heads: axis 1 of float32 [4, 3] is not the 4 heads of all "
        "ranks");
    EXPECT_EQ(refusal([&] {
                exchange_needed(x, 0, table_of({{0, 2, 0, 1}}), group);
              }),
              "exchange_needed: `sends` has the row (0, 2, 0, 1) in a group of "
              "2");
    EXPECT_EQ(refusal([&] { exchange_needed(x, 0, x, group); }),
              "exchange_needed: `sends` is float32 [4, 3]; expected int64 [n, "
              "4] = (from, to, begin, length)");
    const int me = group.rank();
    EXPECT_EQ(refusal([&] {
                exchange_needed(x, 0, table_of({{0, 1, 3, 2}, {1, 0, 3, 2}}),
                                group);
              }),
              join("exchange_needed: `sends` names token 4 of rank ", me,
                   ", but axis 0 of float32 [4, 3] ends before it"));
    EXPECT_EQ(group.sent_bytes(), 0);
  });
}

}  // namespace
}  // namespace longspan
