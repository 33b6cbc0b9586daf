#include "longspan/ops/accumulator.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <utility>

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

TEST(Accumulator, TakesAFirstPartThatLiesWhereTheSumIsToBe) {
  const at::Tensor memory = at::full({1, 4, 2, 3}, 7.f);
  Accumulator sum = Accumulator::sum_in(memory, {0, 4});
  PartialAttention first = sum.room(at::kBFloat16);
  EXPECT_EQ(first.out.data_ptr(), memory.data_ptr());
  first.out.fill_(2);
  sum.add(std::move(first));
  const PartialAttention second = sum.room(at::kBFloat16);
  EXPECT_EQ(second.out.scalar_type(), at::kBFloat16);
  sum.add({at::ones({1, 4, 2, 3}), {}});
  EXPECT_TRUE(at::equal(memory, at::full({1, 4, 2, 3}, 3.f)));
  EXPECT_EQ(sum.sums().out.data_ptr(), memory.data_ptr());
}

/// Fills where a turn's total goes with `value`, and lse with `lse`.
void take(Accumulator& running, Accumulator::Turn turn, float value,
          float lse) {
  turn.total.out.fill_(value);
  turn.total.lse.fill_(lse);
  running.end_turn(std::move(turn));
}

TEST(Accumulator, HandsTheTotalOnFromTurnToTurn) {
  Accumulator running(Kind::attention, {1, 3, 2, 4}, at::kFloat,
                      MemoryOrder::heads_first);
  running.expect_more(true);
  Accumulator::Turn first = running.begin_turn(at::kBFloat16);
  EXPECT_FALSE(first.before.out.defined());
  EXPECT_EQ(first.total.out.scalar_type(), at::kFloat);
  take(running, std::move(first), 1, -1);

  Accumulator::Turn second = running.begin_turn(at::kBFloat16);
  EXPECT_EQ(second.before.out.data_ptr(), second.total.out.data_ptr());
  EXPECT_EQ(second.before.out.max().item<float>(), 1.f);
  take(running, std::move(second), 2, -2);

  running.expect_more(false);
  Accumulator::Turn last = running.begin_turn(at::kBFloat16);
  EXPECT_EQ(last.before.out.min().item<float>(), 2.f);
  EXPECT_EQ(last.before.lse.data_ptr(), last.total.lse.data_ptr());
  EXPECT_EQ(last.total.out.scalar_type(), at::kBFloat16);
  const void* const memory = last.total.out.data_ptr();
  take(running, std::move(last), 3, -3);

  const auto [out, lse] = running.finish(at::kBFloat16);
  EXPECT_EQ(out.data_ptr(), memory);
  EXPECT_TRUE(out.transpose(1, 2).is_contiguous());
  EXPECT_EQ(out.min().item<float>(), 3.f);
  EXPECT_EQ(lse.min().item<float>(), -3.f);
}

TEST(Accumulator, GivesTheSinkToTheLastTurnAlone) {
  Accumulator running(Kind::attention, {1, 3, 2, 4}, at::kFloat);
  running.ask_for_sink(at::zeros({2}));
  running.expect_more(true);
  Accumulator::Turn first = running.begin_turn(at::kBFloat16);
  EXPECT_FALSE(first.sink.defined());
  take(running, std::move(first), 1, 0);
  EXPECT_FALSE(running.has_sink());
  running.expect_more(false);
  Accumulator::Turn last = running.begin_turn(at::kBFloat16);
  EXPECT_TRUE(last.sink.defined());
  take(running, std::move(last), 1, 0);
  EXPECT_TRUE(running.has_sink());
}

/// Where other kernels took the steps before.
TEST(Accumulator, BeginsATurnFromPartsThatWait) {
  at::manual_seed(4);
  const PartialAttention part{at::randn({1, 3, 2, 4}), at::randn({1, 3, 2})};
  Accumulator running(Kind::attention, {1, 3, 2, 4}, at::kFloat);
  running.add(part);
  const Accumulator::Turn turn = running.begin_turn(at::kFloat);
  EXPECT_TRUE(at::equal(turn.before.out, part.out));
  EXPECT_TRUE(at::equal(turn.before.lse, part.lse));
  EXPECT_NE(turn.total.out.data_ptr(), turn.before.out.data_ptr());
}

}  // namespace
}  // namespace longspan
