#include "longspan/batch/lay_out.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "longspan/batch/shard.h"
#include "tests/support/values.h"

namespace longspan {
namespace {

using test::message_of;

/// Two rows of ten tokens, the first of them two documents.
RowBatch rows() {
  return read_rows(
      {{"input_ids", at::arange(20).view({2, 10})},
       {"seq_lens", at::tensor({3, 7, 10, -1000}, at::kLong).view({2, 2})}});
}

TEST(LayOut, FitsEveryNamedLayoutOverAnyNumberOfRanks) {
  for (const NamedLayout& layout : named_layouts()) {
    for (int ranks = 1; ranks <= 5; ++ranks) {
      for (int64_t share : {1, 3}) {
        const LaidOut laid = lay_out(rows(), layout, ranks, share);
        EXPECT_EQ(laid.packed.form, layout.form);
        EXPECT_EQ(laid.ownership.kind(), layout.kind);
        EXPECT_EQ(laid.ownership.tokens(), laid.packed.tokens());
        std::vector<at::Tensor> shares;
        for (int rank = 0; rank < ranks; ++rank) {
          const LocalBatch local = shard(laid.packed, laid.ownership, rank);
          EXPECT_EQ(local.cut.local_tokens() % share, 0) << layout.name;
          shares.push_back(find_tensor(local.tokens, "input_ids"));
        }
        const Cut cut = shard(laid.packed, laid.ownership, 0).cut;
        EXPECT_TRUE(unshard(shares, cut).equal(at::arange(20).view({2, 10})))
            << layout.name << " over " << ranks << " ranks";
      }
    }
  }
}

/// One row of documents of these lengths.
RowBatch documents(const std::vector<int64_t>& lengths) {
  const at::Tensor sizes = at::tensor(lengths, at::kLong).unsqueeze(0);
  return read_rows({{"input_ids", at::zeros({1, sizes.sum().item<int64_t>()},
                                            at::TensorOptions(at::kLong))},
                    {"seq_lens", sizes}});
}

TEST(FittingLayout, IsPerDocumentWhereSeveralShareARowAndPadsAreFew) {
  EXPECT_EQ(fitting_layout(documents({800, 400}), 4).name,
            "per-document-head-tail");
  // 8 tokens a document at 4 ranks: 7 pads of 801 + 399 tokens, then 14 of 700.
  EXPECT_EQ(fitting_layout(documents({801, 399}), 4).name,
            "per-document-head-tail");
  EXPECT_EQ(fitting_layout(documents({601, 97, 2}), 4).name, "head-tail");
  // Exactly 2 % is too much.
  EXPECT_EQ(fitting_layout(documents({98, 102}), 2).name, "head-tail");
  EXPECT_EQ(fitting_layout(documents({98, 106}), 2).name,
            "per-document-head-tail");
}

TEST(FittingLayout, IsHeadTailWhereEveryRowIsOneDocument) {
  EXPECT_EQ(fitting_layout(documents({800}), 4).name, "head-tail");
  EXPECT_EQ(fitting_layout(
                read_rows({{"input_ids", at::zeros({3, 64}, at::kLong)}}), 4)
                .name,
            "head-tail");
}

TEST(FittingLayout, IsHeadTailOnOneRank) {
  EXPECT_EQ(fitting_layout(documents({800, 400}), 1).name, "head-tail");
}

TEST(FittingLayout, CountsThePadsOfLargerShares) {
  EXPECT_EQ(fitting_layout(documents({800, 400}), 4, 100).name,
            "per-document-head-tail");
  EXPECT_EQ(fitting_layout(documents({800, 400}), 4, 64).name, "head-tail");
}

TEST(LayOut, AnOwnershipOfMoreTokensPadsTheEnd) {
  const auto owners = Ownership::of_sizes({9, 0, 3});
  const LaidOut laid = lay_out(rows(), owners, Form::rows);
  EXPECT_EQ(laid.packed.tokens(), 12);
  EXPECT_EQ(laid.ownership, owners);
  EXPECT_EQ(lay_out(rows(), Ownership::of_sizes({13, 7}), Form::stream)
                .packed.tokens(),
            20);
}

TEST(LayOut, PadRefusesABatchOfTheOtherForm) {
  EXPECT_EQ(message_of([] {
              pad(pack(rows(), Form::stream), layout_named("test", "head-tail"),
                  2);
            }),
            "pad: layout 'head-tail' cuts rows, but the batch is stream");
}

TEST(LayOut, RefusesSharesOfNothing) {
  EXPECT_NE(message_of([] {
              lay_out(rows(), layout_named("test", "head-tail"), 2, 0);
            }).find("shares of a multiple of 0 tokens"),
            std::string::npos);
}

}  // namespace
}  // namespace longspan
