#include <gtest/gtest.h>

#include <memory>
#include <thread>

#include "longspan/kernels/attention/cpu/bf16/backward_keys.h"
#include "longspan/kernels/attention/cpu/bf16/forward.h"
#include "longspan/kernels/common/cpu/bf16/tile_engine.h"
#include "tests/kernels/attention/attention_poisons.h"
#include "tests/kernels/common/emulated_tiles.h"

/// The attention that AMX runs, on emulated tiles: packing, edges and the order
/// of loads are the same, so they are tested on any CPU.
namespace longspan {
namespace {

using test::Answer;
using test::AttentionArrays;
using test::AttentionCase;
using test::CaseInputs;
using test::inputs_of;
using Engine = TileEngine<test::EmulatedTiles>;

constexpr PanelSteps kEmulated = {.forward = panel_forward_steps<Engine>(),
                                  .backward = panel_backward_steps<Engine>()};

/// Named as what it stands for.
constexpr AttentionKernels kEmulatedKernels = {
    .name = "amx",
    .forward =
        [](const AttentionForwardArgs& args, const ParallelFor& parallel_for) {
          run_panels_forward(kEmulated, args, parallel_for);
        },
    .backward =
        [](const AttentionBackwardArgs& args, const ParallelFor& parallel_for) {
          run_panels_backward(kEmulated, args, parallel_for);
        }};

uint16_t bits_of(int value) {
  return test::bfloat16_bits(value);
}

/// Small whole numbers, whose sums are exact.
int element(int i, int j) {
  return (i * 7 + j * 3) % 11 - 5;
}

/// Copied rows of the matrix element(i, j), in whole steps of 32 rows.
struct CopiedRows {
  int rows, n;
  int64_t stride;
  std::vector<uint16_t> values;

  CopiedRows(int row_count, int columns)
      : rows(row_count),
        n(columns),
        stride(row_length<uint16_t>(columns)),
        values(static_cast<std::size_t>(rounded_up(rows, 32) * stride),
               bits_of(9)) {
    std::vector<uint16_t> from;
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j < n; ++j) from.push_back(bits_of(element(i, j)));
    }
    EXPECT_TRUE(copy_rows(from.data(), n, rows, rounded_up(rows, 32), n,
                          values.data(), stride));
  }

  /// What element (i, j) is in a layout that is padded with zeros.
  uint32_t padded(int i, int j) const {
    return i < rows && j < n ? bits_of(element(i, j)) : 0;
  }
};

TEST(Bf16Packing, PutsPairsOfChannelsSideBySide) {
  for (int n : {1, 2, 31, 32, 33, 70}) {
    const CopiedRows rows(37, n);
    std::vector<uint32_t> pairs(96 / 2 * 64);
    pairs_of_channels(rows.values.data(), rows.stride, 64, n, pairs.data(), 64);
    for (int p = 0; p < rounded_up(n, 32) / 2; ++p) {
      for (int i = 0; i < 64; ++i) {
        ASSERT_EQ(pairs[static_cast<std::size_t>(p * 64 + i)],
                  rows.padded(i, 2 * p) | rows.padded(i, 2 * p + 1) << 16)
            << n << " " << p << " " << i;
      }
    }
  }
}

TEST(Bf16Packing, PutsPairsOfRowsSideBySide) {
  for (int n : {1, 16, 17, 70}) {
    const CopiedRows rows(37, n);
    std::vector<uint32_t> pairs(32 * 80);
    pairs_of_rows(rows.values.data(), rows.stride, 64, n, pairs.data(), 80);
    for (int p = 0; p < 32; ++p) {
      for (int j = 0; j < rounded_up(n, 16); ++j) {
        ASSERT_EQ(pairs[static_cast<std::size_t>(p * 80 + j)],
                  rows.padded(2 * p, j) | rows.padded(2 * p + 1, j) << 16);
      }
    }
  }
}

TEST(Bf16Packing, TurnsRowsIntoChannels) {
  for (int n : {1, 16, 17, 70}) {
    const CopiedRows rows(37, n);
    std::vector<uint16_t> turned(80 * 96);
    rows_of_channels(rows.values.data(), rows.stride, 64, n, turned.data(), 96);
    for (int j = 0; j < rounded_up(n, 16); ++j) {
      for (int i = 0; i < 64; ++i) {
        ASSERT_EQ(turned[static_cast<std::size_t>(j * 96 + i)],
                  rows.padded(i, j));
      }
    }
  }
}

TEST(Bf16Packing, NoticesInfinitiesAndNaNs) {
  for (uint16_t bits : {0x7f80, 0xff80, 0x7fc0, 0xffff}) {
    uint16_t from[3] = {0, 0x7f7f, bits}, to[32];
    EXPECT_TRUE(copy_rows(from, 3, 1, 1, 2, to, 32));
    EXPECT_FALSE(copy_rows(from, 3, 1, 1, 3, to, 32));
  }
}

