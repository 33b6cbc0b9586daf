#include "longspan/kernels/select_keys/select_keys.h"

#include <gtest/gtest.h>

#include "tests/kernels/attention/attention_answers.h"
#include "tests/kernels/select_keys/select_keys_cases.h"
#include "tests/support/property.h"

namespace longspan {
namespace {

using oracle::at;
using test::Selected;
using test::SelectionArrays;
using test::SelectionCase;
using test::Strides;
using Values = std::vector<double>;

constexpr std::array kTypes{ElementType::float32, ElementType::bfloat16,
                            ElementType::float16, ElementType::float64};

class KeySelection : public ::testing::TestWithParam<SelectionCase> {};

INSTANTIATE_TEST_SUITE_P(Cases, KeySelection,
                         ::testing::ValuesIn(test::selection_cases()),
                         [](const auto& info) { return info.param.name; });

/// What `select` must answer, of scores of all keys.
Selected expected_of(const SelectionCase& c, const Values& scores) {
  const std::vector<int32_t> start = starts_of(c), end = ends_of(c);
  Selected expected;
  for (int64_t i = 0; i < c.rows * c.queries; ++i) {
    const Values row(scores.begin() + i * c.keys,
                     scores.begin() + (i + 1) * c.keys);
    const auto list = oracle::best_keys(row, start[at(i % c.queries)],
                                        end[at(i % c.queries)], c.slots);
    for (int32_t key : list) {
      expected.indices.push_back(key);
      expected.scores.push_back(key < 0 ? -INFINITY : row[at(key)]);
    }
  }
  return expected;
}

TEST_P(KeySelection, IsAStableSortOfTheKernelsOwnScores) {
  const SelectionCase& c = GetParam();
  for (ElementType type : kTypes) {
    for (const AttentionKernels& kernels : attention_kernels()) {
      SCOPED_TRACE(std::string(kernels.name) + " " +
                   std::to_string(static_cast<int>(type)));
      const SelectionArrays arrays(c, type);
      const Values all = score_all(kernels.selection, arrays).scores;
      const Selected expected = expected_of(c, all);
      const Selected selected = select(kernels.selection, arrays, c.slots);
      EXPECT_EQ(selected.indices, expected.indices);
      EXPECT_EQ(selected.scores, expected.scores);
      EXPECT_EQ(
          select(kernels.selection, arrays, c.slots, serial_for, false).indices,
          expected.indices);
      EXPECT_EQ(score(kernels.selection, arrays, c.slots, selected.indices),
                selected);
    }
  }
}

/// Twice what a plain computation is off by, and a few last bits of the largest
/// terms.
double tolerance_of(const Values& plain, const Values& exact, double size) {
  return std::max(2 * test::largest_error(plain, exact),
                  8 * double{std::numeric_limits<float>::epsilon()} * size);
}

template <class T>
Values plain_scores(const oracle::ScoreProblem& p) {
  Values scores;
  for (int64_t i = 0; i < p.rows * p.queries; ++i) {
    for (int64_t key = 0; key < p.keys; ++key) {
      scores.push_back(
          oracle::key_score<T>(p, i / p.queries, i % p.queries, key));
    }
  }
  return scores;
}

TEST_P(KeySelection, ScoresAreAsExactAsAPlainComputation) {
  const SelectionCase& c = GetParam();
  for (ElementType type : kTypes) {
    const SelectionArrays arrays(c, type);
    const Values exact = plain_scores<double>(arrays.problem);
    const bool in_double = type == ElementType::float64;
    const double size =
        std::sqrt(static_cast<double>(c.channels * c.heads)) * 4;
    const double tolerance =
        in_double
            ? 1e-12 * size
            : tolerance_of(plain_scores<float>(arrays.problem), exact, size);
    for (const AttentionKernels& kernels : attention_kernels()) {
      test::expect_near(score_all(kernels.selection, arrays).scores, exact,
                        tolerance, std::string(kernels.name));
    }
  }
}

TEST_P(KeySelection, GivesTheSameBitsOnAnyNumberOfThreads) {
  const SelectionCase& c = GetParam();
  for (ElementType type : {ElementType::float32, ElementType::bfloat16}) {
    const SelectionArrays arrays(c, type);
    for (const AttentionKernels& kernels : attention_kernels()) {
      const Selected one = select(kernels.selection, arrays, c.slots);
      for (int64_t threads : {2, 5}) {
        EXPECT_EQ(
            select(kernels.selection, arrays, c.slots, on_threads(threads)),
            one);
        EXPECT_EQ(score(kernels.selection, arrays, c.slots, one.indices,
                        on_threads(threads)),
                  one);
      }
    }
  }
}

/// Lists with everything that may be in one: wild indices, keys twice, no
/// order.
std::vector<int32_t> wild_lists(const SelectionCase& c, int64_t slots) {
  test::Random random(3);
  std::vector<int32_t> lists;
  for (int64_t i = 0; i < c.rows * c.queries * slots; ++i) {
    const auto keys = static_cast<int32_t>(c.keys);
    lists.push_back(
        random.one_in(4)
            ? random.pick<int32_t>({-1, std::numeric_limits<int32_t>::min(),
                                    std::numeric_limits<int32_t>::max(), keys,
                                    keys + 1})
            : static_cast<int32_t>(random.between(0, c.keys)));
  }
  return lists;
}

struct GradientCheck {
  Values dq, dk, dweights;
  template <class T>
  static GradientCheck of(const oracle::ScoreGradients<T>& d) {
    return {Values(d.dq.begin(), d.dq.end()), Values(d.dk.begin(), d.dk.end()),
            Values(d.dweights.begin(), d.dweights.end())};
  }
};

TEST_P(KeySelection, DerivativesAreAsExactAsAPlainComputation) {
  const SelectionCase& c = GetParam();
  const int64_t slots = c.slots == 0 ? 0 : c.slots + 3;
  const std::vector<int32_t> lists = wild_lists(c, slots);
  for (ElementType type : kTypes) {
    const SelectionArrays arrays(c, type);
    std::mt19937_64 bits(5);
    Values changes =
        test::normals(bits, test::accumulation(type), std::ssize(lists));
    for (std::size_t i = 0; i < lists.size(); ++i) {
      if (lists[i] < 0 || lists[i] >= c.keys)
        changes[i] = i % 2 ? NAN : INFINITY;
    }
    const auto check = [&]<class T>(T) {
      return GradientCheck::of(oracle::key_score_gradients<T>(
          arrays.problem, slots, lists, changes));
    };
    const GradientCheck exact = check(double{}), plain = check(float{});
    for (const AttentionKernels& kernels : attention_kernels()) {
      const auto got = score_backward(kernels.selection, arrays, slots, lists,
                                      changes, c.strides);
      const auto expect = [&](const test::Array& array, const Values& good,
                              const Values& usual, const char* what) {
        const double size = test::largest(good);
        test::expect_near(array.values(), good,
                          type == ElementType::float64
                              ? 1e-12 * std::max(1.0, size)
                              : tolerance_of(usual, good, size),
                          std::string(kernels.name) + " " + what);
        EXPECT_TRUE(array.gaps_kept());
      };
      expect(got.dq, exact.dq, plain.dq, "dq");
      expect(got.dk, exact.dk, plain.dk, "dk");
      expect(got.dweights, exact.dweights, plain.dweights, "dweights");
    }
  }
}

TEST_P(KeySelection, DerivativesHaveTheSameBitsOnAnyNumberOfThreads) {
  const SelectionCase& c = GetParam();
  const std::vector<int32_t> lists = wild_lists(c, c.slots);
  std::mt19937_64 bits(5);
  for (ElementType type : {ElementType::float32, ElementType::bfloat16}) {
    const SelectionArrays arrays(c, type);
    const Values changes =
        test::normals(bits, test::accumulation(type), std::ssize(lists));
    for (const AttentionKernels& kernels : attention_kernels()) {
      const auto run = [&](int64_t threads) {
        return score_backward(kernels.selection, arrays, c.slots, lists,
                              changes, c.strides, on_threads(threads));
      };
      const auto one = run(1);
      for (int64_t threads : {2, 5}) {
        const auto several = run(threads);
        EXPECT_EQ(several.dq.bytes(), one.dq.bytes());
        EXPECT_EQ(several.dk.bytes(), one.dk.bytes());
        EXPECT_EQ(several.dweights.bytes(), one.dweights.bytes());
      }
    }
  }
}

}  // namespace
}  // namespace longspan
