#include "longspan/ops/rotate_channels.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "longspan/ops/attend_dense.h"
#include "longspan/ops/index_scores.h"

namespace longspan {
namespace {

const at::TensorOptions kDoubles(at::kDouble);

TEST(RotateChannels, TurnsAndTurnsBack) {
  const at::Tensor x = at::randn({3, 2, 6}, kDoubles);
  const at::Tensor angles = at::randn({3, 1, 2}, kDoubles);
  for (ChannelPairs pairs : {ChannelPairs::interleaved, ChannelPairs::halves}) {
    const at::Tensor there = rotate_channels(x, angles.cos(), angles.sin(),
                                             {.first = -4, .pairs = pairs});
    EXPECT_TRUE(at::allclose(there.norm(2, -1), x.norm(2, -1)));
    EXPECT_FALSE(at::allclose(there, x));
    const at::Tensor back =
        rotate_channels(there, angles.cos(), angles.sin(),
                        {.first = 2, .pairs = pairs, .inverse = true});
    EXPECT_TRUE(at::allclose(back, x));
  }
}

TEST(AttendDense, IsTheShareThatASinkLeaves) {
  const at::Tensor q = at::zeros({1, 1, 1, 2}, kDoubles);
  const at::Tensor k = at::zeros({1, 1, 3, 2}, kDoubles);
  const at::Tensor v = at::ones({1, 1, 3, 1}, kDoubles);
  DenseOptions options;
  options.sink = at::zeros({1}, kDoubles);
  EXPECT_DOUBLE_EQ(attend_dense(q, k, v, options).out.item<double>(), 0.75);
  options.mask = at::zeros({3}, at::TensorOptions(at::kBool));
  const DenseAnswer blind = attend_dense(q, k, v, options);
  EXPECT_EQ(blind.out.item<double>(), 0);
  EXPECT_TRUE(at::isneginf(blind.lse).item<bool>());
}

TEST(IndexScores, AddHeadsByTheirWeights) {
  const at::Tensor q = at::tensor({1.0, -1.0}, kDoubles).view({1, 2, 1});
  const at::Tensor k = at::tensor({2.0, -3.0}, kDoubles).view({2, 1});
  const at::Tensor weights = at::tensor({10.0, 100.0}, kDoubles).view({1, 2});
  EXPECT_TRUE(at::equal(index_scores(q, k, weights),
                        at::tensor({20.0, 300.0}, kDoubles).view({1, 2})));
}

}  // namespace
}  // namespace longspan
