#include "longspan/batch/derive.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "longspan/batch/cut.h"
#include "tests/support/masks.h"
#include "tests/support/property.h"

namespace longspan {
namespace {

using test::message_of;
using test::SharedMaskCase;

template <class T>
std::vector<T> list(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.contiguous();
  const T* data = flat.const_data_ptr<T>();
  return {data, data + flat.numel()};
}

/// A share's tensors hold, token by token, what the whole stream's hold.
TEST(Derive, GivesSharesWhatTheStreamHas) {
  int windows = 0;
  test::for_all(
      300, [](test::Random& random) { return test::draw_shared_mask(random); },
      [&](const SharedMaskCase& c) {
        const Packing packing = c.mask.packing.packing();
        const Ownership ownership = c.owners.ownership();
        const Mask mask = c.mask.mask();
        for (int rank = 0; rank < ownership.ranks(); ++rank) {
          const at::Tensor tokens = token_indices(ownership, rank);
          const auto ranges = ownership.ranges_of(rank);
          const auto agrees = [&](const at::Tensor& share,
                                  const at::Tensor& whole) {
            return share.equal(whole.index_select(0, tokens));
          };
          ASSERT_TRUE(
              agrees(padding_mask(packing, ranges), padding_mask(packing)));
          ASSERT_TRUE(
              agrees(position_ids(packing, ranges), position_ids(packing)));
          ASSERT_TRUE(
              agrees(document_ids(packing, ranges), document_ids(packing)));
          if (!mask.is_one_range()) continue;
          ++windows;
          const KeyWindows share = key_windows(mask, ranges);
          const KeyWindows whole = key_windows(mask);
          ASSERT_TRUE(agrees(share.begin, whole.begin));
          ASSERT_TRUE(agrees(share.end, whole.end));
        }
      });
  EXPECT_GT(windows, 300) << "most random masks should be one range";
}

TEST(Derive, AgreesWithThePackingTokenByToken) {
  test::for_each(
      test::all_packings(2, 3, {0, 2}), [](const test::PackingCase& c) {
        const Packing packing = c.packing();
        const at::Tensor pads = padding_mask(packing);
        const auto positions = list<int64_t>(position_ids(packing));
        ASSERT_EQ(pads.scalar_type(), at::kBool);
        ASSERT_EQ(pads.numel(), packing.tokens());
        for (int64_t t = 0; t < packing.tokens(); ++t) {
          ASSERT_EQ(pads[t].item<bool>(), packing.is_pad(t));
          ASSERT_EQ(test::at(positions, t), packing.locate(t).position);
        }
        const KeyWindows windows = key_windows(Mask::causal(packing));
        for (int64_t q = 0; q < packing.tokens(); ++q) {
          const TokenRange keys = Mask::causal(packing).keys_of(q);
          ASSERT_EQ(windows.begin[q].item<int64_t>(), keys.begin);
          ASSERT_EQ(windows.end[q].item<int64_t>(), keys.end);
        }
      });
}

TEST(CumulativeLengths, AddUpRealAndPaddedLengths) {
  const Packing packing = Packing::of({2, 0, 3}, {4, 1, 3}, 10);
  EXPECT_EQ(list<int32_t>(cumulative_lengths(packing)),
            (std::vector<int32_t>{0, 2, 2, 5}));
  EXPECT_EQ(list<int32_t>(cumulative_padded_lengths(packing)),
            (std::vector<int32_t>{0, 4, 5, 8}));
  EXPECT_EQ(list<int32_t>(cumulative_lengths(Packing())),
            std::vector<int32_t>{0});
}

TEST(CumulativeLengths, RefuseWhat32BitsDoNotHold) {
  const int64_t most = std::numeric_limits<int32_t>::max();
  EXPECT_EQ(list<int32_t>(cumulative_lengths(Packing::of({most})))[1], most);
  EXPECT_EQ(message_of([&] { cumulative_lengths(Packing::of({most, 1})); }),
            "cumulative_lengths: 2147483648 tokens do not fit the 32-bit "
            "offsets that kernels take; use fewer tokens in a stream");
  const Packing padded = Packing::of({1}, {most + 1});
  EXPECT_EQ(list<int32_t>(cumulative_lengths(padded))[1], 1);
  EXPECT_EQ(message_of([&] { cumulative_padded_lengths(padded); }),
            "cumulative_padded_lengths: 2147483648 tokens do not fit the "
            "32-bit offsets that kernels take; use fewer tokens in a stream");
}

TEST(KeyWindowTensors, AreWideOnlyWhereTheyMustBe) {
  EXPECT_EQ(key_windows(Mask::causal(Packing::single(4))).begin.scalar_type(),
            at::kInt);
  const int64_t far = int64_t{1} << 31;
  const KeyWindows windows =
      key_windows(Mask::causal(Packing::of({far, 2})), {{far, far + 2}});
  EXPECT_EQ(list<int64_t>(windows.begin), (std::vector<int64_t>{far, far}));
  EXPECT_EQ(list<int64_t>(windows.end),
            (std::vector<int64_t>{far + 1, far + 2}));
}

TEST(Derive, RefusesTokensOutsideTheStream) {
  const Packing packing = Packing::single(4);
  EXPECT_EQ(message_of([&] { padding_mask(packing, {{2, 5}}); }),
            "write_pads: tokens [2, 5) of 4");
  EXPECT_EQ(message_of([&] { position_ids(packing, {{-1, 2}}); }),
            "write_positions: tokens [-1, 2) of 4");
}

}  // namespace
}  // namespace longspan
