#include "longspan/ops/window_lists.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <vector>

#include "longspan/ops/document_windows.h"

namespace longspan {
namespace {

using Ints = std::vector<int64_t>;

Ints list(const at::Tensor& t) {
  const at::Tensor flat = t.to(at::kLong).contiguous().flatten();
  const int64_t* data = flat.const_data_ptr<int64_t>();
  return Ints(data, data + flat.numel());
}

at::Tensor ints(const Ints& values) {
  return at::tensor(values, at::kLong);
}

TEST(WindowLists, AreTheWindowAndThePoolsThatEnded) {
  const Pools pools{.count = 2, .ratio = 4};
  const at::Tensor lists = window_lists(ints({4, 5, 6, 7}), 8, 3, pools);
  EXPECT_EQ(list(lists), (Ints{2, 3, 4, 8, -1,  //
                               3, 4, 5, 8, -1,  //
                               4, 5, 6, 8, -1,  //
                               5, 6, 7, 8, 9}));
  EXPECT_EQ(list(ended_pools(ints({2, 3, 6, 7}), 4)), (Ints{0, 1, 1, 2}));
}

TEST(WindowLists, TakeOnlyPoolsThatAreThere) {
  const Pools pools{
      .count = 2, .ratio = 0, .chosen = ints({1, -1, 7}).view({1, 3})};
  EXPECT_EQ(list(window_lists(ints({1}), 4, 2, pools)),
            (Ints{0, 1, 5, -1, -1}));
}

TEST(HideListed, LeavesWhatTheMaskShows) {
  const at::Tensor lists = ints({0, 1, 2, 9}).view({1, 1, 4});
  const at::Tensor mask =
      at::tensor(std::vector<float>{0, -1, 0}).view({1, 1, 3});
  EXPECT_EQ(list(hide_listed(lists, mask)), (Ints{0, -1, 2, -1}));
}

TEST(DocumentWindows, ReachToTheEndOfTheStream) {
  const auto padded = document_windows(ints({0, 2, 5}), ints({0, 4, 8}), 9);
  EXPECT_EQ(list(padded.begin), (Ints{0, 0, 0, 0, 4, 4, 4, 4, 8}));
  EXPECT_EQ(list(padded.end), (Ints{1, 2, 2, 2, 5, 6, 7, 7, 9}));
  const auto compact = document_windows(ints({0, 2, -1000}), std::nullopt, 3);
  EXPECT_EQ(list(compact.begin), (Ints{0, 0, 2}));
  EXPECT_EQ(list(compact.end), (Ints{1, 2, 3}));
}

}  // namespace
}  // namespace longspan
