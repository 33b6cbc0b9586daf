#include "longspan/ops/partial_attention.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>

#include "tests/support/values.h"

namespace longspan {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Attention of 5 queries and 2 heads to keys [begin, end) of 7.
PartialAttention over_keys(const at::Tensor& scores, const at::Tensor& values,
                           int64_t begin, int64_t end) {
  const at::Tensor s = scores.narrow(2, begin, end - begin);
  const at::Tensor lse =
      end > begin ? s.logsumexp(2) : at::full({5, 2}, -kInfinity, at::kDouble);
  const at::Tensor p =
      (s - lse.unsqueeze(2)).exp().masked_fill(at::isneginf(s), 0);
  return {at::matmul(p, values.narrow(0, begin, end - begin)), lse};
}

struct Whole {
  at::Tensor scores, values;
  Whole() {
    at::manual_seed(5);
    scores = at::randn({5, 2, 7}, at::kDouble) * 3;
    values = at::randn({7, 4}, at::kDouble);
    // Query 0 sees nothing, query 1 only the last two keys.
    scores.select(0, 0).fill_(-kInfinity);
    scores.select(0, 1).narrow(1, 0, 5).fill_(-kInfinity);
  }
  PartialAttention part(int64_t begin, int64_t end) const {
    return over_keys(scores, values, begin, end);
  }
};

void expect_equal(const PartialAttention& a, const PartialAttention& b) {
  EXPECT_TRUE(at::allclose(a.out, b.out, 1e-12, 1e-13));
  const at::Tensor none = at::isneginf(a.lse);
  EXPECT_TRUE(at::equal(none, at::isneginf(b.lse)));
  EXPECT_TRUE(at::allclose(a.lse.masked_fill(none, 0),
                           b.lse.masked_fill(none, 0), 1e-12, 1e-13));
}

TEST(PartialAttention, MergesInAnyOrder) {
  const Whole whole;
  const std::vector<PartialAttention> parts{whole.part(0, 2), whole.part(2, 2),
                                            whole.part(2, 5), whole.part(5, 7)};
  std::vector<int> order{0, 1, 2, 3};
  do {
    PartialAttention sum = PartialAttention::nothing({5, 2}, 4, at::kDouble);
    for (int i : order) {
      sum = PartialAttention::merge(sum, parts[static_cast<std::size_t>(i)]);
    }
    expect_equal(sum, whole.part(0, 7));
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(PartialAttention, MergesInTrees) {
  const Whole whole;
  const auto left = PartialAttention::merge(whole.part(0, 3), whole.part(3, 4));
  const auto right =
      PartialAttention::merge(whole.part(4, 6), whole.part(6, 7));
  expect_equal(PartialAttention::merge(right, left), whole.part(0, 7));
}

TEST(PartialAttention, OfNothingIsNothing) {
  const auto nothing = PartialAttention::nothing({3}, 2, at::kFloat);
  const auto both = PartialAttention::merge(nothing, nothing);
  EXPECT_TRUE(at::equal(both.out, at::zeros({3, 2})));
  EXPECT_TRUE(at::isneginf(both.lse).all().item<bool>());
}

TEST(PartialAttention, AddsInPlace) {
  const Whole whole;
  PartialAttention sum = whole.part(0, 4);
  const void* memory = sum.out.data_ptr();
  sum.add(whole.part(4, 7));
  EXPECT_EQ(sum.out.data_ptr(), memory);
  expect_equal(sum, whole.part(0, 7));
}

TEST(PartialAttention, ASinkTakesWeightAndGivesNothing) {
  const Whole whole;
  const PartialAttention all = whole.part(0, 7);
  const at::Tensor sink = at::tensor({0.5, -kInfinity}, at::kDouble);
  const at::Tensor out = all.with_sink(sink);
  const at::Tensor share =
      all.lse.exp() / (all.lse.exp() + sink.exp().unsqueeze(0));
  EXPECT_TRUE(at::allclose(out, all.out * share.nan_to_num(0).unsqueeze(2)));
  EXPECT_TRUE(at::allclose(out.select(1, 1), all.out.select(1, 1)));
  EXPECT_TRUE(at::equal(all.with_sink(at::full({2}, kInfinity, at::kDouble)),
                        at::zeros_like(out)));
}

TEST(PartialAttention, RefusesWhatDoesNotFit) {
  const auto a = PartialAttention::nothing({3}, 2, at::kFloat);
  const auto b = PartialAttention::nothing({4}, 2, at::kFloat);
  EXPECT_EQ(
      test::message_of([&] { PartialAttention::merge(a, b); }),
      "PartialAttention: float32 [3, 2] with lse float32 [3] does not merge "
      "with float32 [4, 2] with lse float32 [4]");
}

}  // namespace
}  // namespace longspan
