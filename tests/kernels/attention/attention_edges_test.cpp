#include <gtest/gtest.h>

#include "longspan/kernels/levels/levels.h"
#include "tests/kernels/attention/attention_poisons.h"

/// Infinities, NaNs, queries that see nothing, and every half-precision number.
namespace longspan {
namespace {

using test::Answer;
using test::AttentionArrays;
using test::AttentionCase;
using test::CaseInputs;
using test::inputs_of;
using test::kParts;
using test::Values;

TEST(AttentionPoison, ReachesExactlyThoseWhoSeeIt) {
  for (ElementType type :
       {ElementType::float32, ElementType::float64, ElementType::bfloat16}) {
    test::expect_poison_reaches_those_who_see_it(test::poisoned_case(),
                                                 attention_kernels(), type);
  }
}

TEST(AttentionPoison, ReachesThoseOfManyHeadsWhoSeeIt) {
  test::expect_poison_reaches_those_who_see_it(test::wide_poisoned_case(),
                                               attention_kernels().last(1),
                                               ElementType::bfloat16);
}

/// Float arithmetic, and products of bfloat16 where the CPU has them.
class AttentionEdges : public ::testing::TestWithParam<ElementType> {};

INSTANTIATE_TEST_SUITE_P(Types, AttentionEdges,
                         ::testing::Values(ElementType::float32,
                                           ElementType::bfloat16),
                         [](const auto& info) {
                           return info.param == ElementType::float32
                                      ? "float32"
                                      : "bfloat16";
                         });

TEST_P(AttentionEdges, PoisonStaysOutWhereNobodySeesIt) {
  AttentionCase c = test::poisoned_case();
  c.lines = {test::all_of({0, 70}, {0, 35})};
  CaseInputs clean = inputs_of(c, GetParam()), dirty = clean;
  for (std::size_t i = 35 * 8; i < dirty.problem.k.size(); ++i) {
    dirty.problem.k[i] = dirty.problem.v[i] = NAN;
  }
  for (const AttentionKernels& kernels : attention_kernels()) {
    const Answer a = kernel_answer(kernels, clean, GetParam());
    const Answer b = kernel_answer(kernels, dirty, GetParam());
    for (auto part : kParts) EXPECT_EQ(a.*part, b.*part) << kernels.name;
  }
}

TEST_P(AttentionEdges,
       ScoresOfMinusInfinityEverywhereCountAsHavingSeenNothing) {
  CaseInputs inputs = inputs_of(test::causal_case("dead", 5, 1), GetParam());
  std::ranges::fill(inputs.problem.q, 1.0);
  std::ranges::fill(inputs.problem.k, -INFINITY);
  for (const AttentionKernels& kernels : attention_kernels()) {
    const Answer answer = kernel_answer(kernels, inputs, GetParam());
    for (double lse : answer.lse) EXPECT_EQ(lse, -INFINITY) << kernels.name;
    for (auto part : {&Answer::out, &Answer::dq, &Answer::dk, &Answer::dv}) {
      for (double value : answer.*part) EXPECT_EQ(value, 0) << kernels.name;
    }
  }
}

TEST_P(AttentionEdges, GradientOfQueriesWithInfiniteLseIsNothing) {
  for (double lse : {INFINITY, -INFINITY}) {
    CaseInputs inputs = inputs_of(test::causal_case("dead", 70, 4), GetParam());
    std::ranges::fill(inputs.dout, NAN);
    for (const AttentionKernels& kernels : attention_kernels()) {
      AttentionArrays arrays = arrays_of(inputs, GetParam());
      arrays.lse.fill(lse);
      run_backward(kernels, inputs.problem, GetParam(), inputs.lines, arrays);
      const Answer answer = answer_in(arrays);
      for (auto part : {&Answer::dq, &Answer::dk, &Answer::dv}) {
        for (double value : answer.*part) EXPECT_EQ(value, 0) << kernels.name;
      }
    }
  }
}

TEST_P(AttentionEdges, StateIsLeftAloneByQueriesThatNoLineMentions) {
  AttentionCase c = test::poisoned_case();
  c.lines = {test::all_of({10, 20}, {0, 70})};
  const CaseInputs inputs = inputs_of(c, GetParam());
  for (const AttentionKernels& kernels : attention_kernels()) {
    AttentionArrays arrays = arrays_of(inputs, GetParam());
    arrays.out.fill(3.0);
    arrays.lse.fill(5.0);
    run_forward(kernels, inputs.problem, GetParam(), inputs.lines, arrays);
    const Answer answer = answer_in(arrays);
    for (std::size_t i = 0; i < answer.lse.size(); ++i) {
      const bool mentioned = 10 <= i / 2 && i / 2 < 20;
      EXPECT_EQ(answer.lse[i] == 5.0, !mentioned) << kernels.name << i;
      EXPECT_EQ(answer.out[8 * i] == 3.0, !mentioned) << kernels.name << i;
    }
  }
}

/// Every query sees its own key, whose value it must bring back unchanged.
TEST(AttentionInputs, OfHalfPrecisionAreReadExactly) {
  constexpr int64_t kChannels = 512, kTokens = 65536 / kChannels;
  for (ElementType type : {ElementType::bfloat16, ElementType::float16}) {
    CaseInputs inputs =
        inputs_of({.name = "every_number",
                   .queries = kTokens,
                   .keys = kTokens,
                   .value_dim = kChannels,
                   .lines = {test::band({0, kTokens}, {0, kTokens}, 0, 1)}},
                  type);
    Values& v = inputs.problem.v;
    for (std::size_t i = 0; i < v.size(); ++i) {
      const auto bits = static_cast<uint16_t>(i);
      v[i] = type == ElementType::float16 ? test::float16_value(bits)
                                          : test::bfloat16_value(bits);
    }
    for (const AttentionKernels& kernels : attention_kernels()) {
      AttentionArrays arrays = arrays_of(inputs, type);
      run_forward(kernels, inputs.problem, type, inputs.lines, arrays);
      test::expect_near(arrays.out.values(), v, 0, std::string(kernels.name));
    }
  }
}

}  // namespace
}  // namespace longspan
