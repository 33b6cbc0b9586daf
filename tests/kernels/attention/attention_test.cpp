#include "longspan/kernels/common/threads.h"
#include "longspan/kernels/levels/levels.h"

#include <gtest/gtest.h>

#include "tests/kernels/attention/attention_answers.h"
#include "tests/support/property.h"

namespace longspan {
namespace {

using test::Answer;
using test::AttentionArrays;
using test::AttentionCase;
using test::CaseInputs;
using test::inputs_of;
using test::Strides;
using test::Weights;

constexpr std::array kTypes{ElementType::float32, ElementType::bfloat16,
                            ElementType::float16, ElementType::float64};
constexpr std::array kTypeNames{"float32", "bfloat16", "float16", "float64"};

class Attention : public ::testing::TestWithParam<AttentionCase> {};

INSTANTIATE_TEST_SUITE_P(Cases, Attention,
                         ::testing::ValuesIn(test::attention_cases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(Attention, IsAsExactAsAPlainComputationInEveryTypeAndKernel) {
  const AttentionCase& c = GetParam();
  for (ElementType type : kTypes) {
    const CaseInputs inputs = inputs_of(c, type);
    const Answer exact = slow_answer<double>(inputs);
    const Answer tolerances = tolerances_of(inputs, exact, type);
    const Answer of_rounded =
        tolerances_of(inputs, exact, type, Weights::bfloat16);
    for (const AttentionKernels& kernels : attention_kernels()) {
      AttentionArrays arrays = arrays_of(inputs, type, c.strides);
      run_forward(kernels, inputs.problem, type, inputs.lines, arrays);
      run_backward(kernels, inputs.problem, type, inputs.lines, arrays);
      const std::string who = std::string(kernels.name) + " " +
                              kTypeNames[static_cast<std::size_t>(type)];
      const bool rounds = test::weights_of(kernels, type) == Weights::bfloat16;
      expect_answer(answer_in(arrays), exact, rounds ? of_rounded : tolerances,
                    who);
      for (const test::Array* written :
           {&arrays.out, &arrays.lse, &arrays.dq, &arrays.dk, &arrays.dv}) {
        EXPECT_TRUE(written->gaps_kept()) << who;
      }
    }
  }
}

/// The lines, of keys [keys.begin, keys.end) only.
std::vector<KeyLines> restricted(std::vector<KeyLines> lines, TokenRange keys) {
  for (KeyLines& line : lines) {
    for (int64_t* bound :
         {&line.begin_min, &line.begin_max, &line.end_min, &line.end_max}) {
      *bound = std::clamp(*bound, keys.begin, keys.end);
    }
  }
  return lines;
}

TEST_P(Attention, OverHalvesOfTheKeysMergesToTheWhole) {
  for (ElementType type : {ElementType::float32, ElementType::bfloat16}) {
    const CaseInputs inputs = inputs_of(GetParam(), type);
    const Answer exact = slow_answer<double>(inputs);
    const int64_t keys = inputs.problem.keys, middle = keys / 3;
    for (const AttentionKernels& kernels : attention_kernels()) {
      const Answer tolerances =
          tolerances_of(inputs, exact, type, test::weights_of(kernels, type));
      AttentionArrays arrays = arrays_of(inputs, type);
      const auto both_halves = [&](auto run) {
        for (TokenRange half : {TokenRange{middle, keys}, {0, middle}}) {
          run(kernels, inputs.problem, type, restricted(inputs.lines, half),
              arrays, serial_for);
        }
      };
      both_halves(test::run_forward);
      both_halves(test::run_backward);
      expect_answer(answer_in(arrays), exact, tolerances,
                    std::string(kernels.name));
    }
  }
}

void expect_same_bits_on_threads(const AttentionCase& c, ElementType type,
                                 std::span<const AttentionKernels> tested) {
  const CaseInputs inputs = inputs_of(c, type);
  for (const AttentionKernels& kernels : tested) {
    std::vector<AttentionArrays> results;
    for (int64_t threads : {1, 2, 3, 7}) {
      AttentionArrays& arrays = results.emplace_back(arrays_of(inputs, type));
      run_forward(kernels, inputs.problem, type, inputs.lines, arrays,
                  on_threads(threads));
      run_backward(kernels, inputs.problem, type, inputs.lines, arrays,
                   on_threads(threads));
      const AttentionArrays& first = results.front();
      const auto same = [](const test::Array& a, const test::Array& b) {
        return a.bytes() == b.bytes();
      };
      EXPECT_TRUE(same(arrays.out, first.out)) << kernels.name << threads;
      EXPECT_TRUE(same(arrays.lse, first.lse)) << kernels.name << threads;
      EXPECT_TRUE(same(arrays.dq, first.dq)) << kernels.name << threads;
      EXPECT_TRUE(same(arrays.dk, first.dk)) << kernels.name << threads;
      EXPECT_TRUE(same(arrays.dv, first.dv)) << kernels.name << threads;
    }
  }
}

TEST_P(Attention, GivesTheSameBitsOnAnyNumberOfThreads) {
  for (ElementType type : {ElementType::float32, ElementType::bfloat16}) {
    expect_same_bits_on_threads(GetParam(), type, attention_kernels());
  }
}

/// Enough (head, query block) pairs and keys for four parts, which meet four
/// groups of keys in four rounds. Rounds are the same for all kernels, so one
/// kernel is enough.
AttentionCase several_rounds() {
  return {.name = "several_rounds",
          .queries = 500,
          .keys = 1100,
          .heads = 4,
          .heads_per_key_head = 4,
          .head_dim = 8,
          .value_dim = 8,
          .lines = {test::causal({0, 200}, {0, 600}, 300),
                    test::band({200, 500}, {100, 1100}, 600, 700)}};
}

TEST(AttentionRounds, GiveTheSameBitsOnAnyNumberOfThreads) {
  for (ElementType type : {ElementType::float64, ElementType::bfloat16}) {
    expect_same_bits_on_threads(several_rounds(), type,
                                attention_kernels().last(1));
  }
}

TEST(AttentionRounds, AreAsExactAsAPlainComputation) {
  const AttentionKernels& kernels = attention_kernels().back();
  for (ElementType type : {ElementType::float64, ElementType::bfloat16}) {
    const CaseInputs inputs = inputs_of(several_rounds(), type);
    const Answer exact = slow_answer<double>(inputs);
    const Answer tolerances =
        tolerances_of(inputs, exact, type, test::weights_of(kernels, type));
    expect_answer(kernel_answer(kernels, inputs, type), exact, tolerances, "");
  }
}

/// Shapes and lines that nobody thought of. Lines that share queries have
/// different thirds of the keys.
AttentionCase random_case(test::Random& random) {
  AttentionCase c{
      .name = "random",
      .rows = random.between(1, 2),
      .queries = random.between(1, 150),
      .keys = random.between(3, 200),
      .heads = random.between(1, 6),
      .heads_per_key_head = random.between(1, 5),
      .head_dim = random.between(1, 20),
      .value_dim = random.between(1, 40),
      .softcap = random.one_in(3) ? 3.0 : 0.0,
      .strides = random.one_in(2) ? Strides::gapped : Strides::contiguous,
      .lines = {}};
  c.head_offset = random.between(0, c.heads_per_key_head - 1);
  for (int64_t third = 0; third < 3; ++third) {
    const TokenRange keys{c.keys * third / 3, c.keys * (third + 1) / 3};
    for (int64_t query = 0; query < c.queries;) {
      query += random.between(0, 20);
      const int64_t end = std::min(c.queries, query + random.between(1, 100));
      if (query >= end) break;
      c.lines.push_back(test::band({query, end}, keys,
                                   random.between(-100, 100),
                                   random.between(1, 200)));
      query = end;
    }
  }
  std::ranges::stable_sort(
      c.lines, {}, [](const KeyLines& line) { return line.queries.begin; });
  return c;
}

TEST(AttentionRandom, ShapesAndLinesGiveTheOraclesAnswer) {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE(seed);
    test::Random random(seed);
    const AttentionCase c = random_case(random);
    for (ElementType type : {ElementType::float64, ElementType::bfloat16}) {
      const CaseInputs inputs = inputs_of(c, type);
      const Answer exact = slow_answer<double>(inputs);
      for (const AttentionKernels& kernels : attention_kernels()) {
        const Answer tolerances =
            tolerances_of(inputs, exact, type, test::weights_of(kernels, type));
        AttentionArrays arrays = arrays_of(inputs, type, c.strides);
        run_forward(kernels, inputs.problem, type, inputs.lines, arrays);
        run_backward(kernels, inputs.problem, type, inputs.lines, arrays);
        expect_answer(answer_in(arrays), exact, tolerances,
                      std::string(kernels.name));
      }
    }
  }
}

}  // namespace
}  // namespace longspan
