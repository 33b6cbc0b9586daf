#include "longspan/batch/groups.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/support/values.h"

namespace longspan {
namespace {

using test::message_of;
using Groups = std::vector<std::vector<TokenRange>>;

/// Row 0: documents of 4 and 5 tokens; row 1: one of 7 and two pads.
RowBatch rows_with(const at::Tensor& kinds) {
  return read_rows(
      {{"input_ids", at::arange(18).view({2, 9})},
       {"mm_token_type_ids", kinds},
       {"seq_lens", at::tensor({4, 5, 7, -1000}).view({2, 2})},
       {"seq_lens_padded", at::tensor({4, 5, 9, -1000}).view({2, 2})}});
}

RowBatch two_rows() {
  return rows_with(at::tensor({0, 1, 1, 1, 1, 2, 0, 3, 1,  //
                               1, 1, 0, 2, 0, 0, 1, 0, 0})
                       .view({2, 9}));
}

Groups images(const PackedBatch& batch) {
  return groups_of(batch, "mm_token_type_ids", {1, 2});
}

TEST(GroupsOf, AreRunsOfTheseKinds) {
  const PackedBatch rows = pack(two_rows(), Form::rows);
  EXPECT_EQ(images(rows), (Groups{{{1, 6}, {8, 9}}, {{0, 2}, {3, 4}, {6, 7}}}));
  EXPECT_EQ(groups_of(rows, "mm_token_type_ids", {3}), (Groups{{{7, 8}}, {}}));
  EXPECT_EQ(groups_of(rows, "mm_token_type_ids", {}), (Groups{{}, {}}));
}

TEST(GroupsOf, StandWhereTheTokensAreLaid) {
  EXPECT_EQ(images(pack(two_rows(), Form::stream)),
            (Groups{{{1, 6}, {8, 11}, {12, 13}, {15, 16}}}));
  // Documents of 4, 5 and 7 tokens in slots of 6, 6 and 12.
  EXPECT_EQ(images(pad(pack(two_rows(), Form::stream), {6, 1})),
            (Groups{{{1, 4}, {6, 8}, {10, 11}, {12, 14}, {15, 16}, {18, 19}}}));
}

TEST(GroupsOf, RefusesWhatIsNoNumberForEachToken) {
  EXPECT_EQ(message_of([] {
              images(pack(rows_with(at::zeros({2, 9})), Form::stream));
            }),
            "groups_of: `mm_token_type_ids` is float32 [18] once packed; "
            "expected one whole number a token");
  EXPECT_NE(
      message_of([] {
        images(pack(rows_with(at::zeros({2, 9, 1}, at::kLong)), Form::rows));
      }).find("expected one whole number a token"),
      std::string::npos);
}

}  // namespace
}  // namespace longspan
