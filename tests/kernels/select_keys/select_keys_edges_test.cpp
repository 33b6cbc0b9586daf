#include <gtest/gtest.h>

#include <algorithm>

#include "tests/kernels/attention/attention_answers.h"
#include "tests/kernels/select_keys/select_keys_cases.h"
#include "tests/support/property.h"

namespace longspan {
namespace {

using oracle::at;
using test::Selected;
using test::SelectionArrays;
using test::SelectionCase;
using Values = std::vector<double>;

constexpr std::array kTypes{ElementType::float32, ElementType::bfloat16,
                            ElementType::float16, ElementType::float64};

/// Each row of `selected` is the stable sort of its scores.
void expect_stable_sort(const Selected& selected, const Values& scores,
                        int64_t slots) {
  const int64_t queries = std::ssize(selected.indices) / slots;
  const int64_t keys = std::ssize(scores) / queries;
  for (int64_t i = 0; i < queries; ++i) {
    const Values row(scores.begin() + i * keys,
                     scores.begin() + (i + 1) * keys);
    const auto expected = oracle::best_keys(row, 0, keys, slots);
    ASSERT_EQ(std::vector<int32_t>(selected.indices.begin() + i * slots,
                                   selected.indices.begin() + (i + 1) * slots),
              expected);
  }
}

/// Numbers and what is none, in queries, keys and weights.
TEST(KeySelectionEdges, InfinitiesAndNaNsHaveTheirPlaces) {
  const SelectionCase c{.name = "poisoned",
                        .queries = 12,
                        .keys = 300,
                        .heads = 3,
                        .channels = 7,
                        .slots = 20};
  for (ElementType type : kTypes) {
    oracle::ScoreProblem p = problem_of(c, type);
    test::Random random(4);
    for (Values* values : {&p.q, &p.k, &p.weights}) {
      for (double& value : *values) {
        if (!random.one_in(30)) continue;
        value = random.pick<double>({NAN, -NAN, INFINITY, -INFINITY, 0, -0.0});
      }
    }
    const SelectionArrays arrays(c, type, p);
    for (const AttentionKernels& kernels : attention_kernels()) {
      SCOPED_TRACE(kernels.name);
      const Values all = score_all(kernels.selection, arrays).scores;
      for (int64_t i = 0; i < std::ssize(all); ++i) {
        const double exact =
            oracle::key_score<double>(p, 0, i / c.keys, i % c.keys);
        EXPECT_EQ(std::isnan(all[at(i)]), std::isnan(exact));
        if (std::isinf(exact)) {
          EXPECT_EQ(all[at(i)], exact);
        }
      }
      const Selected selected = select(kernels.selection, arrays, c.slots);
      expect_stable_sort(selected, all, c.slots);
      EXPECT_EQ(score(kernels.selection, arrays, c.slots, selected.indices),
                selected);
    }
  }
}

/// Weights of 0, and negative ones times products below the smallest number.
TEST(KeySelectionEdges, NoScoreIsMinusZero) {
  const SelectionCase c{.name = "zeros",
                        .queries = 4,
                        .keys = 40,
                        .heads = 1,
                        .channels = 3,
                        .slots = 40};
  for (ElementType type : kTypes) {
    for (double weight : {0.0, -0.0, -1e-30}) {
      oracle::ScoreProblem p = problem_of(c, type);
      for (double& value : p.q) value = test::rounded(type, value * 1e-4);
      for (double& value : p.k) value = test::rounded(type, value * 1e-4);
      std::ranges::fill(p.weights, weight);
      const SelectionArrays arrays(c, type, p);
      for (const AttentionKernels& kernels : attention_kernels()) {
        for (double score : score_all(kernels.selection, arrays).scores) {
          EXPECT_FALSE(score == 0 && std::signbit(score)) << kernels.name;
        }
      }
    }
  }
}

TEST(KeySelectionEdges, EqualScoresGoToTheLowerKeys) {
  const SelectionCase c{.name = "equal",
                        .queries = 3,
                        .keys = 5000,
                        .heads = 2,
                        .channels = 5,
                        .slots = 33};
  oracle::ScoreProblem p = problem_of(c, ElementType::float32);
  std::ranges::fill(p.weights, 0.0);
  const SelectionArrays arrays(c, ElementType::float32, p);
  for (const AttentionKernels& kernels : attention_kernels()) {
    const Selected selected = select(kernels.selection, arrays, c.slots);
    for (int64_t i = 0; i < c.queries * c.slots; ++i) {
      ASSERT_EQ(selected.indices[at(i)], i % c.slots) << kernels.name;
    }
  }
}

TEST(KeySelectionEdges, AMillionKeysAreAStableSort) {
  const SelectionCase c{.name = "million",
                        .queries = 1,
                        .keys = 1 << 20,
                        .heads = 1,
                        .channels = 2,
                        .slots = 2048};
  for (ElementType type : {ElementType::float32, ElementType::bfloat16}) {
    const SelectionArrays arrays(c, type);
    for (const AttentionKernels& kernels : attention_kernels()) {
      const Values all = score_all(kernels.selection, arrays).scores;
      expect_stable_sort(select(kernels.selection, arrays, c.slots), all,
                         c.slots);
    }
  }
}

/// Queries [begin, end) and keys from `key` on, as a problem of their own.
SelectionArrays part_of(const SelectionCase& c, ElementType type,
                        TokenRange queries, int64_t key) {
  const oracle::ScoreProblem whole = problem_of(c, type);
  oracle::ScoreProblem p = whole;
  p.queries = queries.size();
  p.keys = c.keys - key;
  const auto cut = [](const Values& from, int64_t begin, int64_t end) {
    return Values(from.begin() + begin, from.begin() + end);
  };
  const int64_t each = c.heads * c.channels;
  p.q = cut(whole.q, queries.begin * each, queries.end * each);
  p.weights =
      cut(whole.weights, queries.begin * c.heads, queries.end * c.heads);
  p.k = cut(whole.k, key * c.channels, c.keys * c.channels);
  SelectionCase small = c;
  small.queries = p.queries;
  small.keys = p.keys;
  return SelectionArrays(small, type, p);
}

TEST(KeySelectionEdges, AScoreHasTheSameBitsWhereverItsPairLies) {
  for (auto [heads, channels] :
       {std::pair<int64_t, int64_t>{1, 1}, {3, 7}, {8, 64}, {64, 33}}) {
    const SelectionCase c{.name = "parts",
                          .queries = 37,
                          .keys = 401,
                          .heads = heads,
                          .channels = channels,
                          .slots = 401};
    for (ElementType type : kTypes) {
      const SelectionArrays whole(c, type);
      for (const AttentionKernels& kernels : attention_kernels()) {
        SCOPED_TRACE(kernels.name);
        const Values all = select(kernels.selection, whole, c.keys).scores;
        for (auto [queries, key] : {std::pair{TokenRange{0, 37}, int64_t{5}},
                                    {TokenRange{13, 14}, 0},
                                    {TokenRange{20, 37}, 399},
                                    {TokenRange{1, 30}, 191}}) {
          const SelectionArrays part = part_of(c, type, queries, key);
          const int64_t keys = c.keys - key;
          const Values few = select(kernels.selection, part, keys).scores;
          for (int64_t i = 0; i < std::ssize(few); ++i) {
            ASSERT_EQ(
                few[at(i)],
                all[at((queries.begin + i / keys) * c.keys + key + i % keys)]);
          }
        }
      }
    }
  }
}

TEST(KeySelectionEdges, DerivativesAreThoseOfDifferences) {
  const SelectionCase c{.name = "differences",
                        .queries = 3,
                        .keys = 9,
                        .heads = 2,
                        .channels = 3,
                        .slots = 6};
  const std::vector<int32_t> lists{0, 3, 3, -1, 8, 5, 8, 7,  6,
                                   9, 1, 2, 4,  4, 4, 4, -1, -1};
  const oracle::ScoreProblem p = problem_of(c, ElementType::float64);
  std::mt19937_64 bits(9);
  const Values changes =
      test::normals(bits, ElementType::float64, std::ssize(lists));
  for (const AttentionKernels& kernels : attention_kernels()) {
    const auto total = [&](const oracle::ScoreProblem& problem) {
      const SelectionArrays arrays(c, ElementType::float64, problem);
      const Values scores =
          score(kernels.selection, arrays, c.slots, lists).scores;
      double sum = 0;
      for (std::size_t i = 0; i < lists.size(); ++i) {
        if (std::isfinite(scores[i])) sum += changes[i] * scores[i];
      }
      return sum;
    };
    const SelectionArrays arrays(c, ElementType::float64, p);
    const auto got =
        score_backward(kernels.selection, arrays, c.slots, lists, changes);
    const auto expect = [&](Values oracle::ScoreProblem::* part,
                            const Values& gradient) {
      for (std::size_t i = 0; i < gradient.size(); ++i) {
        constexpr double kStep = 1e-6;
        oracle::ScoreProblem more = p, less = p;
        (more.*part)[i] += kStep;
        (less.*part)[i] -= kStep;
        EXPECT_NEAR(gradient[i], (total(more) - total(less)) / (2 * kStep),
                    1e-6)
            << kernels.name;
      }
    };
    expect(&oracle::ScoreProblem::q, got.dq.values());
    expect(&oracle::ScoreProblem::k, got.dk.values());
    expect(&oracle::ScoreProblem::weights, got.dweights.values());
  }
}

/// Small integers, so that every sum is exact in every type: a head whose
/// product is NaN passes its gradient, as torch's relu does.
TEST(KeySelectionEdges, DerivativesPassWhereAProductIsNaN) {
  const SelectionCase c{.name = "poisoned",
                        .queries = 3,
                        .keys = 20,
                        .heads = 3,
                        .channels = 7,
                        .slots = 20};
  oracle::ScoreProblem p = problem_of(c, ElementType::float64);
  test::Random random(5);
  const auto whole = [&](Values& values) {
    for (double& value : values) value = random.pick<double>({-2, -1, 0, 1, 2});
  };
  for (Values* values : {&p.q, &p.k, &p.weights}) whole(*values);
  p.q[at(c.channels + 2)] = NAN;      // query 0, head 1
  p.k[at(5 * c.channels + 3)] = NAN;  // key 5
  std::vector<int32_t> lists;
  for (int64_t i = 0; i < c.queries * c.slots; ++i) {
    lists.push_back(i % c.slots == 5 && i > 2 * c.slots  // not of query 2
                        ? -1
                        : static_cast<int32_t>(i % c.slots));
  }
  Values changes(lists.size());
  whole(changes);
  const auto exact =
      oracle::key_score_gradients<double>(p, c.slots, lists, changes);
  const auto expect = [](const Values& got, const Values& wanted) {
    ASSERT_EQ(got.size(), wanted.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      if (std::isnan(wanted[i])) {
        EXPECT_TRUE(std::isnan(got[i])) << i;
      } else {
        EXPECT_EQ(got[i], wanted[i]) << i;
      }
    }
  };
  for (ElementType type : kTypes) {
    const SelectionArrays arrays(c, type, p);
    for (const AttentionKernels& kernels : attention_kernels()) {
      SCOPED_TRACE(kernels.name);
      const auto got =
          score_backward(kernels.selection, arrays, c.slots, lists, changes);
      expect(got.dq.values(), exact.dq);
      expect(got.dk.values(), exact.dk);
      expect(got.dweights.values(), exact.dweights);
    }
  }
}

/// Keys of a list may be anywhere in several groups, which are met in rounds.
TEST(KeySelectionEdges, DerivativesOfManyRoundsAreAdded) {
  const SelectionCase c{.name = "rounds",
                        .queries = 40,
                        .keys = 1500,
                        .heads = 2,
                        .channels = 7,
                        .slots = 300};
  test::Random random(8);
  std::vector<int32_t> lists;
  for (int64_t i = 0; i < c.queries * c.slots; ++i) {
    lists.push_back(static_cast<int32_t>(random.between(-20, c.keys + 20)));
  }
  std::mt19937_64 bits(5);
  const Values changes =
      test::normals(bits, ElementType::float64, std::ssize(lists));
  const SelectionArrays arrays(c, ElementType::float64);
  auto exact = oracle::key_score_gradients<double>(arrays.problem, c.slots,
                                                   lists, changes);
  for (double& value : exact.dk) value += 2;
  for (const AttentionKernels& kernels : attention_kernels()) {
    const auto run = [&](int64_t threads) {
      return score_backward(kernels.selection, arrays, c.slots, lists, changes,
                            test::Strides::contiguous, on_threads(threads), 2);
    };
    const auto one = run(1), several = run(5);
    test::expect_near(one.dq.values(), exact.dq, 1e-10, "dq");
    test::expect_near(one.dk.values(), exact.dk, 1e-10, "dk");
    test::expect_near(one.dweights.values(), exact.dweights, 1e-10, "dweights");
    EXPECT_EQ(one.dk.bytes(), several.dk.bytes());
    EXPECT_EQ(one.dq.bytes(), several.dq.bytes());
  }
}

}  // namespace
}  // namespace longspan
