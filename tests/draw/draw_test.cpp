#include "longspan/draw/draw.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "longspan/core/tile.h"
#include "longspan/core/work.h"
#include "longspan/draw/svg.h"
#include "longspan/draw/text.h"
#include "longspan/plan/detail/ring.h"
#include "tests/support/masks.h"
#include "tests/support/xml.h"

namespace longspan {
namespace {

TEST(DrawPacking, ShowsDocumentsAndNoRanks) {
  const Packing packing = Packing::of({24, 13, 0, 16}, {24, 16, 4, 20});
  const Picture picture = draw_packing(packing);
  EXPECT_EQ(picture.title, "Packing, 4 documents, 64 tokens");
  const auto& strips = std::get<Strips>(*panels_of(picture).at(0));
  ASSERT_EQ(strips.strips.size(), 1U);
  EXPECT_EQ(strips.documents.size(), 4U);
  EXPECT_EQ(strips.caption, "11 pad tokens.");
  const std::string svg = to_svg(picture);
  EXPECT_EQ(svg.find("rank"), std::string::npos);
  EXPECT_NE(svg.find("document 1, 13 of 16"), std::string::npos);
}

TEST(DrawPacking, TakesAnyPacking) {
  for (const Packing& packing :
       {Packing::single(0), Packing::single(1), Packing::of({0, 0}, {0, 3}),
        Packing::of(std::vector<int64_t>(1000, 3))}) {
    const Picture picture = draw_packing(packing);
    EXPECT_EQ(test::read_xml(to_svg(picture)).error, "");
    EXPECT_FALSE(to_text(picture).empty());
  }
}

using test::message_of;
using test::Random;
using test::SharedMaskCase;

template <class Kind>
const Kind& panel_of(const Picture& picture) {
  for (const Panel* panel : panels_of(picture)) {
    if (const auto* found = std::get_if<Kind>(panel)) return *found;
  }
  throw std::logic_error("the picture has no such panel");
}

/// Few cells, so that random streams are reduced about as often as not.
constexpr DrawOptions kSmall{.strip_cells = 40, .grid_cells = 24, .rows = 5};

void every_token_is_drawn_with_its_owner(const SharedMaskCase& c) {
  const Ownership ownership = c.owners.ownership();
  const Packing packing = c.mask.packing.packing();
  for (const DrawOptions& options : {DrawOptions{}, kSmall}) {
    const Picture picture = draw_ownership(ownership, packing, options);
    const auto& strips = panel_of<Strips>(picture);
    const Strip& stream = strips.strips.front();
    int64_t next = 0;
    for (const StripCell& cell : stream.cells) {
      ASSERT_EQ(cell.tokens.begin, next);
      next = cell.tokens.end;
      std::set<int> owners;
      int64_t pads = 0;
      for (int64_t token = cell.tokens.begin; token < next; ++token) {
        owners.insert(ownership.owner_of(token));
        pads += packing.is_pad(token) ? 1 : 0;
      }
      ASSERT_EQ(cell.rank, owners.size() == 1 ? *owners.begin() : kManyRanks);
      ASSERT_EQ(cell.pads, pads == 0                    ? Pads::none
                           : pads == cell.tokens.size() ? Pads::all
                                                        : Pads::some);
    }
    ASSERT_EQ(next, ownership.tokens());
    ASSERT_EQ(std::ssize(strips.strips) - 1,
              std::min(ownership.ranks(), options.rows));
  }
}

/// The strips of all ranks together hold every token once.
void every_rank_shows_what_it_holds(const SharedMaskCase& c) {
  const Ownership ownership = c.owners.ownership();
  const Packing packing = c.mask.packing.packing();
  const Picture picture = draw_ownership(
      ownership, packing, {.strip_cells = 40, .grid_cells = 1, .rows = 16});
  const auto& strips = panel_of<Strips>(picture);
  for (int rank = 0; rank < ownership.ranks(); ++rank) {
    const Strip& strip = strips.strips[static_cast<std::size_t>(rank) + 1];
    int64_t held = 0;
    for (const StripCell& cell : strip.cells) {
      int64_t here = 0;
      for (int64_t t = cell.tokens.begin; t < cell.tokens.end; ++t) {
        here += ownership.owner_of(t) == rank ? 1 : 0;
      }
      ASSERT_EQ(cell.held, here);
      ASSERT_EQ(cell.rank, here > 0 ? rank : kNoRank);
      held += here;
    }
    ASSERT_EQ(held, ownership.local_tokens(rank));
  }
}

void every_cell_shows_what_is_visible(const SharedMaskCase& c) {
  const Mask mask = c.mask.mask();
  const Ownership ownership = c.owners.ownership();
  const Picture picture = draw_mask(mask, ownership, kSmall);
  const auto& grid = panel_of<MaskGrid>(picture);
  for (std::size_t q = 0; q < grid.query_cells.size(); ++q) {
    for (std::size_t k = 0; k < grid.key_cells.size(); ++k) {
      const StripCell& queries = grid.query_cells[q];
      const StripCell& keys = grid.key_cells[k];
      int64_t seen = 0;
      for (int64_t a = queries.tokens.begin; a < queries.tokens.end; ++a) {
        for (int64_t b = keys.tokens.begin; b < keys.tokens.end; ++b) {
          seen += mask.allows(a, b) ? 1 : 0;
        }
      }
      const int64_t all = queries.tokens.size() * keys.tokens.size();
      const MaskCell& cell = grid.at(q, k);
      ASSERT_EQ(cell.coverage, seen == 0     ? Coverage::none
                               : seen == all ? Coverage::all
                                             : Coverage::some);
      ASSERT_EQ(cell.rank, queries.rank);
      if (cell.step != kNoStep) {
        ASSERT_EQ(ring_owner(queries.rank, cell.step, ownership.ranks()),
                  keys.rank);
      }
    }
  }
}

/// Grid, table and bars count what tiles_of and work_per_rank count.
void steps_and_work_agree_with_core(const SharedMaskCase& c) {
  const Mask mask = c.mask.mask();
  const Ownership ownership = c.owners.ownership();
  const Picture picture = draw(mask, ownership);
  const auto& grid = panel_of<MaskGrid>(picture);
  const Picture step_picture = draw_steps(mask, ownership);
  const auto& table = panel_of<StepTable>(step_picture);
  const auto& bars = panel_of<WorkBars>(picture);
  const auto work = work_per_rank(mask, ownership);
  int64_t tiles = 0;
  for (int rank = 0; rank < ownership.ranks(); ++rank) {
    std::map<int, StepCell> expected;
    for (const OwnedTile& owned : tiles_of(mask, ownership, rank)) {
      StepCell& cell =
          expected[ring_step(rank, owned.owner, ownership.ranks())];
      const bool full = owned.tile.coverage == Coverage::all;
      ++(full ? cell.full_tiles : cell.masked_tiles);
      cell.pairs += mask.pairs(owned.tile.queries, owned.tile.keys);
      ++tiles;
    }
    const auto r = static_cast<std::size_t>(rank);
    int64_t pairs = 0;
    ASSERT_EQ(std::ssize(table.rows[r].cells), ownership.ranks());
    for (const StepCell& cell : table.rows[r].cells) {
      ASSERT_EQ(cell.full_tiles, expected[cell.step].full_tiles);
      ASSERT_EQ(cell.masked_tiles, expected[cell.step].masked_tiles);
      ASSERT_EQ(cell.pairs, expected[cell.step].pairs);
      pairs += cell.pairs;
      if (grid.tiles.empty()) continue;
      const auto drawn =
          std::ranges::count_if(grid.tiles, [&](const StepTile& tile) {
            return tile.rank == rank && tile.step == cell.step;
          });
      ASSERT_EQ(drawn, cell.full_tiles + cell.masked_tiles);
    }
    ASSERT_EQ(bars.bars[r].amount, work[r].pairs);
    ASSERT_EQ(bars.bars[r].tokens, work[r].tokens);
    ASSERT_EQ(pairs, work[r].pairs);
  }
  if (!grid.tiles.empty()) {
    ASSERT_EQ(std::ssize(grid.tiles), tiles);
  }
}

SharedMaskCase any_case(Random& random) {
  return test::draw_shared_mask(random);
}

TEST(Draw, EveryTokenIsDrawnOnceWithItsOwner) {
  test::for_all(300, any_case, every_token_is_drawn_with_its_owner);
}

TEST(Draw, EveryRankShowsWhatItHolds) {
  test::for_all(300, any_case, every_rank_shows_what_it_holds);
}

TEST(Draw, EveryCellShowsWhatIsVisible) {
  test::for_all(150, any_case, every_cell_shows_what_is_visible);
}

TEST(Draw, StepsAndWorkAgreeWithCore) {
  test::for_all(300, any_case, steps_and_work_agree_with_core);
}

TEST(Draw, SmallNumbersWrittenOut) {
  const Mask mask = Mask::causal(Packing::single(64));
  const auto pairs = [&](const Ownership& ownership) {
    std::vector<int64_t> all;
    const Picture picture = draw_work(mask, ownership);
    for (const WorkBar& bar : panel_of<WorkBars>(picture).bars) {
      all.push_back(bar.amount);
    }
    return all;
  };
  EXPECT_EQ(pairs(Ownership::contiguous(64, 4)),
            (std::vector<int64_t>{136, 392, 648, 904}));
  EXPECT_EQ(pairs(Ownership::head_tail(64, 4)),
            (std::vector<int64_t>{520, 520, 520, 520}));
}

TEST(Draw, ACompressedMaskHasNoSteps) {
  const Packing packing = Packing::of({13, 0, 22}, {16, 4, 24});
  const Mask mask = Mask::compressed(packing, 4);
  const Ownership ownership = Ownership::contiguous(44, 4);
  const Picture picture = draw(mask, ownership);
  const auto& grid = panel_of<MaskGrid>(picture);
  EXPECT_EQ(std::ssize(grid.key_cells), mask.keys());
  EXPECT_TRUE(grid.tiles.empty());
  int64_t visible = 0;
  for (const MaskCell& cell : grid.cells) {
    EXPECT_EQ(cell.step, kNoStep);
    visible += cell.coverage == Coverage::all ? 1 : 0;
  }
  int64_t worked = 0;
  for (const WorkBar& bar : panel_of<WorkBars>(picture).bars) {
    worked += bar.amount;
  }
  EXPECT_EQ(visible, mask.pairs({0, 44}, {0, mask.keys()}));
  EXPECT_EQ(worked, visible);
}

TEST(Draw, BarsBesideEachOtherShareOneScale) {
  const Mask mask = Mask::causal(Packing::single(64));
  const Picture picture = draw_comparison(mask, Ownership::contiguous(64, 4),
                                          Ownership::head_tail(64, 4));
  int sides = 0;
  for (const Panel* panel : panels_of(picture)) {
    if (const auto* bars = std::get_if<WorkBars>(panel)) {
      EXPECT_EQ(bars->scale, 904);
      ++sides;
    }
  }
  EXPECT_EQ(sides, 2);
}

TEST(Draw, AReducedPictureSaysSo) {
  const Packing packing = Packing::single(100'007'936);
  const Picture picture =
      draw(Mask::causal(packing), Ownership::head_tail(packing.tokens(), 4096));
  EXPECT_EQ(panel_of<Strips>(picture).caption,
            "Reduced: a cell stands for up to 1562624 tokens. 16 of 4096 ranks "
            "are shown.");
  EXPECT_NE(panel_of<MaskGrid>(picture).caption.find("Reduced"),
            std::string::npos);
}

class RefusedDrawing : public ::testing::TestWithParam<test::Refusal> {};

TEST_P(RefusedDrawing, NamesTheReason) {
  EXPECT_EQ(message_of(GetParam().call), GetParam().message);
}

INSTANTIATE_TEST_SUITE_P(
    Draw, RefusedDrawing,
    ::testing::Values(
        test::Refusal{"PackingOfAnotherStream",
                      [] {
                        draw_ownership(Ownership::contiguous(8, 2),
                                       Packing::single(6));
                      },
                      "draw_ownership: a packing of 6 tokens and an ownership "
                      "of 8; make both from one stream"},
        test::Refusal{"MaskOfAnotherStream",
                      [] {
                        draw_mask(Mask::causal(Packing::single(6)),
                                  Ownership::contiguous(8, 2));
                      },
                      "draw_mask: a mask of 6 queries over an ownership of 8 "
                      "tokens; make both from one packing"},
        test::Refusal{"StepsOfACompressedMask",
                      [] {
                        draw_steps(Mask::compressed(Packing::single(8), 2),
                                   Ownership::contiguous(8, 2));
                      },
                      "draw_steps: a compressed mask has no ring steps, its "
                      "keys are no tokens; draw the mask and the work"},
        test::Refusal{
            "AStreamTooLong",
            [] { check_drawable(Packing::single(int64_t{1} << 40), 1); },
            "draw: a stream of 1099511627776 tokens; pictures go up "
            "to 2147483648"},
        test::Refusal{"TooManyRanks",
                      [] { check_drawable(Packing::single(0), 2'000'000); },
                      "draw: 2000000 ranks; pictures go up to 1048576"},
        test::Refusal{"NoCells",
                      [] {
                        draw_work(Mask::causal(Packing::single(2)),
                                  Ownership::contiguous(2, 1), {.rows = 0});
                      },
                      "draw: options ask for 0 cells or rows; expected 1 to "
                      "512"}),
    test::refusal_name);

}  // namespace
}  // namespace longspan
