#pragma once

#include <gtest/gtest.h>

#include <span>

#include "tests/kernels/attention/attention_answers.h"

/// Infinities and NaNs in one element of an input.
namespace longspan::test {

/// A poisoned element: which array, which token, head and channel.
struct Poison {
  std::string name;
  Values oracle::AttentionProblem::* array;  // nullptr is dout
  int64_t token, head, channel;
  double value;
};

inline std::vector<Poison> poisons() {
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
inline AttentionCase poisoned_case() {
  return {
      .name = "poisoned",
      .queries = 70,
      .keys = 70,
      .heads = 2,
      .heads_per_key_head = 2,
      .head_dim = 8,
      .value_dim = 8,
      .lines = {band({0, 30}, {0, 30}, 0, 7), band({30, 64}, {30, 70}, 1, 12),
                all_of({66, 70}, {66, 70})}};
}

/// poisoned_case with so many heads that several blocks of queries, some of
/// them poisoned, share their keys.
inline AttentionCase wide_poisoned_case() {
  AttentionCase c = poisoned_case();
  c.name = "wide_poisoned";
  c.heads = c.heads_per_key_head = 66;
  return c;
}

inline CaseInputs poisoned_inputs(const AttentionCase& c, const Poison& poison,
                                  ElementType type) {
  CaseInputs inputs = inputs_of(c, type);
  oracle::AttentionProblem& p = inputs.problem;
  Values& array = poison.array == nullptr ? inputs.dout : p.*poison.array;
  const bool of_key = poison.name == "k" || poison.name == "v";
  const int64_t heads = of_key ? p.key_heads() : p.heads;
  const int64_t place = (poison.token * heads + poison.head) * 8;
  array[static_cast<std::size_t>(place + poison.channel)] = poison.value;
  return inputs;
}

inline void expect_poison_reaches_those_who_see_it(
    const AttentionCase& c, std::span<const AttentionKernels> tested,
    ElementType type) {
  for (const Poison& poison : poisons()) {
    const CaseInputs inputs = poisoned_inputs(c, poison, type);
    const Answer exact = slow_answer<double>(inputs);
    for (const AttentionKernels& kernels : tested) {
      const bool rounds = weights_of(kernels, type) == Weights::bfloat16;
      const double tolerance = rounds                         ? 1.0 / 16
                               : type == ElementType::float64 ? 1e-12
                                                              : 1e-5;
      const Answer tolerances{
          {tolerance}, {tolerance}, {tolerance}, {tolerance}, {tolerance}};
      expect_answer(kernel_answer(kernels, inputs, type), exact, tolerances,
                    std::string(kernels.name) + " " + poison.name + " " +
                        std::to_string(poison.token) + " " +
                        std::to_string(poison.value));
    }
  }
}

}  // namespace longspan::test
