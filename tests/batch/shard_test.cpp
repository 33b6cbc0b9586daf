#include "longspan/batch/shard.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tests/support/property.h"
#include "tests/support/values.h"

namespace longspan {
namespace {

using test::message_of;
using test::OwnershipCase;
using test::Refusal;

at::Tensor ids(int64_t rows, int64_t length) {
  return at::arange(rows).view({rows, 1}) * 1000 + at::arange(length);
}

/// A packing as one loaded row with lengths, so that random packings of the
/// core tests become batches: the tail is one more document without tokens.
PackedBatch stream_of(const test::PackingCase& c) {
  std::vector<int64_t> lengths, slots;
  for (const auto& document : c.documents) {
    lengths.push_back(document.length);
    slots.push_back(document.slot);
  }
  lengths.push_back(0);
  slots.push_back(c.tail);
  const auto row = [](const std::vector<int64_t>& list) {
    return at::tensor(list, at::kLong).unsqueeze(0);
  };
  return pack(read_rows({{"input_ids", ids(1, c.tokens())},
                         {"seq_lens", row(lengths)},
                         {"seq_lens_padded", row(slots)}}),
              Form::stream);
}

/// Cuts a stream over all ranks; nothing is lost, doubled or moved.
void every_token_is_held_once(const OwnershipCase& c) {
  const PackedBatch batch = stream_of(c.packing);
  const Packing packing = c.packing.packing();
  const Ownership ownership = c.ownership();
  const auto shares = c.shares();
  std::vector<at::Tensor> shards;
  std::vector<at::Tensor> pads;
  for (int rank = 0; rank < c.ranks; ++rank) {
    const LocalBatch local = shard(batch, ownership, rank);
    const auto& share = test::at(shares, rank);
    const at::Tensor held = at::tensor(share, at::kLong);
    // Loaded tokens are numbered by their column, which is their place.
    ASSERT_TRUE(find_tensor(local.tokens, "input_ids").equal(held));
    ASSERT_TRUE(local.cut.global_tokens().equal(held));
    ASSERT_EQ(local.cut.local_tokens(), std::ssize(share));
    const at::Tensor positions = find_tensor(local.tokens, "position_ids");
    const at::Tensor padding = find_tensor(local.tokens, "padding_mask");
    for (int64_t i = 0; i < std::ssize(share); ++i) {
      const int64_t token = test::at(share, i);
      ASSERT_EQ(positions[i].item<int64_t>(), packing.locate(token).position);
      ASSERT_EQ(padding[i].item<bool>(), packing.is_pad(token));
    }
    shards.push_back(held);
    pads.push_back(padding);
  }
  const Cut cut = shard(batch, ownership, 0).cut;
  const at::Tensor whole = at::arange(packing.tokens());
  ASSERT_TRUE(unshard(shards, cut).equal(whole.unsqueeze(0)));
  ASSERT_TRUE(unshard(shards, cut, {.trim = false}).equal(whole));
  const at::Tensor padding = unshard(pads, cut, {.trim = false});
  ASSERT_EQ(padding.logical_not().sum().item<int64_t>(), packing.real_tokens());
}

TEST(Shard, HoldsEveryTokenOnceForEveryOwnership) {
  test::for_all(
      300,
      [](test::Random& random) {
        return test::draw_ownership(random, test::draw_packing(random, 24, 5));
      },
      every_token_is_held_once);
}

TEST(Shard, HoldsEveryTokenOnceInSmallStreams) {
  for (const test::PackingCase& packing : test::all_packings(2, 2, {0, 1})) {
    for (int ranks : {1, 2, 3}) {
      std::vector<OwnershipCase> cases;
      for (OwnershipKind kind : test::all_kinds()) {
        cases.push_back(OwnershipCase{kind, ranks, packing}.fitted());
      }
      test::for_each(cases, every_token_is_held_once);
    }
  }
}

TEST(Shard, GivesTensorsOfTheirOwn) {
  const at::Tensor loaded = ids(2, 4);
  const at::Tensor copy = loaded.clone();
  for (Form form : {Form::rows, Form::stream}) {
    const PackedBatch batch = pack(read_rows({{"input_ids", loaded}}), form);
    const LocalBatch local =
        shard(batch, Ownership::contiguous(batch.tokens(), 1), 0);
    at::Tensor share = find_tensor(local.tokens, "input_ids");
    share.zero_();
    EXPECT_TRUE(loaded.equal(copy));
  }
}

TEST(Shard, DerivesWhatTheBatchDidNotBring) {
  const at::Tensor given = ids(2, 4) + 7;
  const PackedBatch batch =
      pack(read_rows({{"input_ids", ids(2, 4)}, {"position_ids", given}}),
           Form::rows);
  const LocalBatch local = shard(batch, Ownership::head_tail(4, 2), 1);
  ASSERT_EQ(local.tokens.size(), 3u);
  EXPECT_TRUE(local.tokens[1].second.equal(given.narrow(1, 1, 2)));
  EXPECT_EQ(local.tokens[2].first, "padding_mask");
  EXPECT_FALSE(local.tokens[2].second.any().item<bool>());
}

TEST(Shard, KeepsShapesWithoutRowsOrTokens) {
  const PackedBatch batch =
      pad(pack(read_rows({{"input_ids", ids(0, 3)}}), Form::rows),
          {.total_multiple = 4});
  const LocalBatch local = shard(batch, Ownership::contiguous(4, 2), 1);
  for (const auto& [key, tensor] : local.tokens) {
    EXPECT_EQ(tensor.sizes(), (std::vector<int64_t>{0, 2})) << key;
  }
}

TEST(Shard, PassesGradientsBothWays) {
  at::Tensor x = at::arange(24, at::kDouble).view({2, 4, 3});
  x.set_requires_grad(true);
  const PackedBatch batch =
      pad(pack(read_rows({{"inputs_embeds", x}}), Form::stream),
          {.slot_multiple = 6});
  const Ownership ownership =
      Ownership::per_document_head_tail(batch.packings[0], 3);
  std::vector<at::Tensor> shares;
  Cut cut = shard(batch, ownership, 0).cut;
  for (int rank = 0; rank < 3; ++rank) {
    shares.push_back(
        find_tensor(shard(batch, ownership, rank).tokens, "inputs_embeds"));
  }
  const at::Tensor back = unshard(shares, cut);
  EXPECT_TRUE(back.equal(x));
  const at::Tensor y = at::arange(24, at::kDouble).flip(0).view({2, 4, 3});
  EXPECT_TRUE(torch::autograd::grad({back}, {x}, {y})[0].equal(y));
}

TEST(TakeShare, CutsAnyAxisIntoNewMemory) {
  const at::Tensor tensor = ids(3, 8);
  const Ownership ownership = Ownership::head_tail(8, 2);
  const at::Tensor share = take_share(tensor, ownership, 0, -1);
  EXPECT_TRUE(share.equal(
      at::cat({tensor.narrow(1, 0, 2), tensor.narrow(1, 6, 2)}, 1)));
  EXPECT_TRUE(take_share(tensor.t(), ownership, 0, 0).equal(share.t()));
  EXPECT_TRUE(take_share(tensor.t(), ownership, 0, 0).is_contiguous());
}

TEST(Unshard, FillsWhatPackingLeftBehind) {
  const at::Tensor mask = at::tensor({0, 1, 1, 0}, at::kLong).view({1, 4});
  const PackedBatch batch =
      pack(read_rows({{"input_ids", ids(1, 4)}, {"attention_mask", mask}}),
           Form::stream);
  const LocalBatch local = shard(batch, Ownership::of_sizes({2}), 0);
  const at::Tensor share = find_tensor(local.tokens, "input_ids");
  EXPECT_TRUE(unshard(share, local.cut, {.fill = -9})
                  .equal(at::tensor({-9, 1, 2, -9}, at::kLong).view({1, 4})));
}

PackedBatch some_rows() {
  return pack(read_rows({{"input_ids", ids(2, 4)}}), Form::rows);
}

Cut some_cut() {
  return shard(some_rows(), Ownership::contiguous(4, 2), 0).cut;
}

class ShardRefusal : public ::testing::TestWithParam<Refusal> {};
TEST_P(ShardRefusal, SaysWhatCame) {
  EXPECT_EQ(message_of(GetParam().call), GetParam().message);
}

INSTANTIATE_TEST_SUITE_P(
    Refused, ShardRefusal,
    ::testing::ValuesIn(std::vector<Refusal>{
        {"RankTooHigh",
         [] { shard(some_rows(), Ownership::contiguous(4, 2), 2); },
         "shard: rank 2 of 2"},
        {"NegativeRank",
         [] { shard(some_rows(), Ownership::contiguous(4, 2), -1); },
         "shard: rank -1 of 2"},
        {"OtherTokens",
         [] { shard(some_rows(), Ownership::contiguous(8, 2), 0); },
         "shard: the ownership has 8 tokens but the batch 4; make it from the "
         "padded batch"},
        {"TakeShareAxis",
         [] { take_share(ids(1, 4), Ownership::contiguous(4, 2), 0, 2); },
         "take_share: axis 2 of int64 [1, 4]"},
        {"TakeShareTokens",
         [] { take_share(ids(1, 5), Ownership::contiguous(4, 2), 0, 1); },
         "take_share: axis 1 of int64 [1, 5] is not the 4 tokens of the " +
             Ownership::contiguous(4, 2).to_string()},
        {"OneShareOfTwo", [] { unshard(ids(2, 2), some_cut()); },
         "unshard: axis 1 of int64 [2, 2] holds 2 tokens, but the 2 shares "
         "have 4 together; give the tensors of all ranks, in rank order"},
        {"ThreeSharesOfTwo",
         [] { unshard(std::vector<at::Tensor>(3, ids(2, 2)), some_cut()); },
         "unshard: 3 tensors for 2 ranks; give one for each rank"},
        {"NoShare",
         [] { unshard(std::vector<at::Tensor>{ids(2, 2), {}}, some_cut()); },
         "unshard: rank 1 gave no tensor"},
        {"ShareOfOtherLength",
         [] { unshard(std::vector{ids(2, 2), ids(2, 3)}, some_cut()); },
         "unshard: rank 1 gave int64 [2, 3]; expected its 2 tokens at axis 1"},
        {"SharesOfOtherTypes",
         [] {
           unshard(std::vector{ids(2, 2), ids(2, 2).to(at::kInt)}, some_cut());
         },
         "unshard: rank 1 gave int32 [2, 2] on cpu but rank 0 int64 [2, 2] on "
         "cpu; only their tokens may differ"},
        {"SharesOfOtherRows",
         [] { unshard(std::vector{ids(2, 2), ids(3, 2)}, some_cut()); },
         "unshard: rank 1 gave int64 [3, 2] on cpu but rank 0 int64 [2, 2] on "
         "cpu; only their tokens may differ"},
        {"UnshardAxis", [] { unshard(ids(2, 4), some_cut(), {.axis = 2}); },
         "unshard: axis 2 of int64 [2, 4]"},
    }),
    test::refusal_name);

}  // namespace
}  // namespace longspan