TEST(Bf16Rounding, IsToNearestEvenAndKeepsNaN) {
  EXPECT_EQ(rounded_bits(1.0f), 0x3f80u);
  EXPECT_EQ(rounded_bits(1.0f + 0x1p-8f), 0x3f80u);  // a tie, down to even
  EXPECT_EQ(rounded_bits(1.0f + 0x3p-8f), 0x3f82u);  // a tie, up to even
  EXPECT_EQ(rounded_bits(-1.0f - 0x1.1p-8f), 0xbf81u);
  EXPECT_EQ(rounded_bits(INFINITY), 0x7f80u);
  EXPECT_TRUE(std::isnan(widened_bits(rounded_bits(NAN))));
  const float quiet_by_low_bits = std::bit_cast<float>(0x7f800001u);
  EXPECT_TRUE(std::isnan(widened_bits(rounded_bits(quiet_by_low_bits))));
}

/// Row i of A is element(i, .), column j of B is element(j, .).
template <Begin begin>
void expect_product(int rows, int depth, int columns) {
  const CopiedRows a(rows, depth), b(columns, depth);
  std::vector<uint32_t> pairs(
      static_cast<std::size_t>(rounded_up(depth, 32) / 2 * columns));
  pairs_of_channels(b.values.data(), b.stride, columns, depth, pairs.data(),
                    columns);
  const int c_stride = columns + 16;
  std::vector<float> c(
      static_cast<std::size_t>(rounded_up(rows, 16) * c_stride), 100.0f);
  Engine::start();
  Engine::multiply<begin>({.a = a.values.data(),
                           .a_stride = a.stride,
                           .b = pairs.data(),
                           .b_stride = columns,
                           .c = c.data(),
                           .c_stride = c_stride,
                           .rows = rows,
                           .depth = depth,
                           .columns = columns});
  Engine::finish();
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < c_stride; ++j) {
      float exact = begin == Begin::add || j >= columns ? 100.0f : 0.0f;
      for (int p = 0; p < depth && j < columns; ++p) {
        exact += static_cast<float>(element(i, p) * element(j, p));
      }
      ASSERT_EQ(c[static_cast<std::size_t>(i * c_stride + j)], exact)
          << rows << " " << depth << " " << columns << " at " << i << " " << j;
    }
  }
}

TEST(TileProduct, IsExactForAnyShape) {
  for (int rows : {1, 15, 16, 17, 32, 33, 64, 70}) {
    for (int depth : {1, 2, 31, 32, 33, 64, 97}) {
      for (int columns : {16, 32, 48, 64}) {
        expect_product<Begin::zero>(rows, depth, columns);
        expect_product<Begin::add>(rows, depth, columns);
      }
    }
  }
}

class TileAttention : public ::testing::TestWithParam<AttentionCase> {};

INSTANTIATE_TEST_SUITE_P(Cases, TileAttention,
                         ::testing::ValuesIn(test::attention_cases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(TileAttention, IsAsExactAsAPlainComputation) {
  const AttentionCase& c = GetParam();
  const CaseInputs inputs = inputs_of(c, ElementType::bfloat16);
  const Answer exact = slow_answer<double>(inputs);
  const Answer tolerances = tolerances_of(inputs, exact, ElementType::bfloat16,
                                          test::Weights::bfloat16);
  AttentionArrays arrays = arrays_of(inputs, ElementType::bfloat16, c.strides);
  run_forward(kEmulatedKernels, inputs.problem, ElementType::bfloat16,
              inputs.lines, arrays);
  run_backward(kEmulatedKernels, inputs.problem, ElementType::bfloat16,
               inputs.lines, arrays);
  expect_answer(answer_in(arrays), exact, tolerances, "emulated");
  for (const test::Array* written :
       {&arrays.out, &arrays.lse, &arrays.dq, &arrays.dk, &arrays.dv}) {
    EXPECT_TRUE(written->gaps_kept());
  }
}

TEST(TileAttentionPoison, ReachesExactlyThoseWhoSeeIt) {
  for (const AttentionCase& c :
       {test::poisoned_case(), test::wide_poisoned_case()}) {
    test::expect_poison_reaches_those_who_see_it(c, {&kEmulatedKernels, 1},
                                                 ElementType::bfloat16);
  }
}

/// Tiles are set up on the thread that uses them.
TEST(TileAttentionThreads, EachHaveTilesOfTheirOwn) {
  const CaseInputs inputs =
      inputs_of(test::causal_case("causal", 200, 40), ElementType::bfloat16);
  AttentionArrays serial = arrays_of(inputs, ElementType::bfloat16);
  AttentionArrays threaded = serial;
  const ParallelFor threads = [](int64_t items, int64_t, const auto& body) {
    std::vector<std::thread> running;
    for (int64_t i = 0; i < items; ++i) {
      running.emplace_back([&body, i] { body(i, i + 1); });
    }
    for (std::thread& thread : running) thread.join();
  };
  for (auto [arrays, parallel_for] :
       {std::pair{&serial, ParallelFor(serial_for)}, {&threaded, threads}}) {
    run_forward(kEmulatedKernels, inputs.problem, ElementType::bfloat16,
                inputs.lines, *arrays, parallel_for);
    run_backward(kEmulatedKernels, inputs.problem, ElementType::bfloat16,
                 inputs.lines, *arrays, parallel_for);
  }
  EXPECT_EQ(serial.out.bytes(), threaded.out.bytes());
  EXPECT_EQ(serial.dq.bytes(), threaded.dq.bytes());
  EXPECT_EQ(serial.dk.bytes(), threaded.dk.bytes());
}

}  // namespace
}  // namespace longspan
