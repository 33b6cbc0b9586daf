#include "longspan/ops/accumulator.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace longspan {
namespace {

using Kind = Accumulator::Kind;

TEST(Accumulator, OfNothingIsNothing) {
  Accumulator attention(Kind::attention, {1, 3, 2, 4}, at::kFloat);
  const auto [out, lse] = attention.finish(at::kBFloat16);
  EXPECT_TRUE(at::equal(out, at::zeros({1, 3, 2, 4}, at::kBFloat16)));
  EXPECT_TRUE(at::isneginf(lse).all().item<bool>());
  Accumulator sum(Kind::sum, {1, 3, 2, 4}, at::kFloat);
  EXPECT_TRUE(at::equal(sum.finish(at::kFloat).out, at::zeros({1, 3, 2, 4})));
}

TEST(Accumulator, AddsPartsWhereTheyBelong) {
  at::manual_seed(2);
  const at::Tensor whole = at::randn({2, 6, 3, 4});
  const at::Tensor few = at::randn({1, 2, 3, 4});
  Accumulator sum(Kind::sum, {2, 6, 3, 4}, at::kFloat,
                  MemoryOrder::heads_first);
  sum.add({whole, {}});
  sum.add({few, {}}, 1, 3);
  at::Tensor expected = whole.clone();
  expected.narrow(0, 1, 1).narrow(1, 3, 2).add_(few);
  const at::Tensor got = sum.finish(at::kFloat).out;
  EXPECT_TRUE(at::equal(got, expected));
  EXPECT_TRUE(got.transpose(1, 2).is_contiguous());
}

TEST(Accumulator, MergesAttentionAsPartialAttentionDoes) {
  at::manual_seed(3);
  PartialAttention expected =
      PartialAttention::nothing({2, 6, 3}, 4, at::kFloat);
  Accumulator running(Kind::attention, {2, 6, 3, 4}, at::kFloat);
  for (int64_t token : {0, 2, 0}) {
    const PartialAttention part{at::randn({2, 4, 3, 4}), at::randn({2, 4, 3})};
    PartialAttention here{expected.out.narrow(1, token, 4),
                          expected.lse.narrow(1, token, 4)};
    here.add(part);
    running.add(part, 0, token);
  }
  const auto [out, lse] = running.finish(at::kFloat);
  EXPECT_TRUE(at::equal(out, expected.out));
  EXPECT_TRUE(at::equal(lse, expected.lse));
}

TEST(Accumulator, KeepsSumsInTheMemoryItWasGiven) {
  const at::Tensor memory = at::full({1, 4, 2, 3}, 7.f);
  Accumulator sum = Accumulator::sum_in(memory, {0, 4});
  sum.add({at::ones({1, 2, 2, 3}), {}}, 0, 1);
  sum.sums();
  EXPECT_EQ(memory.sum().item<float>(), 12.f);
  EXPECT_EQ(memory.narrow(1, 1, 2).min().item<float>(), 1.f);
}

}  // namespace
}  // namespace longspan
