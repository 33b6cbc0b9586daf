#include <gtest/gtest.h>

#include <thread>

#include "longspan/kernels/attend_selected/cpu/bf16/backward.h"
#include "longspan/kernels/common/cpu/bf16/tile_engine.h"
#include "tests/kernels/attend_selected/attend_selected_cases.h"
#include "tests/kernels/common/emulated_tiles.h"

/// Attention to listed keys as AMX runs it, on emulated tiles.
namespace longspan {
namespace {

using test::SelectedArrays;
using test::SelectedCase;
using test::SelectedInputs;
using test::SelectedResult;

constexpr ElementType kType = ElementType::bfloat16;
constexpr SelectedSteps kEmulated =
    selected_pair_steps<TileEngine<test::EmulatedTiles>>();
constexpr SelectedAttentionKernels kEmulatedKernels = {
    .forward =
        [](const SelectedForwardArgs& args, const ParallelFor& parallel_for) {
          run_selected_forward(kEmulated, args, parallel_for);
        },
    .backward =
        [](const SelectedBackwardArgs& args, const ParallelFor& parallel_for) {
          run_selected_backward(kEmulated, args, parallel_for);
        },
    .weights =
        [](const SelectedWeightsArgs& args, const ParallelFor& parallel_for) {
          run_selected_weights(kEmulated, args, parallel_for);
        }};

class TileSelected : public ::testing::TestWithParam<SelectedCase> {};

INSTANTIATE_TEST_SUITE_P(Cases, TileSelected,
                         ::testing::ValuesIn(test::selected_cases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(TileSelected, IsAsExactAsAPlainComputation) {
  const SelectedCase& c = GetParam();
  const SelectedInputs inputs = selected_inputs(c, kType);
  const SelectedResult exact = test::slow_result<double>(inputs);
  SelectedArrays arrays(inputs, kType, c.strides);
  run_selected(kEmulatedKernels, inputs.problem, kType, arrays);
  expect_result(result_in(arrays), exact,
                tolerances_of(inputs, exact, kType, test::Weights::bfloat16),
                "emulated");
  EXPECT_TRUE(gaps_kept(arrays));
}

TEST(TileSelectedPoison, ReachesExactlyThoseWhoListIt) {
  test::expect_poison_reaches_those_who_list_it(kEmulatedKernels, kType);
}

TEST(TileSelectedThreads, EachHaveTilesOfTheirOwn) {
  const SelectedCase c{.name = "", .queries = 9, .heads = 20, .slots = 130};
  const SelectedInputs inputs = selected_inputs(c, kType);
  SelectedArrays serial(inputs, kType, c.strides), threaded = serial;
  const ParallelFor threads = [](int64_t items, int64_t, const auto& body) {
    std::vector<std::thread> running;
    for (int64_t i = 0; i < items; ++i) {
      running.emplace_back([&body, i] { body(i, i + 1); });
    }
    for (std::thread& thread : running) thread.join();
  };
  run_selected(kEmulatedKernels, inputs.problem, kType, serial);
  run_selected(kEmulatedKernels, inputs.problem, kType, threaded, threads);
  EXPECT_TRUE(same_bits(serial, threaded));
}

TEST(SelectedPairs, AreGatheredWithZerosBehindThem) {
  for (int n : {1, 31, 32, 33, 70}) {
    std::vector<uint16_t> even(static_cast<std::size_t>(n)), odd = even;
    for (std::size_t i = 0; i < even.size(); ++i) {
      even[i] = static_cast<uint16_t>(i + 1);
      odd[i] = static_cast<uint16_t>(i + 1000);
    }
    for (bool both : {true, false}) {
      std::vector<uint16_t> rows(2 * 96, 7);
      std::vector<uint32_t> pairs(96, 7);
      gather_two(even.data(), both ? odd.data() : nullptr, n, n, rows.data(),
                 96, pairs.data());
      for (int c = 0; c < rounded_up(n, 32); ++c) {
        const auto at = static_cast<std::size_t>(c);
        const uint32_t a = c < n ? even[at] : 0;
        const uint32_t b = both && c < n ? odd[at] : 0;
        EXPECT_EQ(rows[at], a);
        EXPECT_EQ(rows[96 + at], b);
        EXPECT_EQ(pairs[at], a | b << 16);
      }
    }
  }
}

}  // namespace
}  // namespace longspan
