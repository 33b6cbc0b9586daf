#include <gtest/gtest.h>

#include "longspan/kernels/common/cpu/bf16/tile_engine.h"
#include "longspan/kernels/select_keys/cpu/pairs.h"
#include "tests/kernels/attention/attention_answers.h"
#include "tests/kernels/common/emulated_tiles.h"
#include "tests/kernels/select_keys/select_keys_cases.h"

/// The scores that AMX computes, on emulated tiles.
namespace longspan {

extern const KeyScoreSteps kEmulatedScores;
extern const KeySelectionSteps kEmulatedSelection;

const KeyScoreSteps kEmulatedScores =
    key_score_steps<PairOperands<TileEngine<test::EmulatedTiles>>>();
const KeySelectionSteps kEmulatedSelection = {
    .score = {}, .top = {top_key_steps<float>(), top_key_steps<double>()}};

namespace {

using oracle::at;
using test::Selected;
using test::SelectionArrays;
using test::SelectionCase;
using Values = std::vector<double>;

constexpr auto kType = ElementType::bfloat16;

const KeySelectionKernels& emulated() {
  static const KeySelectionKernels kernels =
      selection_kernels<kEmulatedSelection, &kEmulatedScores>();
  return kernels;
}

class TileSelection : public ::testing::TestWithParam<SelectionCase> {};

INSTANTIATE_TEST_SUITE_P(Cases, TileSelection,
                         ::testing::ValuesIn(test::selection_cases()),
                         [](const auto& info) { return info.param.name; });

/// Tiles are set up on the thread that uses them.
TEST_P(TileSelection, IsAStableSortOfItsOwnScores) {
  const SelectionCase& c = GetParam();
  const SelectionArrays arrays(c, kType);
  const Values all = score_all(emulated(), arrays).scores;
  for (int64_t threads : {1, 3}) {
    const Selected selected =
        select(emulated(), arrays, c.slots, on_threads(threads));
    EXPECT_EQ(score(emulated(), arrays, c.slots, selected.indices), selected);
    const std::vector<int32_t> start = starts_of(c), end = ends_of(c);
    for (int64_t i = 0; i < c.rows * c.queries; ++i) {
      const Values row(all.begin() + i * c.keys,
                       all.begin() + (i + 1) * c.keys);
      const auto expected = oracle::best_keys(row, start[at(i % c.queries)],
                                              end[at(i % c.queries)], c.slots);
      EXPECT_EQ(
          std::vector<int32_t>(selected.indices.begin() + i * c.slots,
                               selected.indices.begin() + (i + 1) * c.slots),
          expected);
    }
  }
}

TEST_P(TileSelection, IsAsExactAsAPlainComputation) {
  const SelectionCase& c = GetParam();
  const SelectionArrays arrays(c, kType);
  const Values all = score_all(emulated(), arrays).scores;
  const double bit = std::numeric_limits<float>::epsilon();
  double off = 0, size = 1;
  Values exact;
  for (int64_t i = 0; i < std::ssize(all); ++i) {
    const int64_t query = i / c.keys, key = i % c.keys;
    const int64_t row = query / c.queries;
    exact.push_back(
        oracle::key_score<double>(arrays.problem, row, query % c.queries, key));
    const double plain =
        oracle::key_score<float>(arrays.problem, row, query % c.queries, key);
    off = std::max(off, std::abs(plain - exact.back()));
    size = std::max(size, std::abs(exact.back()));
  }
  test::expect_near(all, exact, std::max(2 * off, 16 * bit * size), "scores");

  std::vector<int32_t> lists;
  for (int64_t i = 0; i < c.rows * c.queries * c.slots; ++i) {
    lists.push_back(static_cast<int32_t>(i * 7 % (c.keys + 2)) - 1);
  }
  std::mt19937_64 bits(5);
  const Values changes =
      test::normals(bits, ElementType::float32, std::ssize(lists));
  const auto good = oracle::key_score_gradients<double>(arrays.problem, c.slots,
                                                        lists, changes);
  const auto got = score_backward(emulated(), arrays, c.slots, lists, changes,
                                  c.strides, on_threads(3));
  const auto expect = [&](const test::Array& array, const Values& values) {
    test::expect_near(array.values(), values,
                      64 * bit * std::max(1.0, test::largest(values)),
                      "gradient");
  };
  expect(got.dq, good.dq);
  expect(got.dk, good.dk);
  expect(got.dweights, good.dweights);
}

}  // namespace
}  // namespace longspan
