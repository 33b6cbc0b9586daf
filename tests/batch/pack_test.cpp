#include "longspan/batch/pack.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>

#include "tests/support/values.h"

namespace longspan {
namespace {

using test::message_of;
using test::Refusal;

at::Tensor ids(int64_t rows, int64_t length) {
  return at::arange(rows).view({rows, 1}) * 1000 + at::arange(length);
}

at::Tensor longs(const std::vector<int64_t>& values) {
  return at::tensor(values, at::kLong);
}

/// Two rows of six: documents of 2 (slot 3) and 1 (slot 3), then one of 5.
RowBatch two_rows() {
  return read_rows(
      {{"input_ids", ids(2, 6)},
       {"labels", ids(2, 6) + 500000},
       {"position_ids", ids(2, 6) + 7},
       {"seq_lens", at::stack({longs({2, 1}), longs({5, -1000})})},
       {"seq_lens_padded", at::stack({longs({3, 3}), longs({6, -1000})})}});
}

TEST(Pack, LaysDocumentsEndToEnd) {
  const PackedBatch packed = pack(two_rows(), Form::stream);
  EXPECT_EQ(packed.packings, std::vector{Packing::of({2, 1, 5}, {3, 3, 6})});
  EXPECT_TRUE(packed.tensor("input_ids").equal(ids(2, 6).flatten()));
}

TEST(Pack, LeavesRowsAsTheyAre) {
  const PackedBatch packed = pack(two_rows(), Form::rows);
  EXPECT_EQ(packed.packings,
            (std::vector{Packing::of({2, 1}, {3, 3}), Packing::of({5}, {6})}));
  EXPECT_TRUE(packed.tensor("input_ids").equal(ids(2, 6)));
}

TEST(Pack, LeavesThePadsAroundMaskedDocumentsBehind) {
  const RowBatch rows =
      read_rows({{"input_ids", ids(2, 4)},
                 {"attention_mask",
                  at::stack({longs({0, 1, 1, 0}), longs({1, 2, 2, 0})})}});
  const PackedBatch stream = pack(rows, Form::stream);
  EXPECT_EQ(stream.packings, std::vector{Packing::of({2, 1, 2})});
  EXPECT_TRUE(
      stream.tensor("input_ids").equal(longs({1, 2, 1000, 1001, 1002})));
  // In rows, pads before the first document are a document of their own.
  const PackedBatch in_rows = pack(rows, Form::rows);
  EXPECT_EQ(in_rows.packings, (std::vector{Packing::of({0, 2}, {1, 3}),
                                           Packing::of({1, 2}, {1, 3})}));
}

TEST(Pad, MovesDocumentsApartAndFills) {
  const PackedBatch padded =
      pad(pack(two_rows(), Form::stream), {.slot_multiple = 4});
  EXPECT_EQ(padded.packings, std::vector{Packing::of({2, 1, 5}, {4, 4, 8})});
  EXPECT_TRUE(padded.tensor("input_ids")
                  .equal(longs({0, 1, 2, 0, 3, 4, 5, 0, 1000, 1001, 1002, 1003,
                                1004, 1005, 0, 0})));
  EXPECT_TRUE(padded.tensor("labels")
                  .index({at::tensor({3, 7, 14, 15})})
                  .equal(at::full({4}, -100, at::kLong)));
  EXPECT_TRUE(padded.tensor("position_ids")
                  .equal(longs({7, 8, 9, 10, 10, 11, 12, 13, 1007, 1008, 1009,
                                1010, 1011, 1012, 1013, 1014})));
}

TEST(Pad, KeepsWhatEarlierPaddingAdded) {
  const PackedBatch slots =
      pad(pack(two_rows(), Form::stream), {.slot_multiple = 4});
  const PackedBatch both = pad(slots, {.total_multiple = 9});
  EXPECT_EQ(both.packings, std::vector{Packing::of({2, 1, 5}, {4, 4, 8}, 18)});
  EXPECT_TRUE(both.tensor("input_ids")
                  .narrow(0, 0, 16)
                  .equal(slots.tensor("input_ids")));
  const PackedBatch rows =
      pad(pack(two_rows(), Form::rows), {.total_multiple = 4});
  EXPECT_EQ(pad(rows, {.total_multiple = 3}).tokens(), 9);
  EXPECT_EQ(pad(rows, {}).tokens(), 8);
}

TEST(Pad, GivesTheRestOfARowToItsLastDocument) {
  const PackedBatch padded =
      pad(pack(two_rows(), Form::rows), {.total_multiple = 5});
  EXPECT_EQ(padded.packings,
            (std::vector{Packing::of({2, 1}, {3, 7}), Packing::of({5}, {10})}));
  EXPECT_TRUE(
      padded.tensor("position_ids").select(0, 1).equal(at::arange(10) + 1007));
}

TEST(PaddingFor, IsWhatAnOwnershipNeeds) {
  struct Case {
    OwnershipKind kind;
    Form form;
    int64_t share;
    int64_t slots, total;
  };
  for (const Case& c : std::vector<Case>{
           {OwnershipKind::contiguous, Form::rows, 1, 1, 3},
           {OwnershipKind::contiguous, Form::rows, 4, 1, 12},
           {OwnershipKind::head_tail, Form::rows, 1, 1, 6},
           {OwnershipKind::head_tail, Form::stream, 3, 1, 18},
           {OwnershipKind::per_document_head_tail, Form::stream, 1, 6, 1},
           {OwnershipKind::per_document_head_tail, Form::stream, 4, 12, 1}}) {
    const PadTo to = padding_for(c.kind, c.form, 3, c.share);
    EXPECT_EQ(to.slot_multiple, c.slots) << to_string(c.kind);
    EXPECT_EQ(to.total_multiple, c.total) << to_string(c.kind);
  }
}

class PackRefusal : public ::testing::TestWithParam<Refusal> {};
TEST_P(PackRefusal, SaysWhatCame) {
  EXPECT_EQ(message_of(GetParam().call), GetParam().message);
}

INSTANTIATE_TEST_SUITE_P(
    Refused, PackRefusal,
    ::testing::ValuesIn(std::vector<Refusal>{
        {"UnknownKey", [] { pack(two_rows(), Form::rows).tensor("label"); },
         "PackedBatch: no per-token tensor 'label'"},
        {"SlotsOfRows",
         [] { pad(pack(two_rows(), Form::rows), {.slot_multiple = 2}); },
         "pad: documents inside rows do not move; slots can only be rounded up "
         "in a stream"},
        {"NoMultiple",
         [] { pad(pack(two_rows(), Form::rows), {.total_multiple = 0}); },
         "round_up: multiple is 0; expected at least 1"},
        {"PerDocumentRows",
         [] {
           padding_for(OwnershipKind::per_document_head_tail, Form::rows, 2);
         },
         "padding_for: per-document head-tail cuts the documents of a stream; "
         "rows have head-tail"},
    }),
    test::refusal_name);

}  // namespace
}  // namespace longspan
