#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

#include "longspan/draw/draw.h"
#include "longspan/draw/svg.h"
#include "longspan/draw/text.h"
#include "longspan/plan/attention_layout.h"
#include "longspan/plan/state_plan.h"
#include "tests/support/masks.h"
#include "tests/support/xml.h"

namespace longspan {
namespace {

using test::message_of;
using test::SharedMaskCase;

constexpr StateShape kShape{
    .rows = 3, .row_bytes = 10, .transition_bytes = 100, .state_bytes = 1000};

template <class Kind>
std::vector<Kind> panels(const Picture& picture) {
  std::vector<Kind> found;
  for (const Panel* panel : panels_of(picture)) {
    if (const auto* one = std::get_if<Kind>(panel)) found.push_back(*one);
  }
  return found;
}

AttentionLayout layout_of(const Ownership& ownership,
                          const std::vector<int64_t>& documents) {
  return AttentionLayout::of(ownership, {Mask::causal(Packing::of(documents))});
}

/// Bytes are those of the plans, runs are those of core, and each run knows
/// its neighbours.
void the_picture_says_what_the_plans_say(const SharedMaskCase& c,
                                         StateWay way) {
  const auto layout =
      AttentionLayout::of(c.owners.ownership(), {c.mask.mask()});
  const int ranks = layout.ownership.ranks();
  StateShape shape = kShape;
  shape.way = way;
  const Picture picture = draw_states(layout, shape, {.rows = 64});
  const auto tables = panels<BorderTable>(picture);
  ASSERT_EQ(tables.size(), 2U);
  for (const BorderTable& table : tables) {
    const Pass pass = table.measure == Measure::forward_bytes ? Pass::forward
                                                              : Pass::backward;
    ASSERT_EQ(std::ssize(table.rows), std::min(ranks, 8));
    for (const BorderRow& row : table.rows) {
      const auto states = StatePlan::of(layout, row.rank, 1, way);
      const auto halo = HaloPlan::of(layout, kShape.rows, row.rank);
      ASSERT_EQ(row.bytes,
                states.sent_bytes(100, 1000, pass) + halo.sent_bytes(10, pass));
      int64_t bytes = 0;
      for (const BorderCell& cell : row.cells) {
        ASSERT_EQ(cell.bytes,
                  cell.states * 1000 + cell.transitions * 100 + cell.rows * 10);
        ASSERT_TRUE(cell.to != row.rank || cell.bytes == 0);
        bytes += cell.bytes;
      }
      ASSERT_TRUE(ranks > 8 || bytes == row.bytes);
    }
  }
  const RunChart chart = panels<RunChart>(picture).at(0);
  std::vector<DrawnRun> expected;
  const Packing& packing = layout.masks[0].packing();
  for (int rank = 0; rank < ranks; ++rank) {
    for (const DocumentRun& run : runs_of(packing, layout.ownership, rank)) {
      const int64_t end = run.tokens.end;
      const bool ends =
          run.position + run.size() == packing.length(run.document);
      expected.push_back({rank, run.document, run.tokens,
                          run.position == 0 ? kNoRank : run.before_rank,
                          ends ? kNoRank : layout.ownership.owner_of(end)});
    }
  }
  ASSERT_EQ(chart.runs, expected);
}

/// Without hidden tokens, whose documents have no runs.
SharedMaskCase any_case(test::Random& random) {
  SharedMaskCase drawn = test::draw_shared_mask(random, 40);
  drawn.mask.hidden.clear();
  return drawn;
}

TEST(DrawStates, SaysWhatThePlansSay) {
  for (const StateWay way : {StateWay::direct, StateWay::scan}) {
    test::for_all(100, any_case, [&](const SharedMaskCase& c) {
      the_picture_says_what_the_plans_say(c, way);
    });
  }
}

TEST(DrawStates, EveryRendererDrawsThem) {
  test::for_all(60, any_case, [](const SharedMaskCase& c) {
    const auto layout =
        AttentionLayout::of(c.owners.ownership(), {c.mask.mask()});
    for (const StateShape& shape :
         {kShape, StateShape{}, StateShape{3, 10, 0, 0}}) {
      const Picture picture = draw_states(layout, shape);
      ASSERT_EQ(test::read_xml(to_svg(picture)).error, "");
      std::istringstream lines(to_text(picture, {.glyphs = Glyphs::ascii}));
      for (std::string line; std::getline(lines, line);) {
        ASSERT_LE(line.size(), 80U) << line;
      }
    }
  });
}

/// Two documents of 40 and 24 tokens, as docs/states.md has them.
TEST(DrawStates, SmallNumbersWrittenOut) {
  const auto layout = layout_of(Ownership::contiguous(64, 4), {40, 24});
  EXPECT_EQ(
      to_text(draw_states(layout)),
      "Runs and states, 64 tokens over 4 ranks, contiguous\n"
      "\n"
      "Runs: 2 documents over 4 ranks\n"
      "        document    tokens  comes from  goes on to\n"
      "rank 0         0   0 .. 15           -      rank 1\n"
      "rank 1         0  16 .. 31      rank 0      rank 2\n"
      "rank 2         0  32 .. 39      rank 1           -\n"
      "rank 2         1  40 .. 47           -      rank 3\n"
      "rank 3         1  48 .. 63      rank 2           -\n"
      "5 runs, 3 of which go on with a document; the others begin one, with "
      "nothing\n"
      "before it. Arrows: what a run leaves behind comes into the next one.\n"
      "\n"
      "Bytes over borders, forward: from rank, to rank\n"
      "from, to  0  1  2  3  in all\n"
      "0         -  4  4  -       8\n"
      "1         -  -  8  -       8\n"
      "2         -  -  -  4       4\n"
      "3         -  -  -  -       0\n"
      "In all 20 bytes: 4 states and 1 transition, however long the runs "
      "are.\n"
      "\n"
      "Bytes over borders, backward: from rank, to rank\n"
      "from, to  0  1  2  3  in all\n"
      "0         -  -  -  -       0\n"
      "1         8  -  -  -       8\n"
      "2         4  4  -  -       8\n"
      "3         -  -  4  -       4\n"
      "In all 20 bytes of gradients: 4 states and 1 transition, however long "
      "the runs\n"
      "are.\n");
}

TEST(DrawStates, CountsTheRoundsOfAScan) {
  const auto layout = layout_of(Ownership::contiguous(64, 8), {64});
  const auto tables =
      panels<BorderTable>(draw_states(layout, {.way = StateWay::scan}));
  EXPECT_EQ(tables.at(0).caption,
            "In all 108 bytes: 17 states and 10 transitions, in 3 rounds, "
            "however long the runs are.");
}

TEST(DrawStates, AnArrowStandsAtEveryBorderThatIsCrossed) {
  const auto arrows = [](const Ownership& ownership) {
    const Picture picture = draw_states(layout_of(ownership, {40, 24}));
    const auto file = test::read_xml(to_svg(picture));
    // Each is a line and two for its head; documents and runs that begin have
    // other ones: three for a bracket, one for a beginning.
    return (file.count("line") - 3 * 2 - 2) / 3;
  };
  EXPECT_EQ(arrows(Ownership::contiguous(64, 4)), 3);
  EXPECT_EQ(arrows(Ownership::head_tail(64, 4)), 5);
  EXPECT_EQ(arrows(Ownership::contiguous(64, 1)), 0);
}

TEST(DrawStates, AConvolutionAloneHasRows) {
  const auto layout = layout_of(Ownership::contiguous(64, 4), {40, 24});
  const Picture picture = draw_states(layout, {3, 10, 0, 0});
  const auto forward = panels<BorderTable>(picture).at(0);
  EXPECT_EQ(forward.caption,
            "In all 90 bytes: 9 rows of the convolution, however long the runs "
            "are.");
  EXPECT_EQ(forward.rows[0].cells[1].rows, 3);
  EXPECT_EQ(forward.rows[0].cells[1].states, 0);
  EXPECT_NE(to_svg(picture).find(">3 rows<"), std::string::npos);
  const Picture alone =
      draw_states(layout_of(Ownership::contiguous(64, 1), {40, 24}));
  EXPECT_EQ(panels<BorderTable>(alone).at(0).caption, "Nothing is sent.");
}

TEST(DrawStates, ReducedPicturesSaySo) {
  const auto many = draw_states(layout_of(Ownership::contiguous(64, 16), {64}));
  EXPECT_NE(
      panels<BorderTable>(many).at(0).caption.find("8 of 16 ranks are shown."),
      std::string::npos);
  const std::vector<int64_t> short_ones(2000, 2);
  const auto runs =
      draw_states(layout_of(Ownership::contiguous(4000, 4), short_ones));
  EXPECT_TRUE(panels<RunChart>(runs).at(0).runs.empty());
  EXPECT_NE(panels<RunChart>(runs).at(0).caption.find("Too many runs to draw."),
            std::string::npos);
  const auto ranks = draw_states(
      layout_of(Ownership::head_tail(100'007'936, 4096), {100'007'936}));
  EXPECT_EQ(panels<RunChart>(ranks).at(0).caption,
            "Left out: too many ranks or runs to plan.");
  for (const Picture& picture : {many, runs, ranks}) {
    EXPECT_EQ(test::read_xml(to_svg(picture)).error, "");
    EXPECT_LT(to_svg(picture).size(), 200'000U);
    EXPECT_FALSE(to_text(picture).empty());
  }
}

TEST(DrawStates, RefusesBytesThatAreNone) {
  EXPECT_EQ(message_of([] {
              draw_states(layout_of(Ownership::contiguous(4, 2), {4}),
                          {.state_bytes = -1});
            }),
            "draw_states: a shape with -1 rows or bytes; expected 0 to "
            "1099511627776");
}

}  // namespace
}  // namespace longspan
