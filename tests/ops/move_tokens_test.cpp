#include "longspan/ops/move_tokens.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "longspan/ops/checks.h"
#include "tests/support/property.h"
#include "tests/support/values.h"

namespace longspan {
namespace {

using TokenRun = Run;  // inside a test, Run is one of its members
using test::message_of;
using test::Refusal;

/// Entry (row, token, channel) of a tensor is row * 10000 + token * 10 +
/// channel, so that a wrong entry names its source.
at::Tensor numbered(int64_t rows, int64_t tokens, int64_t channels) {
  const auto index = [](int64_t n, int64_t step) {
    return at::arange(n, at::kLong) * step;
  };
  return index(rows, 10000).view({rows, 1, 1}) +
         index(tokens, 10).view({1, tokens, 1}) +
         index(channels, 1).view({1, 1, channels});
}

/// The same move, token by token.
at::Tensor moved_slowly(const at::Tensor& source, int64_t axis,
                        const Moves& moves, const at::Scalar& fill) {
  auto sizes = source.sizes().vec();
  test::at(sizes, axis) = moves.target_tokens();
  at::Tensor target = at::full(sizes, fill, source.options());
  for (const Run& run : moves.runs()) {
    for (int64_t i = 0; i < run.length; ++i) {
      target.select(axis, run.target + i)
          .copy_(source.select(axis, run.source + i));
    }
  }
  return target;
}

struct MoveCase {
  std::string name;
  Moves moves;
};

std::vector<MoveCase> move_cases() {
  return {
      {"HeadTail", Moves::of({{0, 0, 2}, {6, 2, 2}}, 8, 4)},
      {"Permutation", Moves::of({{5, 0, 2}, {2, 2, 3}, {0, 5, 2}}, 7, 7)},
      {"Padding", Moves::of({{0, 0, 5}}, 5, 8)},
      {"GapsEverywhere", Moves::of({{4, 1, 2}, {0, 5, 3}}, 6, 11)},
      {"AllDropped", Moves::of({}, 4, 3)},
      {"NoSource", Moves::of({}, 0, 3)},
      {"NoTarget", Moves::of({}, 3, 0)},
  };
}

class MoveTokens : public ::testing::TestWithParam<MoveCase> {};
INSTANTIATE_TEST_SUITE_P(Cases, MoveTokens, ::testing::ValuesIn(move_cases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(MoveTokens, AgreesWithTheSlowAnswerOnEveryAxisAndType) {
  const Moves& moves = GetParam().moves;
  for (at::ScalarType dtype :
       {at::kLong, at::kInt, at::kShort, at::kChar, at::kByte, at::kBool,
        at::kHalf, at::kBFloat16, at::kFloat, at::kDouble, at::kComplexFloat,
        at::kComplexDouble, at::kFloat8_e4m3fn, at::kUInt16}) {
    SCOPED_TRACE(at::toString(dtype));
    const at::Tensor rows =
        numbered(2, moves.source_tokens(), 3).remainder(120).to(dtype);
    for (int64_t axis : {0, 1, 2}) {
      const at::Tensor source = rows.movedim(1, axis);
      const at::Tensor moved = move_tokens(source, axis, moves, 1);
      const at::Tensor expected = moved_slowly(source, axis, moves, 1);
      EXPECT_EQ(moved.sizes(), expected.sizes());
      EXPECT_EQ(moved.scalar_type(), dtype);
      EXPECT_TRUE(moved.is_contiguous());
      EXPECT_TRUE(
          moved.to(at::kComplexDouble).equal(expected.to(at::kComplexDouble)))
          << "axis " << axis;
    }
  }
}

TEST_P(MoveTokens, IsTheSameByIndexAsOtherDevicesMakeIt) {
  const Moves& moves = GetParam().moves;
  for (int64_t axis : {0, 1, 2}) {
    const at::Tensor source =
        numbered(2, moves.source_tokens(), 3).movedim(1, axis);
    EXPECT_TRUE(move_tokens_by_index(source, axis, moves, 7)
                    .equal(moved_slowly(source, axis, moves, 7)))
        << "axis " << axis;
  }
}

TEST_P(MoveTokens, ReadsStridedAndExpandedSources) {
  const Moves& moves = GetParam().moves;
  const int64_t tokens = moves.source_tokens();
  const at::Tensor every_other =
      numbered(2, 2 * tokens, 3).slice(1, 0, 2 * tokens, 2);
  const at::Tensor expanded = numbered(1, tokens, 1).expand({4, tokens, 3});
  const at::Tensor one_token = numbered(2, 1, 3).expand({2, tokens, 3});
  for (const at::Tensor& source : {every_other, expanded, one_token}) {
    EXPECT_TRUE(move_tokens(source, 1, moves, -1)
                    .equal(moved_slowly(source, 1, moves, -1)));
  }
}

/// <A x, y> = <x, A' y>, and A' is the inverse move with zeros in the gaps.
TEST_P(MoveTokens, HasItsAdjointAsDerivative) {
  const Moves& moves = GetParam().moves;
  at::manual_seed(1);
  const auto options = at::TensorOptions(at::kDouble);
  at::Tensor x = at::randn({2, moves.source_tokens(), 3}, options);
  const at::Tensor y = at::randn({2, moves.target_tokens(), 3}, options);
  x.set_requires_grad(true);
  const at::Tensor moved = move_tokens(x, 1, moves, 0);
  const at::Tensor grad = torch::autograd::grad({moved}, {x}, {y})[0];
  EXPECT_TRUE(grad.equal(moved_slowly(y, 1, moves.inverse(), 0)));
  EXPECT_NEAR((moved.detach() * y).sum().item<double>(),
              (x.detach() * grad).sum().item<double>(), 1e-12);
}

TEST_P(MoveTokens, IsTheSameWithItsRunsInAnyOrder) {
  const Moves& moves = GetParam().moves;
  const at::Tensor source = numbered(2, moves.source_tokens(), 1);
  const at::Tensor runs = runs_tensor(moves).flip(0);
  std::vector<TokenRun> list;
  for (int64_t i = 0; i < runs.size(0); ++i) {
    list.push_back({runs[i][0].item<int64_t>(), runs[i][1].item<int64_t>(),
                    runs[i][2].item<int64_t>()});
  }
  const Moves again =
      Moves::of(list, moves.source_tokens(), moves.target_tokens());
  EXPECT_TRUE(
      move_tokens(source, 1, again, 5).equal(move_tokens(source, 1, moves, 5)));
}

TEST_P(MoveTokens, KnowsItsShapeOnMeta) {
  const Moves& moves = GetParam().moves;
  const at::Tensor source =
      at::empty({2, moves.source_tokens(), 3},
                at::TensorOptions(at::kBFloat16).device(at::kMeta));
  const at::Tensor moved = move_tokens(source, 1, moves, 0);
  EXPECT_TRUE(moved.is_meta());
  EXPECT_EQ(moved.sizes(), (std::vector<int64_t>{2, moves.target_tokens(), 3}));
}

TEST(MoveTokensAlone, ReturnsTheArgumentWhereEveryTokenStays) {
  const at::Tensor source = numbered(2, 5, 1);
  EXPECT_TRUE(move_tokens(source, 1, Moves::identity(5)).is_same(source));
}

TEST(MoveTokensAlone, MovesWithoutOverflowWhatNeedsNoFill) {
  // 300 does not fit int8, but nothing is filled.
  const at::Tensor source = at::arange(4, at::kChar).view({1, 4});
  const Moves swapped = Moves::of({{2, 0, 2}, {0, 2, 2}}, 4, 4);
  EXPECT_TRUE(move_tokens(source, 1, swapped, 300)
                  .equal(at::tensor({2, 3, 0, 1}, at::kChar).view({1, 4})));
}

TEST(TokenMover, MovesSeveralTensorsAlike) {
  const TokenMover mover(Moves::of({{3, 0, 2}, {0, 4, 1}}, 5, 6));
  const at::Tensor ids = numbered(2, 5, 1).squeeze(2);
  const at::Tensor embeds = numbered(2, 5, 4).to(at::kFloat);
  EXPECT_TRUE(mover(ids, 1, -1).equal(moved_slowly(ids, 1, mover.moves(), -1)));
  EXPECT_TRUE(
      mover(embeds, 1, 0.5).equal(moved_slowly(embeds, 1, mover.moves(), 0.5)));
}

TEST(Fits, KnowsWhatATypeHolds) {
  struct Case {
    at::Scalar value;
    at::ScalarType dtype;
    bool fits;
  };
  const double infinity = std::numeric_limits<double>::infinity();
  for (const Case& c : std::vector<Case>{
           {-100, at::kLong, true},
           {-100, at::kChar, true},
           {-129, at::kChar, false},
           {-100, at::kByte, false},
           {255, at::kByte, true},
           {256, at::kByte, false},
           {true, at::kBool, true},
           {1, at::kBool, true},
           {2, at::kBool, false},
           {0.5, at::kLong, false},
           {2.0, at::kLong, true},
           {infinity, at::kLong, false},
           {infinity, at::kBFloat16, true},
           {1e30, at::kInt, false},
           {1e300, at::kHalf, false},
           {0.1, at::kFloat, true},
           {std::numeric_limits<int64_t>::min(), at::kLong, true},
           {c10::complex<double>(0, 1), at::kFloat, false},
           {c10::complex<double>(0, 1), at::kComplexFloat, true}}) {
    EXPECT_EQ(fits(c.value, c.dtype), c.fits)
        << c.value << " in " << at::toString(c.dtype);
  }
}

class MoveTokensRefusal : public ::testing::TestWithParam<Refusal> {};
TEST_P(MoveTokensRefusal, SaysWhatCame) {
  EXPECT_EQ(message_of(GetParam().call), GetParam().message);
}

INSTANTIATE_TEST_SUITE_P(
    Refused, MoveTokensRefusal,
    ::testing::ValuesIn(std::vector<Refusal>{
        {"NoTensor", [] { move_tokens({}, 0, Moves::identity(2)); },
         "move_tokens: `source` is not a tensor"},
        {"AxisOutOfRange",
         [] { move_tokens(numbered(1, 2, 1), 3, Moves::identity(2)); },
         "move_tokens: axis 3 of a tensor with 3 axes"},
        {"NegativeAxis",
         [] { move_tokens(numbered(1, 2, 1), -1, Moves::identity(2)); },
         "move_tokens: axis -1 of a tensor with 3 axes"},
        {"NoAxes", [] { move_tokens(at::zeros({}), 0, Moves::identity(1)); },
         "move_tokens: axis 0 of a tensor with 0 axes"},
        {"OtherNumberOfTokens",
         [] { move_tokens(numbered(1, 2, 1), 1, Moves::identity(3)); },
         "move_tokens: axis 1 of int64 [1, 2, 1] is not the 3 tokens that "
         "move"},
        {"FillThatDoesNotFit",
         [] {
           move_tokens(at::zeros({1, 2}, at::kByte), 1,
                       Moves::of({{0, 0, 2}}, 2, 3), -100);
         },
         "move_tokens: fill -100 does not fit uint8 [1, 2]; choose another, "
         "or convert the tensor"},
    }),
    test::refusal_name);

}  // namespace
}  // namespace longspan
