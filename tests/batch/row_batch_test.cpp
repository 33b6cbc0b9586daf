#include "longspan/batch/row_batch.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/support/values.h"

namespace longspan {
namespace {

using test::message_of;
using test::Refusal;

constexpr int64_t kSentinel = -1000;

/// Token (row, column) is row * 1000 + column.
at::Tensor ids(int64_t rows, int64_t length) {
  return at::arange(rows).view({rows, 1}) * 1000 + at::arange(length);
}

at::Tensor table(const std::vector<std::vector<int64_t>>& rows) {
  std::vector<at::Tensor> made;
  for (const auto& row : rows) made.push_back(at::tensor(row, at::kLong));
  return at::stack(made);
}

struct DocumentsCase {
  std::string name;
  NamedTensors batch;
  std::vector<RowDocument> documents;
};

std::vector<DocumentsCase> document_cases() {
  const at::Tensor square =
      at::ones({1, 1, 4, 4}, at::kBool)
          .tril()
          .logical_and(at::tensor({0, 1, 1, 1}, at::kLong).to(at::kBool));
  return {
      {"RowsAreDocuments",
       {{"input_ids", ids(2, 4)}},
       {{0, {0, 4}, {0, 4}}, {1, {4, 8}, {4, 8}}}},
      {"LengthsWithoutSlots",
       {{"input_ids", ids(2, 6)},
        {"seq_lens", table({{2, 3}, {6, kSentinel}})}},
       {{0, {0, 2}, {0, 2}}, {0, {2, 5}, {2, 6}}, {1, {6, 12}, {6, 12}}}},
      {"LengthsWithSlots",
       {{"input_ids", ids(1, 8)},
        {"seq_lens", table({{2, kSentinel, 3}})},
        {"seq_lens_padded", table({{4, 3, kSentinel}})}},
       {{0, {0, 2}, {0, 4}}, {0, {4, 7}, {4, 8}}}},
      {"OnlySentinels",
       {{"input_ids", ids(1, 4)}, {"seq_lens", table({{kSentinel}})}},
       {{0, {0, 0}, {0, 4}}}},
      {"EmptyDocuments",
       {{"input_ids", ids(1, 4)},
        {"seq_lens", table({{0, 2, 0}})},
        {"seq_lens_padded", table({{0, 2, 1}})}},
       {{0, {0, 0}, {0, 0}}, {0, {0, 2}, {0, 2}}, {0, {2, 2}, {2, 4}}}},
      {"RightPaddedMask",
       {{"input_ids", ids(2, 3)},
        {"attention_mask", table({{1, 1, 0}, {1, 1, 1}})}},
       {{0, {0, 2}, {0, 2}}, {1, {3, 6}, {3, 6}}}},
      {"LeftPaddedMask",
       {{"input_ids", ids(1, 4)}, {"attention_mask", table({{0, 0, 1, 1}})}},
       {{0, {2, 4}, {2, 4}}}},
      {"NumberedDocuments",
       {{"input_ids", ids(1, 6)},
        {"attention_mask", table({{1, 1, 2, 0, 3, 3}})}},
       {{0, {0, 2}, {0, 2}}, {0, {2, 3}, {2, 3}}, {0, {4, 6}, {4, 6}}}},
      {"RowOfPads",
       {{"input_ids", ids(2, 3)},
        {"attention_mask", table({{0, 0, 0}, {1, 0, 0}})}},
       {{0, {0, 0}, {0, 0}}, {1, {3, 4}, {3, 4}}}},
      {"SquareMask",
       {{"input_ids", ids(1, 4)}, {"attention_mask", square}},
       {{0, {1, 4}, {1, 4}}}},
      {"AdditiveSquareMask",
       {{"input_ids", ids(1, 4)},
        {"attention_mask",
         at::zeros({1, 1, 4, 4}).masked_fill(square.logical_not(), -1e9)}},
       {{0, {1, 4}, {1, 4}}}},
      {"PaddingMask",
       {{"input_ids", ids(1, 4)},
        {"padding_mask", table({{0, 0, 1, 1}}).to(at::kBool)}},
       {{0, {0, 2}, {0, 2}}}},
      {"LengthsBeforeMasks",
       {{"input_ids", ids(1, 4)},
        {"attention_mask", table({{1, 0, 0, 0}})},
        {"seq_lens", table({{4}})}},
       {{0, {0, 4}, {0, 4}}}},
      {"Offsets",
       {{"input_ids", ids(1, 5)},
        {"cu_seq_lens_q", at::tensor({0, 2, 5}, at::kInt)},
        {"cu_seq_lens_k", at::tensor({0, 2, 5}, at::kInt)}},
       {{0, {0, 2}, {0, 2}}, {0, {2, 5}, {2, 5}}}},
      {"RestartingPositions",
       {{"input_ids", ids(2, 4)},
        {"position_ids", table({{0, 1, 0, 1}, {0, 0, 1, 2}})}},
       {{0, {0, 2}, {0, 2}},
        {0, {2, 4}, {2, 4}},
        {1, {4, 5}, {4, 5}},
        {1, {5, 8}, {5, 8}}}},
      {"PositionsThatStartLater",
       {{"input_ids", ids(1, 4)}, {"position_ids", table({{5, 6, 7, 3}})}},
       {{0, {0, 4}, {0, 4}}}},
      {"PositionsForAllRows",
       {{"input_ids", ids(2, 3)}, {"position_ids", table({{0, 1, 0}})}},
       {{0, {0, 2}, {0, 2}},
        {0, {2, 3}, {2, 3}},
        {1, {3, 5}, {3, 5}},
        {1, {5, 6}, {5, 6}}}},
      {"RestartsInsideAMask",
       {{"input_ids", ids(1, 7)},
        {"attention_mask", table({{0, 1, 1, 1, 1, 0, 0}})},
        {"position_ids", table({{1, 0, 1, 0, 1, 0, 0}})}},
       {{0, {1, 3}, {1, 3}}, {0, {3, 5}, {3, 5}}}},
      {"NumbersBeforePositions",
       {{"input_ids", ids(1, 4)},
        {"attention_mask", table({{2, 2, 2, 2}})},
        {"position_ids", table({{0, 1, 0, 1}})}},
       {{0, {0, 4}, {0, 4}}}},
      {"LengthsBeforePositions",
       {{"input_ids", ids(1, 4)},
        {"seq_lens", table({{4}})},
        {"position_ids", table({{0, 1, 0, 1}})}},
       {{0, {0, 4}, {0, 4}}}},
      {"PlanesSayNothing",
       {{"input_ids", ids(1, 2)},
        {"position_ids", at::zeros({3, 1, 2}, at::kLong)}},
       {{0, {0, 2}, {0, 2}}}},
      {"NoRows", {{"input_ids", ids(0, 4)}}, {}},
      {"NoTokens", {{"input_ids", ids(2, 0)}}, {{0, {}, {}}, {1, {}, {}}}},
  };
}

class ReadDocuments : public ::testing::TestWithParam<DocumentsCase> {};
INSTANTIATE_TEST_SUITE_P(Cases, ReadDocuments,
                         ::testing::ValuesIn(document_cases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(ReadDocuments, AreUnderstood) {
  EXPECT_EQ(read_rows(GetParam().batch).documents, GetParam().documents);
}

TEST(ReadRows, UsesUpLengthsAndMasksAndKeepsTheRest) {
  const at::Tensor pixels = at::zeros({5, 7});
  const RowBatch batch = read_rows({{"labels", ids(2, 4)},
                                    {"pixel_values", pixels},
                                    {"attention_mask", at::ones({2, 4})},
                                    {"input_ids", ids(2, 4)}});
  ASSERT_EQ(batch.tokens.size(), 2u);
  EXPECT_EQ(batch.tokens[0].first, "labels");
  EXPECT_EQ(batch.tokens[1].first, "input_ids");
  ASSERT_EQ(batch.payload.size(), 1u);
  EXPECT_TRUE(batch.payload[0].second.is_same(pixels));
  EXPECT_EQ(batch.rows, 2);
  EXPECT_EQ(batch.length, 4);
}

TEST(ReadRows, ExpandsPositionsThatAllRowsShare) {
  const RowBatch batch = read_rows(
      {{"input_ids", ids(3, 4)}, {"position_ids", at::arange(4).view({1, 4})}});
  EXPECT_TRUE(find_tensor(batch.tokens, "position_ids")
                  .equal(at::arange(4).expand({3, 4})));
}

TEST(Chunks, SplitRowsTensorsAndDocuments) {
  const at::Tensor positions =
      at::stack({ids(4, 3), ids(4, 3) + 1, ids(4, 3) + 2});
  const RowBatch batch = read_rows(
      {{"input_ids", ids(4, 3)},
       {"position_ids", positions},
       {"seq_lens", table({{1, 2}, {3, kSentinel}, {2, 0}, {0, 0}})}});
  const std::vector<RowBatch> parts = chunks(batch, 2);
  ASSERT_EQ(parts.size(), 2u);
  for (int64_t i = 0; i < 2; ++i) {
    const RowBatch& part = test::at(parts, i);
    EXPECT_EQ(part.rows, 2);
    EXPECT_TRUE(find_tensor(part.tokens, "input_ids")
                    .equal(ids(4, 3).narrow(0, 2 * i, 2)));
    EXPECT_TRUE(find_tensor(part.tokens, "position_ids")
                    .equal(positions.narrow(1, 2 * i, 2)));
  }
  EXPECT_EQ(
      parts[0].documents,
      (std::vector<RowDocument>{
          {0, {0, 1}, {0, 1}}, {0, {1, 3}, {1, 3}}, {1, {3, 6}, {3, 6}}}));
  EXPECT_EQ(parts[1].documents,
            (std::vector<RowDocument>{{0, {0, 2}, {0, 2}},
                                      {0, {2, 2}, {2, 3}},
                                      {1, {3, 3}, {3, 3}},
                                      {1, {3, 3}, {3, 6}}}));
}

TEST(PadsOfAttentionMask, AreTheOppositeOfRealTokens) {
  EXPECT_TRUE(
      pads_of_attention_mask(table({{1, 2, 0}}))
          .equal(at::tensor({0, 0, 1}, at::kLong).to(at::kBool).view({1, 3})));
}

class ReadRowsRefusal : public ::testing::TestWithParam<Refusal> {};
TEST_P(ReadRowsRefusal, SaysWhatCame) {
  EXPECT_EQ(message_of(GetParam().call), GetParam().message);
}

INSTANTIATE_TEST_SUITE_P(
    Refused, ReadRowsRefusal,
    ::testing::ValuesIn(std::vector<Refusal>{
        {"KeyTwice",
         [] {
           read_rows({{"input_ids", ids(1, 2)}, {"input_ids", ids(1, 2)}});
         },
         "read_rows: 'input_ids' comes twice"},
        {"NoTensor", [] { read_rows({{"input_ids", {}}}); },
         "read_rows: 'input_ids' is not a tensor"},
        {"NoTokens", [] { read_rows({{"labels", ids(1, 2)}}); },
         "read_rows: exactly one of `input_ids` and `inputs_embeds` belongs in "
         "a batch, neither is there; tensors that came: `labels`"},
        {"NothingAtAll", [] { read_rows({}); },
         "read_rows: exactly one of `input_ids` and `inputs_embeds` belongs in "
         "a batch, neither is there; no tensor came"},
        {"SlipInTheTokens",
         [] { read_rows({{"labels", ids(1, 2)}, {"input_id", ids(1, 2)}}); },
         "read_rows: exactly one of `input_ids` and `inputs_embeds` belongs in "
         "a batch, neither is there; tensors that came: `labels`, `input_id`; "
         "did you mean `input_ids` by `input_id`?"},
        {"SlipInTheLabels",
         [] { read_rows({{"input_ids", ids(1, 2)}, {"lables", ids(1, 2)}}); },
         "read_rows: `lables` is int64 [1, 2], which looks like one entry for "
         "each token, but the table does not know it; did you mean `labels`? "
         "Else add it to the table, or to pass_through to leave it whole"},
        {"NoSlipWhereTheNameIsThere",
         [] {
           read_rows({{"input_ids", ids(1, 2)},
                      {"labels", ids(1, 2)},
                      {"lables", ids(1, 2)}});
         },
         "read_rows: `lables` is int64 [1, 2], which looks like one entry for "
         "each token, but the table does not know it; add it to the table, or "
         "to pass_through to leave it whole"},
        {"IdsOutsideTheTable",
         [] { read_rows({{"input_ids", ids(1, 1)}}, {.table = {}}); },
         "read_rows: `input_ids` says how many tokens there are, so it belongs "
         "in the table and not in pass_through"},
        {"IdsPassedThrough",
         [] {
           read_rows({{"input_ids", ids(1, 2)}},
                     {.pass_through = {"input_ids"}});
         },
         "read_rows: `input_ids` says how many tokens there are, so it belongs "
         "in the table and not in pass_through"},
        {"DocumentsLongerThanTheRow",
         [] {
           read_rows({{"input_ids", ids(1, 4)}, {"seq_lens", table({{3, 2}})}});
         },
         "read_rows: the documents of row 0 take 3 + 2 tokens or more but the "
         "row has 4; shorten the lengths or widen the row"},
        {"HoleInTheMask",
         [] {
           read_rows({{"input_ids", ids(1, 3)},
                      {"attention_mask", table({{1, 0, 1}})}});
         },
         "read_rows: row 0 of the mask has pads inside a document, before "
         "column 2; documents are unbroken, so number the parts 1, 2, ... if "
         "they are several"},
        {"LabelsThatCannotSayIgnore",
         [] {
           read_rows({{"input_ids", ids(1, 2)},
                      {"labels", at::zeros({1, 2}, at::kByte)}});
         },
         "read_rows: `labels` is uint8 [1, 2], which cannot hold its pad value "
         "-100; convert it, or give it another fill in the table"},
        {"UnevenChunks",
         [] { chunks(read_rows({{"input_ids", ids(3, 2)}}), 2); },
         "chunks: 3 rows do not split into 2 equal chunks"},
        {"OffsetsOfRows",
         [] {
           read_rows({{"input_ids", ids(2, 2)},
                      {"cu_seq_lens_q", at::tensor({0, 4}, at::kInt)}});
         },
         "read_rows: `cu_seq_lens_q` is int32 [2] beside 2 rows; expected "
         "integers [documents + 1] of one row"},
        {"OffsetsThatEndEarly",
         [] {
           read_rows({{"input_ids", ids(1, 4)},
                      {"cu_seq_lens_q", at::tensor({0, 3}, at::kInt)}});
         },
         "read_rows: `cu_seq_lens_q` does not ascend from 0 to the 4 tokens of "
         "the row"},
        {"OffsetsOfOtherKeys",
         [] {
           read_rows({{"input_ids", ids(1, 4)},
                      {"cu_seq_lens_q", at::tensor({0, 4}, at::kInt)},
                      {"cu_seq_lens_k", at::tensor({0, 5}, at::kInt)}});
         },
         "read_rows: `cu_seq_lens_k` is not `cu_seq_lens_q`; queries and keys "
         "are the same tokens here"},
        {"NoChunks", [] { chunks(read_rows({{"input_ids", ids(3, 2)}}), 0); },
         "chunks: 0 chunks; expected at least 1"},
    }),
    test::refusal_name);

}  // namespace
}  // namespace longspan
