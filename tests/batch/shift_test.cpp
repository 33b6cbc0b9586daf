#include "longspan/batch/shift.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/support/values.h"

namespace longspan {
namespace {

using test::message_of;
using test::Refusal;

at::Tensor ids(int64_t rows, int64_t length) {
  return at::arange(rows).view({rows, 1}) * 1000 + at::arange(length);
}

/// Two rows of five; row 0 holds documents of two and three tokens.
RowBatch two_rows() {
  return read_rows(
      {{"input_ids", ids(2, 5)},
       {"labels", ids(2, 5) + 500000},
       {"payload", at::zeros({3})},
       {"seq_lens", at::tensor({2, 3, 5, -1000}, at::kLong).view({2, 2})}});
}

/// What every token holds after a shift, token by token.
at::Tensor shifted_slowly(const at::Tensor& source, int64_t steps,
                          const std::vector<TokenRange>& parts, int64_t fill) {
  const at::Tensor flat = source.flatten();
  at::Tensor target = at::full_like(flat, fill);
  for (TokenRange part : parts) {
    for (int64_t t = part.begin; t + steps < part.end; ++t) {
      target[t] = flat[t + steps];
    }
  }
  return target.view(source.sizes());
}

TEST(ShiftLeft, TakesWhatStandsFurtherOnInTheRow) {
  for (int64_t steps : {0, 1, 2, 4, 5, 99}) {
    const RowBatch shifted = shift_left(two_rows(), "labels", "labels", steps);
    EXPECT_TRUE(find_tensor(shifted.tokens, "labels")
                    .equal(shifted_slowly(ids(2, 5) + 500000, steps,
                                          {{0, 5}, {5, 10}}, -100)))
        << steps;
  }
}

TEST(ShiftLeft, StopsAtDocumentsWhenAsked) {
  for (int64_t steps : {0, 1, 2, 9}) {
    const RowBatch shifted =
        shift_left(two_rows(), "input_ids", "next", steps, Border::document);
    EXPECT_TRUE(find_tensor(shifted.tokens, "next")
                    .equal(shifted_slowly(ids(2, 5), steps,
                                          {{0, 2}, {2, 5}, {5, 10}}, 0)))
        << steps;
  }
}

TEST(ShiftLeft, AddsOrReplacesAndLeavesItsArgument) {
  const RowBatch batch = two_rows();
  const RowBatch added = shift_left(batch, "input_ids", "next");
  EXPECT_EQ(batch.tokens.size(), 2u);
  EXPECT_EQ(batch.table.find("next"), nullptr);
  ASSERT_EQ(added.tokens.size(), 3u);
  EXPECT_EQ(added.tokens.back().first, "next");
  ASSERT_NE(added.table.find("next"), nullptr);
  EXPECT_EQ(added.table.find("next")->fill.value.toLong(), 0);
  const RowBatch replaced = shift_left(batch, "input_ids", "labels");
  ASSERT_EQ(replaced.tokens.size(), 2u);
  EXPECT_EQ(replaced.tokens[1].second[0][0].item<int64_t>(), 1);
  EXPECT_TRUE(batch.tokens[1].second.equal(ids(2, 5) + 500000));
}

TEST(ShiftLeft, TakesTheNameOfAPayloadAway) {
  const RowBatch shifted = shift_left(two_rows(), "input_ids", "payload");
  EXPECT_TRUE(shifted.payload.empty());
  EXPECT_TRUE(find_tensor(shifted.tokens, "payload").defined());
}

TEST(ShiftLeft, ShiftsPlanesAndChannelsAndStridedTensors) {
  const at::Tensor planes = at::stack({ids(2, 4), ids(2, 4) + 7});
  const at::Tensor embeds =
      ids(2, 4).to(at::kDouble).unsqueeze(2).expand({2, 4, 3});
  const RowBatch batch =
      read_rows({{"inputs_embeds", embeds}, {"position_ids", planes}});
  const at::Tensor shifted =
      find_tensor(shift_left(batch, "position_ids", "p", 1).tokens, "p");
  for (int64_t plane = 0; plane < 2; ++plane) {
    EXPECT_TRUE(shifted[plane].equal(
        shifted_slowly(planes[plane], 1, {{0, 4}, {4, 8}}, 0)));
  }
  const at::Tensor next =
      find_tensor(shift_left(batch, "inputs_embeds", "n", 1).tokens, "n");
  EXPECT_TRUE(next.narrow(1, 0, 3).equal(embeds.narrow(1, 1, 3)));
  EXPECT_FALSE(next.select(1, 3).any().item<bool>());
}

TEST(ClearPads, LeavesOnlyWhatStandsInDocuments) {
  const RowBatch batch = read_rows(
      {{"input_ids", ids(2, 4)},
       {"labels", ids(2, 4)},
       {"attention_mask",
        at::tensor({0, 1, 1, 0, 1, 1, 1, 1}, at::kLong).view({2, 4})}});
  const RowBatch cleared = clear_pads(batch, "labels");
  EXPECT_TRUE(find_tensor(cleared.tokens, "labels")
                  .equal(at::tensor({-100, 1, 2, -100, 1000, 1001, 1002, 1003},
                                    at::kLong)
                             .view({2, 4})));
  EXPECT_TRUE(find_tensor(cleared.tokens, "input_ids").equal(ids(2, 4)));
  EXPECT_TRUE(find_tensor(batch.tokens, "labels").equal(ids(2, 4)));
}

class ShiftRefusal : public ::testing::TestWithParam<Refusal> {};
TEST_P(ShiftRefusal, SaysWhatCame) {
  EXPECT_EQ(message_of(GetParam().call), GetParam().message);
}

INSTANTIATE_TEST_SUITE_P(
    Refused, ShiftRefusal,
    ::testing::ValuesIn(std::vector<Refusal>{
        {"NoSuchTensor", [] { shift_left(two_rows(), "lables", "labels"); },
         "shift_left: the batch has no 'lables'"},
        {"Backwards", [] { shift_left(two_rows(), "labels", "labels", -1); },
         "shift_left: -1 steps; expected at least 0"},
        {"NothingToClear", [] { clear_pads(two_rows(), "lables"); },
         "clear_pads: the batch has no 'lables'"},
        {"NameOfAnotherAxis",
         [] {
           const RowBatch batch =
               read_rows({{"input_ids", ids(2, 4)},
                          {"position_ids", at::stack({ids(2, 4), ids(2, 4)})}});
           shift_left(batch, "position_ids", "labels");
         },
         "shift_left: the tokens of 'position_ids' are at axis 2, but the "
         "table has another axis for 'labels'; choose another name"},
    }),
    test::refusal_name);

}  // namespace
}  // namespace longspan
