#include "longspan/comm/agree.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "tests/comm/ranks.h"
#include "tests/support/values.h"

namespace longspan {
namespace {

using test::message_of;

TEST(Agree, SaysNothingWhereAllRanksAgree) {
  for (const int ranks : test::kSizes) {
    run_ranks(ranks, [](const Group& group) {
      const at::Tensor ids = at::arange(10);
      agree(group, {{"input_ids", hash_of(ids)}, {"ranks", 4}});
      agree(group, {});
      EXPECT_EQ(group.sent_bytes(), 2 * 512 * (group.size() - 1));
    });
  }
}

TEST(Agree, NamesFieldsAndRanksOnEveryRank) {
  run_ranks(4, [](const Group& group) {
    const bool odd = group.rank() % 2 == 1;
    EXPECT_EQ(message_of([&] {
                agree(group, {{"labels", 7}, {"input_ids", odd ? 1 : 2}});
              }),
              "agree: the ranks of the group were given different `input_ids` "
              "(ranks 1 and 3 differ from rank 0); feed every rank of a group "
              "the same batch");
    EXPECT_EQ(message_of([&] {
                agree(group, {{"labels", group.rank() == 2 ? 8 : 7},
                              {"input_ids", group.rank() == 0 ? 1 : 2}});
              }),
              "agree: the ranks of the group were given different `labels` "
              "(rank 2 differs from rank 0) and `input_ids` (ranks 1, 2 and 3 "
              "differ from rank 0); feed every rank of a group the same batch");
    // The group goes on.
    agree(group, {{"labels", 7}});
  });
}

TEST(Agree, NoticesOtherNames) {
  run_ranks(2, [](const Group& group) {
    std::vector<std::pair<std::string, uint64_t>> fields = {{"a", 1}};
    if (group.rank() == 1) fields.emplace_back("b", 0);
    EXPECT_EQ(message_of([&] { agree(group, fields); }),
              "agree: the ranks of the group compare different fields (rank 1 "
              "differs from rank 0); call it with the same names everywhere");
  });
}

TEST(Agree, RefusesTooManyFields) {
  EXPECT_EQ(message_of([] {
              agree(Group::solo(),
                    std::vector<std::pair<std::string, uint64_t>>(64));
            }),
            "agree: 64 fields; expected at most 63");
}

TEST(Hash, TellsTensorsApart) {
  const at::Tensor ids = at::arange(24);
  const std::vector<at::Tensor> others = {ids,
                                          ids.view({4, 6}),
                                          ids.flip(0),
                                          ids.to(at::kInt),
                                          ids.to(at::kDouble),
                                          ids.narrow(0, 0, 23),
                                          ids.narrow(0, 1, 23),
                                          at::zeros({0}),
                                          at::zeros({1}),
                                          at::zeros({2}),
                                          at::zeros({8}, at::kByte),
                                          at::zeros({9}, at::kByte),
                                          ids.roll(1),
                                          ids.roll(2)};
  std::set<uint64_t> hashes;
  for (const at::Tensor& tensor : others) hashes.insert(hash_of(tensor));
  EXPECT_EQ(hashes.size(), others.size());
  EXPECT_EQ(hash_of(ids), hash_of(ids.clone()));
  const at::Tensor table = ids.view({4, 6});
  EXPECT_EQ(hash_of(table.t()), hash_of(table.t().contiguous()));
}

TEST(Hash, DevicesMakeTheSame) {
  for (const int64_t length : {0, 1, 7, 8, 9, 100}) {
    const at::Tensor bytes = at::randint(0, 256, {length}, at::kByte);
    EXPECT_EQ(hash_bytes_by_operations(bytes),
              hash_bytes(bytes.const_data_ptr(), bytes.nbytes()));
  }
  const at::Tensor numbers = at::randn({33});
  EXPECT_EQ(hash_bytes_by_operations(numbers),
            hash_bytes(numbers.const_data_ptr(), numbers.nbytes()));
}

TEST(Hash, TellsLayoutsApart) {
  const Packing packing = Packing::of({4, 12});
  const std::vector<uint64_t> hashes = {
      hash_of(packing),
      hash_of(Packing::of({12, 4})),
      hash_of(Packing::of({4, 10}, {4, 12})),
      hash_of(Ownership::contiguous(16, 2)),
      hash_of(Ownership::contiguous(16, 4)),
      hash_of(Ownership::head_tail(16, 2)),
      hash_of(Ownership::per_document_head_tail(packing, 2)),
      hash_of(Ownership::of_sizes({8, 8})),
      hash_of(Ownership::of_sizes({9, 7}))};
  EXPECT_EQ(std::set(hashes.begin(), hashes.end()).size(), hashes.size());
  EXPECT_EQ(hash_of(packing), hash_of(Packing::of({4, 12})));
}

}  // namespace
}  // namespace longspan
