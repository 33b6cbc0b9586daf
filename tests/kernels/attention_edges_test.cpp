#include <gtest/gtest.h>

#include "longspan/kernels/attention.h"
#include "tests/kernels/attention_answers.h"

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

/// A poisoned element: which array, which token, head and channel.
struct Poison {
  std::string name;
  Values oracle::AttentionProblem::* array;  // nullptr is dout
  int64_t token, head, channel;
  double value;
};

std::vector<Poison> poisons() {
  using Problem = oracle::AttentionProblem;
  std::vector<Poison> list;
  for (double value : {NAN, INFINITY, -INFINITY}) {
    for (int64_t token : {0, 40, 69}) {
      list.push_back({"q", &Problem::q, token, 1, 2, value});
      list.push_back({"k", &Problem::k, token, 0, 3, value});
      list.push_back({"v", &Problem::v, token, 0, 4, value});
      list.push_back({"dout", nullptr, token, 0, 5, value});
    }
  }
  return list;
}

/// Windows, so that most queries of a block see only some of its keys.
AttentionCase poisoned_case() {
  return {.name = "poisoned",
          .queries = 70,
          .keys = 70,
          .heads = 2,
          .heads_per_key_head = 2,
          .head_dim = 8,
          .value_dim = 8,
          .lines = {test::band({0, 30}, {0, 30}, 0, 7),
                    test::band({30, 64}, {30, 70}, 1, 12),
                    test::all_of({66, 70}, {66, 70})}};
}

TEST(AttentionPoison, ReachesExactlyThoseWhoSeeIt) {
  for (ElementType type :
       {ElementType::float32, ElementType::float64, ElementType::bfloat16}) {
    for (const Poison& poison : poisons()) {
      CaseInputs inputs = inputs_of(poisoned_case(), type);
      oracle::AttentionProblem& p = inputs.problem;
      Values& array = poison.array == nullptr ? inputs.dout : p.*poison.array;
      const bool of_key = poison.name == "k" || poison.name == "v";
      const int64_t heads = of_key ? p.key_heads() : p.heads;
      const int64_t place = (poison.token * heads + poison.head) * 8;
      array[static_cast<std::size_t>(place + poison.channel)] = poison.value;
      const Answer exact = slow_answer<double>(inputs);
      for (const AttentionKernels& kernels : attention_kernels()) {
        const Answer answer = kernel_answer(kernels, inputs, type);
        const bool rounds =
            test::weights_of(kernels, type) == test::Weights::bfloat16;
        const double tolerance = rounds                         ? 1.0 / 64
                                 : type == ElementType::float64 ? 1e-12
                                                                : 1e-5;
        const Answer tolerances{
            {tolerance}, {tolerance}, {tolerance}, {tolerance}, {tolerance}};
        expect_answer(answer, exact, tolerances,
                      std::string(kernels.name) + " " + poison.name + " " +
                          std::to_string(poison.token) + " " +
                          std::to_string(poison.value));
      }
    }
  }
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
  AttentionCase c = poisoned_case();
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
  AttentionCase c = poisoned_case();
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
