#include "longspan/kernels/attend_selected/attend_selected.h"
#include "longspan/kernels/common/threads.h"

#include <gtest/gtest.h>

#include "tests/kernels/attend_selected/attend_selected_cases.h"

namespace longspan {
namespace {

using test::Lists;
using test::SelectedArrays;
using test::SelectedCase;
using test::SelectedInputs;
using test::SelectedResult;
using test::Weights;

constexpr std::array kTypes{ElementType::float32, ElementType::bfloat16,
                            ElementType::float16, ElementType::float64};
constexpr std::array kTypeNames{"float32", "bfloat16", "float16", "float64"};

class SelectedAttention : public ::testing::TestWithParam<SelectedCase> {};

INSTANTIATE_TEST_SUITE_P(Cases, SelectedAttention,
                         ::testing::ValuesIn(test::selected_cases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(SelectedAttention, IsAsExactAsAPlainComputationInEveryTypeAndKernel) {
  const SelectedCase& c = GetParam();
  for (ElementType type : kTypes) {
    const SelectedInputs inputs = selected_inputs(c, type);
    const SelectedResult exact = test::slow_result<double>(inputs);
    for (const AttentionKernels& kernels : attention_kernels()) {
      const std::string who = std::string(kernels.name) + " " +
                              kTypeNames[static_cast<std::size_t>(type)];
      SelectedArrays arrays(inputs, type, c.strides);
      run_selected(kernels.selected, inputs.problem, type, arrays);
      expect_result(
          result_in(arrays), exact,
          tolerances_of(inputs, exact, type, test::weights_of(kernels, type)),
          who);
      EXPECT_TRUE(gaps_kept(arrays)) << who;
    }
  }
}

TEST_P(SelectedAttention, GivesTheSameBitsOnAnyNumberOfThreads) {
  for (ElementType type : {ElementType::float32, ElementType::bfloat16}) {
    const SelectedInputs inputs = selected_inputs(GetParam(), type);
    for (const AttentionKernels& kernels : attention_kernels()) {
      SelectedArrays first(inputs, type, test::Strides::contiguous);
      run_selected(kernels.selected, inputs.problem, type, first);
      for (int64_t threads : {2, 5}) {
        SelectedArrays arrays(inputs, type, test::Strides::contiguous);
        run_selected(kernels.selected, inputs.problem, type, arrays,
                     on_threads(threads));
        EXPECT_TRUE(same_bits(arrays, first)) << kernels.name << threads;
      }
    }
  }
}

/// More queries than backward takes at once.
TEST(SelectedBlocks, AreTakenOneAfterAnother) {
  const SelectedCase c{.name = "",
                       .rows = 2,
                       .queries = 300,
                       .keys = 20,
                       .heads = 2,
                       .slots = 8,
                       .head_dim = 4,
                       .value_dim = 3,
                       .lists = Lists::repeated};
  const ElementType type = ElementType::float32;
  const SelectedInputs inputs = selected_inputs(c, type);
  const SelectedResult exact = test::slow_result<double>(inputs);
  for (const AttentionKernels& kernels : attention_kernels()) {
    SelectedArrays arrays(inputs, type, c.strides), threaded = arrays;
    run_selected(kernels.selected, inputs.problem, type, arrays);
    run_selected(kernels.selected, inputs.problem, type, threaded,
                 on_threads(5));
    expect_result(result_in(arrays), exact,
                  tolerances_of(inputs, exact, type, Weights::accumulated),
                  std::string(kernels.name));
    EXPECT_TRUE(same_bits(arrays, threaded)) << kernels.name;
  }
}

/// An ascending list with empty slots between is the same problem.
TEST(SelectedEmptySlots, ChangeNothing) {
  const SelectedCase c{.name = "", .keys = 100, .heads = 5, .slots = 70};
  for (ElementType type : kTypes) {
    const SelectedInputs dense = selected_inputs(c, type);
    SelectedInputs sparse = dense;
    sparse.problem.slots *= 2;
    sparse.problem.indices.clear();
    for (int32_t slot : dense.problem.indices) {
      sparse.problem.indices.insert(sparse.problem.indices.end(),
                                    {INT_MIN, slot});
    }
    for (const AttentionKernels& kernels : attention_kernels()) {
      SelectedArrays a(dense, type, c.strides), b(sparse, type, c.strides);
      run_selected(kernels.selected, dense.problem, type, a);
      run_selected(kernels.selected, sparse.problem, type, b);
      EXPECT_TRUE(a.out.bytes() == b.out.bytes()) << kernels.name;
      EXPECT_TRUE(a.dq.bytes() == b.dq.bytes()) << kernels.name;
      EXPECT_TRUE(a.dkv.bytes() == b.dkv.bytes()) << kernels.name;
    }
  }
}

TEST(SelectedPoison, ReachesExactlyThoseWhoListIt) {
  for (ElementType type : kTypes) {
    for (const AttentionKernels& kernels : attention_kernels()) {
      SCOPED_TRACE(std::string(kernels.name) + " " +
                   kTypeNames[static_cast<std::size_t>(type)]);
      test::expect_poison_reaches_those_who_list_it(kernels.selected, type);
    }
  }
}

/// Scores of -inf only: out 0, lse -inf, and no derivative moves.
TEST(SelectedPoison, AHeadWithoutFiniteScoresSawNothing) {
  const SelectedCase c{.name = "",
                       .queries = 2,
                       .keys = 10,
                       .heads = 3,
                       .slots = 4,
                       .head_dim = 2,
                       .value_dim = 1};
  for (ElementType type : kTypes) {
    SelectedInputs inputs = selected_inputs(c, type);
    for (std::size_t key = 0; key < 10; ++key) inputs.problem.kv[key * 2] = 1;
    inputs.problem.q[2 * 2] = -INFINITY;
    for (const AttentionKernels& kernels : attention_kernels()) {
      test::expect_poison_as_in_oracle(kernels.selected, inputs, type);
      SelectedArrays arrays(inputs, type, test::Strides::contiguous);
      run_selected(kernels.selected, inputs.problem, type, arrays);
      EXPECT_EQ(arrays.lse.values()[2], -INFINITY);
      EXPECT_EQ(arrays.out.values()[2], 0);
      EXPECT_EQ(arrays.dq.values()[2 * 2], 0);
    }
  }
}

/// The oracle's derivatives are those of its answer.
TEST(SelectedOracle, DerivativesAgreeWithDifferences) {
  const SelectedCase c{.name = "",
                       .queries = 2,
                       .keys = 5,
                       .heads = 4,
                       .key_heads = 2,
                       .slots = 7,
                       .head_dim = 3,
                       .value_dim = 2,
                       .lists = Lists::wild,
                       .sink = true};
  SelectedInputs inputs = selected_inputs(c, ElementType::float64);
  const auto loss = [&] {
    double sum = 0;
    const auto out = oracle::selected_attention<double>(inputs.problem).out;
    for (std::size_t i = 0; i < out.size(); ++i) sum += out[i] * inputs.dout[i];
    return sum;
  };
  const auto gradients = oracle::selected_backward(inputs.problem, inputs.dout);
  const auto expect_slopes = [&](std::vector<double>& values,
                                 const std::vector<double>& slopes) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double value = values[i], step = 1e-5;
      values[i] = value + step;
      const double above = loss();
      values[i] = value - step;
      const double below = loss();
      values[i] = value;
      EXPECT_NEAR((above - below) / (2 * step), slopes[i], 1e-8) << i;
    }
  };
  expect_slopes(inputs.problem.q, gradients.dq);
  expect_slopes(inputs.problem.kv, gradients.dkv);
}

}  // namespace
}  // namespace longspan
