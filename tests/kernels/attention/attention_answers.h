#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/kernels/attention/attention_cases.h"

/// What kernels answer, what they ought to, and how far apart the two may be.
namespace longspan::test {

using Values = std::vector<double>;

/// What a kernel computes, by name.
struct Answer {
  Values out, lse, dq, dk, dv;
};
inline constexpr std::array kParts{&Answer::out, &Answer::lse, &Answer::dq,
                                   &Answer::dk, &Answer::dv};
inline constexpr std::array kPartNames{"out", "lse", "dq", "dk", "dv"};

template <class T>
Answer slow_answer(const CaseInputs& inputs) {
  const auto as_double = [](const std::vector<T>& values) {
    return Values(values.begin(), values.end());
  };
  const auto forward = oracle::attention<T>(inputs.problem);
  const auto backward =
      oracle::attention_backward<T>(inputs.problem, inputs.dout);
  return {as_double(forward.out), as_double(forward.lse),
          as_double(backward.dq), as_double(backward.dk),
          as_double(backward.dv)};
}

inline AttentionArrays arrays_of(const CaseInputs& inputs, ElementType type,
                                 Strides strides = Strides::contiguous) {
  return {inputs.problem, inputs.dout, type, strides};
}

inline Answer answer_in(const AttentionArrays& arrays) {
  return {arrays.out.values(), arrays.lse.values(), arrays.dq.values(),
          arrays.dk.values(), arrays.dv.values()};
}

/// Both directions, one thread.
inline Answer kernel_answer(const AttentionKernels& kernels,
                            const CaseInputs& inputs, ElementType type) {
  AttentionArrays arrays = arrays_of(inputs, type);
  run_forward(kernels, inputs.problem, type, inputs.lines, arrays);
  run_backward(kernels, inputs.problem, type, inputs.lines, arrays);
  return answer_in(arrays);
}

inline double largest(const Values& values) {
  double result = 0;
  for (double value : values) {
    if (std::isfinite(value)) result = std::max(result, std::abs(value));
  }
  return result;
}

inline double largest_error(const Values& values, const Values& exact) {
  double result = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    if (!std::isfinite(exact[i])) continue;
    result = std::max(result, std::abs(values[i] - exact[i]));
  }
  return result;
}

/// Infinities and NaNs by place, the others within a tolerance.
inline void expect_near(const Values& values, const Values& exact,
                        double tolerance, const std::string& what) {
  ASSERT_EQ(values.size(), exact.size()) << what;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    if (std::isnan(exact[i])) {
      ASSERT_TRUE(std::isnan(values[i]))
          << what << " at " << i << " is " << values[i] << ", not NaN";
    } else if (std::isinf(exact[i])) {
      ASSERT_EQ(values[i], exact[i]) << what << " at " << i;
    } else {
      ASSERT_LE(std::abs(values[i] - exact[i]), tolerance)
          << what << " at " << i << " is " << values[i] << ", not " << exact[i];
    }
  }
}

/// How large the terms of a sum are whose result may cancel: dq and dk are sums
/// of products with dP - delta, and those two may be equal.
inline Answer sizes_of(const CaseInputs& inputs, const Answer& exact) {
  const oracle::AttentionProblem& p = inputs.problem;
  const auto root = [](int64_t n) { return std::sqrt(static_cast<double>(n)); };
  const double dscore = p.scale * root(p.value_dim);
  return {.out = {largest(exact.out)},
          .lse = {largest(exact.lse)},
          .dq = {std::max(largest(exact.dq), dscore * largest(p.k))},
          .dk = {std::max(largest(exact.dk),
                          dscore * largest(p.q) * root(p.queries))},
          .dv = {largest(exact.dv)}};
}

/// What a kernel multiplies values, queries and keys with.
enum class Weights { accumulated, bfloat16, float16 };

inline Weights weights_of(const AttentionKernels& kernels, ElementType type) {
  const bool pairs = kernels.name == "avx512_bf16" || kernels.name == "amx";
  return pairs && type == ElementType::bfloat16 ? Weights::bfloat16
                                                : Weights::accumulated;
}

/// Twice what a plain computation with such weights is off by, and a few last
/// bits of the largest terms where that is luckily exact; 1e-12 of those in
/// double.
inline Answer tolerances_of(const CaseInputs& inputs, const Answer& exact,
                            ElementType type,
                            Weights weights = Weights::accumulated) {
  Answer result;
  const bool in_double = type == ElementType::float64;
  CaseInputs rounded = inputs;
  if (weights == Weights::bfloat16) {
    rounded.problem.rounding = nearest_bfloat16;
  } else if (weights == Weights::float16) {
    rounded.problem.rounding = nearest_float16;
  }
  const Answer plain = in_double ? exact : slow_answer<float>(rounded);
  const Answer sizes = sizes_of(inputs, exact);
  for (auto part : kParts) {
    const double top = (sizes.*part)[0];
    const bool rounds = weights != Weights::accumulated && part != &Answer::lse;
    const double bit = !rounds ? std::numeric_limits<float>::epsilon()
                       : weights == Weights::bfloat16 ? 0x1p-10
                                                      : 0x1p-13;
    const double bits = 4 * bit * top;
    const double twice = 2 * largest_error(plain.*part, exact.*part);
    result.*
        part = {in_double ? 1e-12 * std::max(1.0, top) : std::max(twice, bits)};
  }
  return result;
}

inline void expect_answer(const Answer& answer, const Answer& exact,
                          const Answer& tolerances, const std::string& who) {
  for (std::size_t i = 0; i < kParts.size(); ++i) {
    expect_near(answer.*kParts[i], exact.*kParts[i], (tolerances.*kParts[i])[0],
                who + " " + kPartNames[i]);
  }
}

}  // namespace longspan::test
