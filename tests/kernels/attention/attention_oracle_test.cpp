#include <gtest/gtest.h>

#include <cmath>

#include "tests/kernels/attention/attention_cases.h"

/// The oracle is held to the definition: weights that sum to one, and
/// derivatives that are limits of differences.
namespace longspan {
namespace {

using oracle::AttentionProblem;

/// Three queries, of which the first sees nothing; a sink and a soft cap.
test::CaseInputs small_inputs() {
  test::CaseInputs inputs =
      test::inputs_of({.name = "small",
                       .rows = 2,
                       .queries = 3,
                       .keys = 4,
                       .heads = 3,
                       .heads_per_key_head = 2,
                       .head_offset = 1,
                       .head_dim = 3,
                       .value_dim = 2,
                       .softcap = 1.5,
                       .lines = {test::causal({1, 3}, {0, 4}, 1)}},
                      ElementType::float64);
  inputs.problem.sink = {0.5, -1, 2};
  return inputs;
}

/// The number whose derivatives attention_backward gives.
double loss(const AttentionProblem& problem, const std::vector<double>& dout) {
  const auto out = oracle::attention(problem).out;
  double sum = 0;
  for (std::size_t i = 0; i < out.size(); ++i) sum += out[i] * dout[i];
  return sum;
}

TEST(AttentionOracle, HasTheDerivativesOfItsAnswer) {
  const test::CaseInputs inputs = small_inputs();
  const auto gradients =
      oracle::attention_backward(inputs.problem, inputs.dout);
  const auto expect_differences =
      [&](std::vector<double> AttentionProblem::* input,
          const std::vector<double>& derivatives) {
        ASSERT_EQ(derivatives.size(), (inputs.problem.*input).size());
        for (std::size_t i = 0; i < derivatives.size(); ++i) {
          constexpr double kStep = 1e-5;
          AttentionProblem more = inputs.problem, less = inputs.problem;
          (more.*input)[i] += kStep;
          (less.*input)[i] -= kStep;
          const double difference =
              loss(more, inputs.dout) - loss(less, inputs.dout);
          EXPECT_NEAR(derivatives[i], difference / (2 * kStep), 1e-8) << i;
        }
      };
  expect_differences(&AttentionProblem::q, gradients.dq);
  expect_differences(&AttentionProblem::k, gradients.dk);
  expect_differences(&AttentionProblem::v, gradients.dv);
  expect_differences(&AttentionProblem::sink, gradients.dsink);
}

TEST(AttentionOracle, WeighsValuesByASoftmaxThatTheSinkSharesIn) {
  test::CaseInputs inputs = small_inputs();
  AttentionProblem& p = inputs.problem;
  std::ranges::fill(p.v, 1.0);
  const auto with_sink = oracle::attention(p);
  for (int64_t row = 0; row < 2; ++row) {
    for (int64_t head = 0; head < 3; ++head) {
      for (int64_t query = 1; query < 3; ++query) {
        const auto at = oracle::place_of_query(p, row, query, head, 1);
        const double lse = with_sink.lse[at];
        const double sink = p.sink[static_cast<std::size_t>(head)];
        const double share = 1 / (1 + std::exp(sink - lse));
        EXPECT_NEAR(with_sink.out[2 * at], share, 1e-14);
      }
    }
  }
  p.sink.clear();
  EXPECT_EQ(oracle::attention(p).lse, with_sink.lse);
}

TEST(AttentionOracle, GivesNothingToQueriesThatSeeNothing) {
  const test::CaseInputs inputs = small_inputs();
  const AttentionProblem& p = inputs.problem;
  const auto answer = oracle::attention(p);
  const auto gradients = oracle::attention_backward(p, inputs.dout);
  for (int64_t row = 0; row < 2; ++row) {
    for (int64_t head = 0; head < 3; ++head) {
      const auto at = oracle::place_of_query(p, row, 0, head, 1);
      EXPECT_EQ(answer.lse[at], -INFINITY);
      EXPECT_EQ(answer.out[2 * at], 0);
      EXPECT_EQ(gradients.dq[3 * at], 0);
    }
  }
}

}  // namespace
}  // namespace longspan
