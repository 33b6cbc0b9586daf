#include "compat/nemo/cpp/reference.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/support/values.h"

namespace longspan::nemo {
namespace {

using test::message_of;
using test::Refusal;

constexpr int64_t kSentinel = -1000;
using Table = std::vector<std::vector<int64_t>>;
using Ints = std::vector<int32_t>;

at::Tensor tensor_of(const Table& rows) {
  std::vector<at::Tensor> made;
  for (const auto& row : rows) made.push_back(at::tensor(row, at::kLong));
  return at::stack(made);
}

at::Tensor ints(const Ints& values) {
  return at::tensor(values, at::kInt);
}

Ints list(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.to(at::kInt).contiguous();
  const int32_t* data = flat.const_data_ptr<int32_t>();
  return {data, data + flat.numel()};
}

struct ThdCase {
  std::string name;
  int64_t rows, length;
  Table seq_lens;
  Table seq_lens_padded;  // empty = not given
  Ints cu;
  Ints cu_padded;  // empty = absent
  int32_t max_seqlen = 0;
  std::string pads = "";  // corrected only; x = pad
};

ThdLengths lengths_of(const ThdCase& c, Rule rule) {
  std::optional<at::Tensor> padded;
  if (!c.seq_lens_padded.empty()) padded = tensor_of(c.seq_lens_padded);
  return thd_lengths(tensor_of(c.seq_lens), padded, kSentinel, c.rows, c.length,
                     rule);
}

void expect_lengths(const ThdLengths& got, const ThdCase& c) {
  EXPECT_EQ(list(got.cu), c.cu);
  EXPECT_EQ(got.cu.scalar_type(), at::kInt);
  EXPECT_EQ(got.cu_padded.has_value(), !c.cu_padded.empty());
  if (got.cu_padded) {
    EXPECT_EQ(list(*got.cu_padded), c.cu_padded);
  }
  EXPECT_EQ(got.max_seqlen.has_value(), c.cu.size() > 1);
  if (got.max_seqlen) {
    EXPECT_EQ(got.max_seqlen->dim(), 0);
    EXPECT_EQ(got.max_seqlen->item<int32_t>(), c.max_seqlen);
  }
}

/// The worked examples of the specification (2.2), for both rules.
std::vector<ThdCase> thd_cases() {
  return {
      {"OneDocumentAbsorbed", 1, 8, {{5}}, {{8}}, {0, 8}, {}, 8, ".....xxx"},
      {"WithoutSlots", 1, 8, {{5}}, {}, {0, 5}, {}, 5, ".....xxx"},
      {"PadsInside",
       1,
       8,
       {{3, 2}},
       {{4, 4}},
       {0, 3, 5},
       {0, 4, 8},
       3,
       "...x..xx"},
      {"TailAbsorbed", 1, 8, {{3, 2}}, {{3, 2}}, {0, 3, 8}, {}, 5, ".....xxx"},
      {"TwoRows",
       2,
       6,
       {{6}, {3}},
       {{6}, {6}},
       {0, 6, 12},
       {},
       6,
       ".........xxx"},
      {"ShortRowFirst",
       2,
       6,
       {{3}, {6}},
       {{6}, {6}},
       {0, 3, 9},
       {0, 6, 12},
       6,
       "...xxx......"},
      {"OnlySentinels",
       1,
       8,
       {{kSentinel}},
       {{kSentinel}},
       {0},
       {},
       0,
       "xxxxxxxx"},
      {"OneSlotForAll",
       1,
       8,
       {{3, 2}},
       {{8, kSentinel}},
       {0, 3, 5},
       {0, 8},
       3,
       ".....xxx"},
  };
}

class ThdLengthsOf : public ::testing::TestWithParam<ThdCase> {};
INSTANTIATE_TEST_SUITE_P(SpecExamples, ThdLengthsOf,
                         ::testing::ValuesIn(thd_cases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(ThdLengthsOf, AreTheReferencesUnderItsRule) {
  const ThdLengths got = lengths_of(GetParam(), Rule::reference);
  expect_lengths(got, GetParam());
  EXPECT_FALSE(got.padding_mask.has_value());
}

TEST_P(ThdLengthsOf, AreTheSameWhereTheReferenceIsRight) {
  const ThdLengths got = lengths_of(GetParam(), Rule::corrected);
  expect_lengths(got, GetParam());
  ASSERT_TRUE(got.padding_mask.has_value());
  std::string pads;
  for (int32_t pad : list(*got.padding_mask)) pads += pad ? 'x' : '.';
  EXPECT_EQ(pads, GetParam().pads);
}

TEST(ThdLengthsAlone, PutLaterRowsWhereTheyLie) {
  // Without slots, the reference starts row 1 at token 3.
  const ThdCase c{"", 2, 6, {{3}, {6}}, {}, {0, 3, 9}, {0, 6, 12}, 6};
  expect_lengths(lengths_of(c, Rule::corrected), c);
  ThdCase reference = c;
  reference.cu_padded = {};
  expect_lengths(lengths_of(reference, Rule::reference), reference);
}

TEST(ThdLengthsAlone, GiveARowWithoutDocumentsToTheSlotBeforeIt) {
  const ThdCase c{"",
                  3,
                  4,
                  {{4}, {kSentinel}, {2}},
                  {{4}, {kSentinel}, {4}},
                  {0, 4, 6},
                  {0, 8, 12},
                  4};
  expect_lengths(lengths_of(c, Rule::corrected), c);
}

TEST(ThdLengthsAlone, LeaveWhatFollowsTheLastDocumentBehindIt) {
  const ThdCase c{"", 2, 4, {{2}, {kSentinel}}, {}, {0, 2}, {}, 2};
  expect_lengths(lengths_of(c, Rule::corrected), c);
  expect_lengths(lengths_of(c, Rule::reference), c);
}

TEST(ThdLengthsAlone, MakeRowsBeforeTheFirstDocumentASlotOfTheirOwn) {
  const ThdCase c{"", 2, 4, {{kSentinel}, {2}}, {}, {0, 0, 2}, {0, 4, 6}, 2};
  expect_lengths(lengths_of(c, Rule::corrected), c);
}

TEST(ThdLengthsAlone, RefuseRowsThatOverflowOnlyWhenCorrected) {
  const ThdCase c{"", 1, 8, {{3, 5}}, {{3, 6}}, {0, 3, 8}, {0, 3, 9}, 5};
  expect_lengths(lengths_of(c, Rule::reference), c);
  EXPECT_EQ(message_of([&] { lengths_of(c, Rule::corrected); }),
            "thd_lengths: `seq_lens_padded` of row 0 takes 3 + 6 tokens but "
            "the row has 8; shorten the lengths or widen the row");
}

struct PartitionCase {
  std::string name;
  Ints cu;
  int64_t total;
  Rule rule;
  std::vector<Ints> ranks;
};

class DocumentPartition : public ::testing::TestWithParam<PartitionCase> {};
INSTANTIATE_TEST_SUITE_P(SpecExamples, DocumentPartition,
                         ::testing::ValuesIn(std::vector<PartitionCase>{
                             {"TwoDocuments",
                              {0, 8, 24},
                              24,
                              Rule::reference,
                              {{0, 1, 6, 7, 8, 9, 10, 11, 20, 21, 22, 23},
                               {2, 3, 4, 5, 12, 13, 14, 15, 16, 17, 18, 19}}},
                             {"EmptyDocument",
                              {0, 4, 4, 12},
                              12,
                              Rule::reference,
                              {{0, 3, 4, 5, 10, 11}, {1, 2, 6, 7, 8, 9}}},
                             {"TailLostByTheReference",
                              {0, 8, 16},
                              24,
                              Rule::reference,
                              {{0, 1, 6, 7, 8, 9, 14, 15, 16, 17, 18, 19},
                               {2, 3, 4, 5, 10, 11, 12, 13, 14, 15, 16, 17}}},
                             {"TailKept",
                              {0, 8, 16},
                              24,
                              Rule::corrected,
                              {{0, 1, 6, 7, 8, 9, 14, 15, 16, 17, 22, 23},
                               {2, 3, 4, 5, 10, 11, 12, 13, 18, 19, 20, 21}}},
                         }),
                         [](const auto& info) { return info.param.name; });

TEST_P(DocumentPartition, GivesEachRankItsChunks) {
  const PartitionCase& c = GetParam();
  const auto ranks = static_cast<int>(c.ranks.size());
  for (int rank = 0; rank < ranks; ++rank) {
    const at::Tensor got =
        document_partition(ints(c.cu), c.total, ranks, rank, c.rule);
    EXPECT_EQ(got.scalar_type(), at::kInt);
    EXPECT_EQ(list(got), test::at(c.ranks, rank));
  }
}

TEST(DocumentPartitionAlone, HoldsEveryTokenOnceUnderBothRules) {
  for (int ranks : {1, 2, 3, 4, 7}) {
    const int unit = 2 * ranks;
    const Ints cu{0, unit, unit, 4 * unit};
    for (Rule rule : {Rule::corrected, Rule::reference}) {
      std::vector<int32_t> held;
      for (int rank = 0; rank < ranks; ++rank) {
        for (int32_t t :
             list(document_partition(ints(cu), 4 * unit, ranks, rank, rule))) {
          held.push_back(t);
        }
      }
      std::ranges::sort(held);
      ASSERT_EQ(std::ssize(held), 4 * unit);
      for (int t = 0; t < 4 * unit; ++t) EXPECT_EQ(test::at(held, t), t);
    }
  }
}

TEST(PaddedWindows, AreTheSpecsExamples) {
  struct Case {
    Ints cu, cu_padded, begin, end;
  };
  for (const Case& c : std::vector<Case>{
           {{0, 2, 5},
            {0, 4, 8},
            {0, 0, 0, 0, 4, 4, 4, 4},
            {1, 2, 2, 2, 5, 6, 7, 7}},
           {{0, 0, 3}, {0, 2, 6}, {0, 0, 2, 2, 2, 2}, {1, 1, 3, 4, 5, 5}},
           {{0, 2, -1000}, {0, 3, -1000}, {0, 0, 0}, {1, 2, 2}},
           {{0}, {0}, {}, {}}}) {
    const KeyWindows windows = padded_windows(ints(c.cu), ints(c.cu_padded));
    EXPECT_EQ(list(windows.begin), c.begin);
    EXPECT_EQ(list(windows.end), c.end);
    EXPECT_EQ(windows.begin.scalar_type(), at::kInt);
    EXPECT_EQ(windows.end.scalar_type(), at::kInt);
  }
}

TEST(CompactWindows, StartWithTheDocumentAndEndWithTheQuery) {
  const KeyWindows windows = compact_windows(ints({0, 2, 2, 5, -1000}));
  EXPECT_EQ(list(windows.begin), (Ints{0, 0, 2, 2, 2}));
  EXPECT_EQ(list(windows.end), (Ints{1, 2, 3, 4, 5}));
  EXPECT_EQ(windows.begin.scalar_type(), at::kInt);
  EXPECT_EQ(windows.end.scalar_type(), at::kLong);
}

TEST(PadsOfMask, FollowEachRule) {
  const at::Tensor integers = at::ones({1, 1, 2, 2}, at::kLong);
  // The reference reads integers as additive.
  EXPECT_TRUE(pads_of_mask(integers, Rule::reference).all().item<bool>());
  EXPECT_NE(message_of([&] { pads_of_mask(integers, Rule::corrected); }),
            "accepted");
  const at::Tensor flat = at::tensor({1, 2, 0}, at::kLong).view({1, 3});
  for (Rule rule : {Rule::corrected, Rule::reference}) {
    EXPECT_EQ(list(pads_of_mask(flat, rule)), (Ints{0, 0, 1}));
  }
}

TEST(DenseCausalMask, AllowsWhatTheFormulaAllows) {
  const at::Tensor positions = at::tensor({4, 5, 1, 9}, at::kLong).view({2, 2});
  const at::Tensor pads =
      at::tensor({0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0}, at::kLong)
          .to(at::kBool)
          .view({2, 6});
  for (std::optional<int64_t> window :
       {std::optional<int64_t>{}, std::optional<int64_t>{2},
        std::optional<int64_t>{0}}) {
    for (at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      const at::Tensor mask =
          dense_causal_mask(positions, 6, dtype, pads, window);
      ASSERT_EQ(mask.sizes(), (std::vector<int64_t>{2, 1, 2, 6}));
      ASSERT_EQ(mask.scalar_type(), dtype);
      for (int64_t b = 0; b < 2; ++b) {
        for (int64_t i = 0; i < 2; ++i) {
          for (int64_t k = 0; k < 6; ++k) {
            const int64_t position = positions[b][i].item<int64_t>();
            const bool allowed = k <= position &&
                                 (!window || position - k < *window) &&
                                 !pads[b][k].item<bool>();
            const double got = mask[b][0][i][k].item<double>();
            EXPECT_TRUE(allowed ? got == 0 : got < -6e4);
            EXPECT_TRUE(std::isfinite(got));
          }
        }
      }
    }
  }
  EXPECT_EQ(dense_causal_mask(at::arange(3), 3, at::kFloat, {}, {}).sizes(),
            (std::vector<int64_t>{1, 1, 3, 3}));
}

class ReferenceRefusal : public ::testing::TestWithParam<Refusal> {};
TEST_P(ReferenceRefusal, SaysWhatCame) {
  EXPECT_EQ(message_of(GetParam().call), GetParam().message);
}

void partition(const Ints& cu, int64_t total, int ranks, int rank) {
  document_partition(ints(cu), total, ranks, rank, Rule::corrected);
}

INSTANTIATE_TEST_SUITE_P(
    Refused, ReferenceRefusal,
    ::testing::ValuesIn(std::vector<Refusal>{
        {"FloatLengths",
         [] {
           thd_lengths(at::ones({1, 1}), {}, kSentinel, 1, 4, Rule::corrected);
         },
         "thd_lengths: `seq_lens` is float32 [1, 1]; expected integers with 2 "
         "axes"},
        {"OtherRows",
         [] {
           thd_lengths(tensor_of({{4}}), {}, kSentinel, 2, 4, Rule::corrected);
         },
         "thd_lengths: `seq_lens` is int64 [1, 1]; expected [2, documents]"},
        {"NegativeLength",
         [] {
           thd_lengths(tensor_of({{-1}}), {}, kSentinel, 1, 4, Rule::corrected);
         },
         "thd_lengths: `seq_lens` of row 0 holds -1; lengths are not negative "
         "(is this the sentinel?)"},
        {"OffsetBeyond32Bits",
         [] {
           thd_lengths(tensor_of({{int64_t{1} << 31}}), {}, kSentinel, 1, 8,
                       Rule::reference);
         },
         "thd_lengths: an offset of 2147483648 tokens does not fit 32 bits; "
         "use fewer tokens in a stream"},
        {"WideOffsets",
         [] { document_partition(at::arange(2), 4, 2, 0, Rule::corrected); },
         "document_partition: `cu` is int64 [2]; expected int32 [documents + "
         "1]"},
        {"RankTooHigh", [] { partition({0, 4}, 4, 2, 2); },
         "document_partition: rank 2 of 2"},
        {"OddTotal", [] { partition({0, 4}, 6, 2, 0); },
         "document_partition: 6 tokens do not split over 2 ranks in 2 equal "
         "parts each; pad to 8"},
        {"NoTotal", [] { partition({0, 0}, 0, 2, 0); },
         "document_partition: 0 tokens do not split over 2 ranks in 2 equal "
         "parts each; pad to 4"},
        {"OddOffset", [] { partition({0, 6, 8}, 8, 2, 0); },
         "document_partition: offset 6 is not a multiple of 2 x 2 ranks; pad "
         "every document to one"},
        {"FallingOffsets", [] { partition({0, 8, 4}, 8, 2, 0); },
         "document_partition: cumulative lengths fall from 8 to 4"},
        {"OffsetsBeyondTheStream", [] { partition({0, 8}, 4, 2, 0); },
         "Packing: the slots hold 8 tokens but the stream has 4; shorten the "
         "documents or lengthen the stream"},
        {"OtherDocuments",
         [] { padded_windows(ints({0, 2}), ints({0, 2, 4})); },
         "padded_windows: 1 documents in `cu_seqlens` but 2 in "
         "`cu_seqlens_padded`"},
        {"WindowsBeyond32Bits",
         [] {
           const at::Tensor cu =
               at::tensor(std::vector<int64_t>{0, int64_t{1} << 40}, at::kLong);
           padded_windows(cu, cu);
         },
         "padded_windows: 1099511627776 tokens do not fit 32-bit windows"},
        {"CompactBeyond32Bits",
         [] {
           compact_windows(at::tensor(std::vector<int64_t>{0, int64_t{1} << 40},
                                      at::kLong));
         },
         "compact_windows: 1099511627776 tokens do not fit 32-bit windows"},
        {"NoStart", [] { compact_windows(ints({2, 4})); },
         "compact_windows: cumulative lengths start with 0"},
        {"IntegerMask",
         [] { dense_causal_mask(at::arange(2), 2, at::kLong, {}, {}); },
         "dense_causal_mask: the mask is additive, so its type is floating "
         "point"},
        {"PadsOfOtherLength",
         [] {
           dense_causal_mask(at::arange(2), 2, at::kFloat,
                             at::zeros({1, 3}, at::kBool), {});
         },
         "dense_causal_mask: the padding mask is bool [1, 3]; expected [1, 2]"},
    }),
    test::refusal_name);

}  // namespace
}  // namespace longspan::nemo
