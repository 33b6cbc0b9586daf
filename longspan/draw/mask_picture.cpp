#include <algorithm>

#include "longspan/core/detail/check.h"
#include "longspan/core/mask.h"
#include "longspan/core/tile.h"
#include "longspan/draw/detail/cells.h"
#include "longspan/draw/draw.h"
#include "longspan/plan/detail/ring.h"

namespace longspan {

namespace {

/// Where each document's keys end.
std::vector<int64_t> key_ends(const Mask& mask) {
  std::vector<int64_t> ends;
  const Packing& packing = mask.packing();
  int64_t end = 0;
  for (int64_t d = 0; d < packing.documents(); ++d) {
    const int64_t slot = packing.padded_length(d);
    end += mask.ratio() > 0 ? slot / mask.ratio() : slot;
    ends.push_back(end);
  }
  return ends;
}

/// Keys of a compressed mask belong to nobody: they are computed, not held.
std::vector<StripCell> compressed_key_cells(const Mask& mask, int64_t most) {
  std::vector<StripCell> cells;
  for (TokenRange range : cut_cells(mask.keys(), key_ends(mask), most)) {
    cells.push_back({range, kNoRank, range.size(), Pads::none});
  }
  return cells;
}

std::vector<int64_t> inner_borders(std::vector<int64_t> ends, int64_t end) {
  std::erase_if(ends, [&](int64_t at) { return at <= 0 || at >= end; });
  ends.erase(std::ranges::unique(ends).begin(), ends.end());
  return ends;
}

/// Every tile of every rank, or nothing where there are too many to outline.
std::vector<StepTile> step_tiles(const Mask& mask, const Ownership& ownership,
                                 int64_t most_ranges) {
  std::vector<StepTile> all;
  if (owner_borders(ownership, most_ranges).empty()) return all;
  for (int rank = 0; rank < ownership.ranks(); ++rank) {
    for (const OwnedTile& owned : tiles_of(mask, ownership, rank)) {
      all.push_back({rank, ring_step(rank, owned.owner, ownership.ranks()),
                     owned.owner, owned.tile});
    }
  }
  return all;
}

std::string grid_caption(const MaskGrid& grid, const Mask& mask) {
  std::string caption;
  if (mask.ratio() > 0) {
    caption = join(" A key stands for ", counted(mask.ratio(), "token"), ".");
  }
  caption += cell_note(grid.query_cells, "token");
  if (!caption.empty()) caption.erase(0, 1);
  return caption;
}

}  // namespace

Picture draw_mask(const Mask& mask, const Ownership& ownership,
                  const DrawOptions& options) {
  check_together("draw_mask", mask, ownership);
  check_options(options);
  const bool has_ring = mask.ratio() == 0;

  MaskGrid grid;
  grid.heading = "Who computes what: " + words_of(mask);
  grid.queries = mask.queries();
  grid.keys = mask.keys();
  grid.query_cells =
      stream_cells(ownership, mask.packing(), options.grid_cells);
  grid.key_cells = has_ring ? grid.query_cells
                            : compressed_key_cells(mask, options.grid_cells);
  for (const StripCell& query : grid.query_cells) {
    for (const StripCell& key : grid.key_cells) {
      const Coverage coverage = mask.coverage(query.tokens, key.tokens);
      const bool known = has_ring && query.rank >= 0 && key.rank >= 0;
      const int step =
          known ? ring_step(query.rank, key.rank, ownership.ranks()) : kNoStep;
      grid.cells.push_back({coverage, query.rank, step});
    }
  }
  if (has_ring) {
    grid.tiles = step_tiles(mask, ownership, options.grid_cells);
  }
  if (mask.packing().documents() <= options.grid_cells / 2) {
    const auto offsets = mask.packing().offsets();
    grid.query_borders =
        inner_borders({offsets.begin(), offsets.end()}, grid.queries);
    grid.key_borders = inner_borders(key_ends(mask), grid.keys);
  }
  grid.caption = grid_caption(grid, mask);

  Picture picture;
  picture.title =
      join("Mask, ", words_of(mask), ", ", to_string(ownership.kind()), ", ",
           counted(mask.queries(), "token"), " over ",
           counted(ownership.ranks(), "rank"));
  picture.description =
      join("Queries downwards, keys to the right. ", mask.to_string(), ", ",
           ownership.to_string(), ". ", grid.caption);
  picture.rows.push_back({PanelColumn{std::move(grid)}});
  return picture;
}

}  // namespace longspan
