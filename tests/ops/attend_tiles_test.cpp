#include "longspan/ops/attend_tiles.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "longspan/ops/attend_fused.h"
#include "tests/support/property.h"
#include "tests/support/values.h"

namespace longspan {
namespace {

using test::SharedMaskCase;

/// The lines of rank 0 against the keys of the last rank.
std::vector<KeyLines> lines_of(const SharedMaskCase& c) {
  const Ownership ownership = c.owners.ownership();
  return key_lines(c.mask.mask(), ownership.ranges_of(0),
                   ownership.ranges_of(ownership.ranks() - 1));
}

void segments_hold_the_pairs_of_their_line(const SharedMaskCase& c) {
  for (const KeyLines& line : lines_of(c)) {
    const auto segments = fused_segments(line);
    ASSERT_LE(segments.size(), 3U);
    int64_t next = line.queries.begin;
    for (const FusedSegment& segment : segments) {
      ASSERT_EQ(segment.queries.begin, next);
      next = segment.queries.end;
      for (int64_t q = segment.queries.begin; q < next; ++q) {
        const TokenRange keys = line.keys_of(q);
        for (int64_t k = segment.keys.begin; k < segment.keys.end; ++k) {
          // As the kernel sees it, from the last query and the last key.
          const int64_t apart =
              (k - segment.keys.end) - (q - segment.queries.end);
          const bool visible = (segment.left < 0 || apart >= -segment.left) &&
                               (segment.right < 0 || apart <= segment.right);
          ASSERT_EQ(visible, keys.contains(k)) << "query " << q << " key " << k;
        }
        ASSERT_TRUE(segment.keys.contains(keys)) << "query " << q;
      }
    }
    ASSERT_EQ(next, line.queries.end);
  }
}

TEST(FusedSegments, HoldThePairsOfTheirLine) {
  test::for_all(
      1500, [](test::Random& random) { return draw_shared_mask(random, 24); },
      segments_hold_the_pairs_of_their_line);
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
    auto running = PartialAttention::nothing({1, queries, 4}, 5, at::kDouble);
    which == 0 ? attend_tiles(in, lines, running)
               : attend_tiles_blocked(in, lines, running);
    AttentionGradients grads;
    grads.dout = at::ones_like(running.out);
    grads.out = running.out;
    grads.lse = running.lse;
    grads.delta = running.out.sum(3);
    grads.dq = at::zeros_like(in.q);
    grads.dk = at::zeros_like(in.k);
    grads.dv = at::zeros_like(in.v);
    which == 0 ? attend_tiles_backward(in, lines, grads)
               : attend_tiles_backward_blocked(in, lines, grads);
    answers[which] = {running.out,
                      running.lse.masked_fill(at::isneginf(running.lse), 1e3),
                      grads.dq, grads.dk, grads.dv};
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
