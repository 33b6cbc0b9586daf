#include <algorithm>

#include "longspan/core/detail/check.h"
#include "longspan/core/mask.h"
#include "longspan/core/tile.h"
#include "longspan/core/work.h"
#include "longspan/draw/detail/cells.h"
#include "longspan/draw/draw.h"
#include "longspan/plan/detail/ring.h"

namespace longspan {

namespace {

/// Ranges that are looked at before a table or a total is left out, so that
/// time stays bounded for streams of very many documents.
constexpr int64_t kMostRanges = 1'000'000;

/// work_of, and the same sum for keys that are no tokens.
int64_t pairs_of(const Mask& mask, const Ownership& ownership, int rank) {
  if (mask.ratio() == 0) return work_of(mask, ownership, rank).pairs;
  int64_t pairs = 0;
  for (TokenRange range : ownership.ranges_of(rank)) {
    pairs += mask.pairs(range, mask.reach(range));
  }
  return pairs;
}

StepCell step_cell(const Mask& mask, const Ownership& ownership, int rank,
                   int step) {
  StepCell cell;
  cell.step = step;
  cell.owner = ring_owner(rank, step, ownership.ranks());
  for (const Tile& tile : tiles(mask, ownership, rank, cell.owner)) {
    cell.pairs += mask.pairs(tile.queries, tile.keys);
    ++(tile.coverage == Coverage::all ? cell.full_tiles : cell.masked_tiles);
  }
  return cell;
}

int64_t held_ranges(const Ownership& ownership) {
  return std::max<int64_t>(1, std::ssize(ownership.ranges_of(0)));
}

}  // namespace

Picture draw_steps(const Mask& mask, const Ownership& ownership,
                   const DrawOptions& options) {
  check_together("draw_steps", mask, ownership);
  check_options(options);
  check(mask.ratio() == 0,
        "draw_steps: a compressed mask has no ring steps, its keys are no "
        "tokens; draw the mask and the work");
  StepTable table;
  table.heading = "Pairs at each ring step";
  const std::vector<int> shown = spread(ownership.ranks(), options.rows);
  const int64_t cost =
      held_ranges(ownership) * std::ssize(shown) * std::ssize(shown);
  if (cost > kMostRanges) {
    table.caption = "Left out: each rank holds too many ranges to count.";
  } else {
    for (int rank : shown) {
      StepRow row{rank, {}};
      for (int step : shown) {
        row.cells.push_back(step_cell(mask, ownership, rank, step));
        table.most_pairs = std::max(table.most_pairs, row.cells.back().pairs);
      }
      table.rows.push_back(std::move(row));
    }
    table.caption =
        join("At step i, rank r holds the keys of rank (r - i) mod ",
             ownership.ranks(), ".");
    table.caption += shown_note(static_cast<int>(std::ssize(shown)),
                                ownership.ranks(), "ranks and steps");
  }

  Picture picture;
  picture.title = join("Ring steps, ", words_of(mask), ", ",
                       counted(ownership.ranks(), "rank"));
  picture.description =
      join("Pairs of each rank at each ring step. ", mask.to_string(), ", ",
           ownership.to_string(), ". ", table.caption);
  picture.rows.push_back({PanelColumn{std::move(table)}});
  return picture;
}

Picture draw_work(const Mask& mask, const Ownership& ownership,
                  const DrawOptions& options) {
  check_together("draw_work", mask, ownership);
  check_options(options);
  WorkBars bars;
  bars.heading = "Work of each rank";
  const std::vector<int> shown = spread(ownership.ranks(), options.rows);
  for (int rank : shown) {
    bars.bars.push_back(
        {rank, ownership.local_tokens(rank), pairs_of(mask, ownership, rank)});
  }
  const bool count_all =
      held_ranges(ownership) * ownership.ranks() <= kMostRanges;
  int64_t total = 0;
  const auto add = [&](int64_t pairs) {
    total += pairs;
    bars.scale = std::max(bars.scale, pairs);
  };
  if (count_all) {
    for (int rank = 0; rank < ownership.ranks(); ++rank) {
      add(pairs_of(mask, ownership, rank));
    }
  } else {
    for (const WorkBar& bar : bars.bars) add(bar.amount);
  }
  const auto ranks =
      count_all ? ownership.ranks() : static_cast<int>(std::ssize(bars.bars));
  bars.mean = static_cast<double>(total) / ranks;
  bars.caption = join("Heaviest: ", short_count(bars.scale), " visible pairs");
  if (total > 0) {
    bars.caption +=
        join(", ", ratio_text(static_cast<double>(bars.scale), bars.mean),
             " x the mean");
  }
  bars.caption += count_all ? "." : " of those shown.";
  bars.caption += shown_note(static_cast<int>(std::ssize(shown)),
                             ownership.ranks(), "ranks");

  Picture picture;
  picture.title =
      join("Work, ", words_of(mask), ", ", counted(ownership.ranks(), "rank"));
  picture.description =
      join("Visible query-key pairs of each rank. ", mask.to_string(), ", ",
           ownership.to_string(), ". ", bars.caption);
  picture.rows.push_back({PanelColumn{std::move(bars)}});
  return picture;
}

}  // namespace longspan
