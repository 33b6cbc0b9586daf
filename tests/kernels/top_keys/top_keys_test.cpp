#include <gtest/gtest.h>

#include <functional>

#include "tests/kernels/select_keys/select_keys_cases.h"
#include "tests/support/property.h"

namespace longspan {
namespace {

using oracle::at;

/// A row of scores, by its number of keys.
struct RowKind {
  const char* name;
  std::function<double(test::Random&, int64_t key, int64_t keys)> score;
};

double uniform(test::Random& random) {
  return static_cast<double>(random.between(-1'000'000, 1'000'000)) / 7;
}

const std::vector<RowKind>& row_kinds() {
  static const std::vector<RowKind> kinds{
      {"random", [](auto& random, auto, auto) { return uniform(random); }},
      {"all_equal", [](auto&, auto, auto) { return 3.25; }},
      {"all_zero", [](auto&, auto, auto) { return 0.0; }},
      {"all_nan", [](auto&, auto, auto) { return NAN; }},
      {"all_minus_inf", [](auto&, auto, auto) { return -INFINITY; }},
      {"all_but_one_equal",
       [](auto&, int64_t key, int64_t keys) {
         return key == keys * 2 / 3 ? 1.0 : -1.0;
       }},
      {"all_but_one_equal_and_that_lower",
       [](auto&, int64_t key, int64_t keys) {
         return key == keys / 3 ? -2.0 : -1.0;
       }},
      {"zeros_of_both_signs",
       [](auto& random, auto, auto) { return random.one_in(2) ? 0.0 : -0.0; }},
      {"zeros_and_few_others",
       [](auto& random, auto, auto) {
         return random.one_in(20)  ? uniform(random)
                : random.one_in(2) ? 0.0
                                   : -0.0;
       }},
      {"few_values",
       [](auto& random, auto, auto) {
         return static_cast<double>(random.between(-2, 2));
       }},
      {"infinities_and_nans",
       [](auto& random, auto, auto) {
         return random.template pick<double>({NAN, -NAN, INFINITY, -INFINITY,
                                              0.0, -0.0, 1.0, -1.0, 1e-40,
                                              -1e-40});
       }},
      {"ascending", [](auto&, int64_t key, auto) { return key / 3.0; }},
      {"descending", [](auto&, int64_t key, auto) { return -key / 3.0; }},
      {"ascending_bits",
       [](auto&, int64_t key, auto) { return 1 + std::ldexp(key, -20); }},
  };
  return kinds;
}

template <class T>
std::vector<int32_t> top_keys(const AttentionKernels& kernels,
                              const std::vector<T>& scores, int64_t queries,
                              int64_t stride, int64_t keys, int64_t slots,
                              const std::vector<int32_t>& start,
                              const std::vector<int32_t>& end,
                              const ParallelFor& parallel_for = serial_for) {
  std::vector<int32_t> indices(at(queries * slots), test::kUnwritten);
  TopKeysArgs args;
  args.type = sizeof(T) == 8 ? ElementType::float64 : ElementType::float32;
  args.queries = queries;
  args.keys = keys;
  args.slots = slots;
  args.scores = scores.data();
  args.stride = stride;
  if (!start.empty()) {
    args.start = start.data();
    args.end = end.data();
  }
  args.indices = indices.data();
  kernels.selection.top_keys(args, parallel_for);
  return indices;
}

template <class T>
std::vector<T> row_of(const RowKind& kind, test::Random& random, int64_t keys) {
  std::vector<T> row;
  for (int64_t key = 0; key < keys; ++key) {
    row.push_back(static_cast<T>(kind.score(random, key, keys)));
  }
  return row;
}

template <class T>
void expect_stable_sort(const RowKind& kind, int64_t keys, int64_t slots) {
  SCOPED_TRACE(std::string(kind.name) + ", " + std::to_string(slots) + " of " +
               std::to_string(keys));
  test::Random random(static_cast<uint64_t>(keys + slots));
  const std::vector<T> row = row_of<T>(kind, random, keys);
  const auto expected = oracle::best_keys(row, 0, keys, slots);
  for (const AttentionKernels& kernels : attention_kernels()) {
    EXPECT_EQ(top_keys(kernels, row, 1, keys, keys, slots, {}, {}), expected)
        << kernels.name;
  }
}

TEST(TopKeys, AreAStableSort) {
  for (const RowKind& kind : row_kinds()) {
    for (int64_t keys : {0, 1, 2, 15, 16, 17, 33, 511, 512, 513}) {
      for (int64_t slots : {1, 2, 16, 17, 100, 600}) {
        expect_stable_sort<float>(kind, keys, slots);
        expect_stable_sort<double>(kind, keys, slots);
      }
    }
  }
}

/// Enough for candidates to be sorted out several times.
TEST(TopKeys, OfLongRowsAreAStableSort) {
  for (const RowKind& kind : row_kinds()) {
    for (auto [keys, slots] : {std::pair<int64_t, int64_t>{9000, 1},
                               {9001, 7},
                               {12000, 300},
                               {30011, 2048},
                               {30000, 12000}}) {
      expect_stable_sort<float>(kind, keys, slots);
      expect_stable_sort<double>(kind, keys, slots);
    }
  }
}

TEST(TopKeys, OfAMillionAreAStableSort) {
  for (const RowKind& kind : row_kinds()) {
    const std::string name = kind.name;
    if (name == "random" || name == "ascending" || name == "all_zero") {
      expect_stable_sort<float>(kind, 1 << 20, 2048);
    }
  }
}

TEST(TopKeys, StayInsideTheirWindows) {
  constexpr int32_t kLow = std::numeric_limits<int32_t>::min();
  constexpr int32_t kHigh = std::numeric_limits<int32_t>::max();
  const std::vector<int32_t> start{0,  3, 50, 10,   20, 20, 20,
                                   20, 0, 99, kLow, 7,  -3, kHigh};
  const std::vector<int32_t> end{100, 3, 40,  11,    24,  25, 26,
                                 30,  2, 100, kHigh, 400, 9,  kLow};
  const int64_t queries = std::ssize(start), keys = 100, stride = 113;
  const int64_t slots = 5;
  for (const RowKind& kind : row_kinds()) {
    test::Random random(1);
    std::vector<float> scores;
    std::vector<int32_t> expected;
    for (int64_t i = 0; i < queries; ++i) {
      std::vector<float> row = row_of<float>(kind, random, keys);
      const auto list = oracle::best_keys(row, start[at(i)], end[at(i)], slots);
      expected.insert(expected.end(), list.begin(), list.end());
      row.resize(at(stride), NAN);  // a gap that wins if anybody looks
      scores.insert(scores.end(), row.begin(), row.end());
    }
    for (const AttentionKernels& kernels : attention_kernels()) {
      for (int64_t threads : {1, 2, 5}) {
        EXPECT_EQ(top_keys(kernels, scores, queries, stride, keys, slots, start,
                           end, on_threads(threads)),
                  expected)
            << kernels.name << " " << kind.name;
      }
    }
  }
}

TEST(TopKeys, OfNoSlotsWriteNothing) {
  for (const AttentionKernels& kernels : attention_kernels()) {
    EXPECT_TRUE(
        top_keys(kernels, std::vector<float>(9), 1, 9, 9, 0, {}, {}).empty());
  }
}

}  // namespace
}  // namespace longspan
