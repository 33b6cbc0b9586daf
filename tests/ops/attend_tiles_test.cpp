#include "longspan/ops/attend_tiles.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/support/masks.h"
#include "tests/support/property.h"

namespace longspan {
namespace {

using test::SharedMaskCase;

/// The lines of rank 0 against the keys of the last rank.
std::vector<KeyLines> lines_of(const SharedMaskCase& c) {
  const Ownership ownership = c.owners.ownership();
  return key_lines(c.mask.mask(), ownership.ranges_of(0),
                   ownership.ranges_of(ownership.ranks() - 1));
}

void blocks_give_what_kernels_give(const SharedMaskCase& c) {
  const Ownership ownership = c.owners.ownership();
  const auto lines = lines_of(c);
  const int64_t queries = ownership.local_tokens(0);
  const int64_t keys = ownership.local_tokens(ownership.ranks() - 1);
  at::manual_seed(11);
  AttentionInputs in;
  in.q = at::randn({1, queries, 4, 6}, at::kDouble);
  in.k = at::randn({1, keys, 3, 6}, at::kDouble);
  in.v = at::randn({1, keys, 3, 5}, at::kDouble);
  in.heads_per_key_head = 2;
  in.head_offset = 1;
  in.scale = 0.4;
  in.softcap = 2;
  std::vector<at::Tensor> answers[2];
  for (int which : {0, 1}) {
    const auto sum_like = [](const at::Tensor& tensor) {
      return Accumulator(Accumulator::Kind::sum, tensor.sizes(),
                         tensor.options());
    };
    Accumulator running(Accumulator::Kind::attention, {1, queries, 4, 5},
                        at::kDouble);
    which == 0 ? attend_tiles(in, lines, running)
               : attend_tiles_blocked(in, lines, running);
    const auto [out, lse] = running.finish(at::kDouble);
    const AttentionAnswer answer{
        .out = out, .dout = at::ones_like(out), .lse = lse};
    Accumulator dq = sum_like(in.q), dk = sum_like(in.k), dv = sum_like(in.v);
    AttentionGradients grads{dq, dk, dv};
    which == 0 ? attend_tiles_backward(in, lines, answer, grads)
               : attend_tiles_backward_blocked(in, lines, answer, grads);
    answers[which] = {out, lse.masked_fill(at::isneginf(lse), 1e3)};
    for (Accumulator* sum : {&dq, &dk, &dv}) {
      answers[which].push_back(sum->finish(at::kDouble).out);
    }
  }
  for (std::size_t i = 0; i < answers[0].size(); ++i) {
    ASSERT_TRUE(at::allclose(answers[0][i], answers[1][i], 1e-10, 1e-11))
        << "answer " << i;
  }
}

TEST(AttendTiles, BlocksGiveWhatKernelsGive) {
  test::for_all(
      60, [](test::Random& random) { return draw_shared_mask(random, 24); },
      blocks_give_what_kernels_give);
}

}  // namespace
}  // namespace longspan
