#include "compat/nemo/cpp/padding.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/support/values.h"

namespace longspan::nemo {
namespace {

using test::message_of;
using test::Refusal;

at::Tensor ids(int64_t rows, int64_t length) {
  return at::arange(rows).view({rows, 1}) * 1000 + at::arange(length);
}

TEST(PadTokens, AppendsAndReturnsTheArgumentWhereNothingIsMissing) {
  const at::Tensor rows = ids(2, 3);
  EXPECT_TRUE(pad_tokens(rows, 1, 0, 5).is_same(rows));
  EXPECT_TRUE(pad_tokens(rows, 1, -3, 5).is_same(rows));
  EXPECT_TRUE(pad_tokens(rows, -1, 2, 5)
                  .equal(at::cat({rows, at::full({2, 2}, 5, at::kLong)}, 1)));
  EXPECT_TRUE(pad_tokens(rows, 0, 1, 5)
                  .equal(at::cat({rows, at::full({1, 3}, 5, at::kLong)}, 0)));
}

TEST(ContinuePositions, CountsOnFromTheLast) {
  const at::Tensor planes = at::stack({ids(2, 3), ids(2, 3) + 50});
  EXPECT_TRUE(continue_positions(planes, 2, 0).is_same(planes));
  const at::Tensor longer = continue_positions(planes, -1, 2);
  EXPECT_TRUE(longer.equal(at::stack({ids(2, 5), ids(2, 5) + 50})));
  EXPECT_EQ(continue_positions(planes.to(at::kInt), 2, 1).scalar_type(),
            at::kInt);
}

class PaddingRefusal : public ::testing::TestWithParam<Refusal> {};
TEST_P(PaddingRefusal, SaysWhatCame) {
  EXPECT_EQ(message_of(GetParam().call), GetParam().message);
}

INSTANTIATE_TEST_SUITE_P(
    Refused, PaddingRefusal,
    ::testing::ValuesIn(std::vector<Refusal>{
        {"PadAxis", [] { pad_tokens(ids(1, 2), 2, 1, 0); },
         "pad_tokens: axis 2 of int64 [1, 2]"},
        {"PositionsAxis", [] { continue_positions(ids(1, 2), -3, 1); },
         "continue_positions: axis -3 of int64 [1, 2]"},
        {"NoLastPosition", [] { continue_positions(ids(1, 0), 1, 1); },
         "continue_positions: int64 [1, 0] has no last position to continue"},
    }),
    test::refusal_name);

}  // namespace
}  // namespace longspan::nemo
