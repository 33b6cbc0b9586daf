#include <cmath>
#include <tuple>
#include <utility>

#include "longspan/core/detail/check.h"
#include "longspan/draw/detail/svg_panels.h"

namespace longspan {

namespace {

/// The square that the cells of a grid fill.
struct Square {
  Axis down;
  Axis across;

  Box box(TokenRange queries, TokenRange keys) const {
    return {across.at(keys.begin), down.at(queries.begin), across.span(keys),
            down.span(queries)};
  }
};

/// Cells of one look as boxes, joined along rows and then down equal rows.
std::vector<Box> visible_boxes(const MaskGrid& grid, const Square& square,
                               int rank, Coverage coverage) {
  std::vector<Box> done;
  std::vector<Box> open;
  for (std::size_t q = 0; q < grid.query_cells.size(); ++q) {
    const TokenRange queries = grid.query_cells[q].tokens;
    std::vector<Box> row;
    for (std::size_t k = 0; k < grid.key_cells.size(); ++k) {
      const MaskCell& cell = grid.at(q, k);
      if (cell.rank != rank || cell.coverage != coverage) continue;
      const Box box = square.box(queries, grid.key_cells[k].tokens);
      if (!row.empty() &&
          std::abs(row.back().x + row.back().width - box.x) < 1e-6) {
        row.back().width += box.width;
      } else {
        row.push_back(box);
      }
    }
    const auto same_keys = [](Box a, Box b) {
      return a.x == b.x && a.width == b.width;
    };
    if (!row.empty() && std::ranges::equal(row, open, same_keys)) {
      for (Box& box : open) box.height += square.down.span(queries);
    } else {
      done.insert(done.end(), open.begin(), open.end());
      open = std::move(row);
    }
  }
  done.insert(done.end(), open.begin(), open.end());
  return done;
}

/// Indices [first, end) of the cells that lie in a range; cells ascend.
std::pair<std::size_t, std::size_t> cells_in(
    const std::vector<StripCell>& cells, TokenRange range) {
  const auto first = std::ranges::partition_point(
      cells, [&](const StripCell& c) { return c.tokens.begin < range.begin; });
  const auto end = std::ranges::partition_point(
      cells, [&](const StripCell& c) { return c.tokens.end <= range.end; });
  return {static_cast<std::size_t>(first - cells.begin()),
          static_cast<std::size_t>(end - cells.begin())};
}

/// The cells of one tile.
struct TileCells {
  TileCells(const MaskGrid& grid, const Square& square, const Tile& tile)
      : grid(grid), square(square) {
    std::tie(q_begin, q_end) = cells_in(grid.query_cells, tile.queries);
    std::tie(k_begin, k_end) = cells_in(grid.key_cells, tile.keys);
  }

  bool visible(std::size_t q, std::size_t k) const {
    return grid.at(q, k).coverage != Coverage::none;
  }
  Box box(std::size_t q, std::size_t k) const {
    return square.box(grid.query_cells[q].tokens, grid.key_cells[k].tokens);
  }
  template <class Visit>
  void each(const Visit& visit) const {
    for (std::size_t q = q_begin; q < q_end; ++q) {
      for (std::size_t k = k_begin; k < k_end; ++k) visit(q, k);
    }
  }

  const MaskGrid& grid;
  const Square& square;
  std::size_t q_begin = 0, q_end = 0, k_begin = 0, k_end = 0;
};

/// A box of the given size in the middle of what is visible.
Box middle_of(const TileCells& cells, Box size) {
  double area = 0;
  double x = 0;
  double y = 0;
  cells.each([&](std::size_t q, std::size_t k) {
    if (!cells.visible(q, k)) return;
    const Box box = cells.box(q, k);
    const double weight = box.width * box.height;
    area += weight;
    x += weight * (box.x + box.width / 2);
    y += weight * (box.y + box.height / 2);
  });
  if (area == 0) return {};
  return {x / area - size.width / 2, y / area - size.height / 2, size.width,
          size.height};
}

/// Whether the box lies on visible cells of the tile alone.
bool is_clear(const TileCells& cells, Box place) {
  double covered = 0;
  cells.each([&](std::size_t q, std::size_t k) {
    if (!cells.visible(q, k)) return;
    const Box box = cells.box(q, k);
    const double width = std::min(box.x + box.width, place.x + place.width) -
                         std::max(box.x, place.x);
    const double height = std::min(box.y + box.height, place.y + place.height) -
                          std::max(box.y, place.y);
    covered += std::max(0.0, width) * std::max(0.0, height);
  });
  return covered > 0.95 * place.width * place.height;
}

/// The largest square of visible cells.
Box largest_square(const TileCells& cells) {
  // sides[k]: of the largest visible square that ends at (q, k), in cells.
  std::vector<std::size_t> sides(cells.grid.key_cells.size() + 1, 0);
  std::size_t corner = 0;
  std::size_t best = 0;
  Box place;
  cells.each([&](std::size_t q, std::size_t k) {
    if (k == cells.k_begin) corner = 0;
    std::size_t& side = sides[k + 1];
    const std::size_t above = side;
    side = cells.visible(q, k) ? 1 + std::min({above, corner, sides[k]}) : 0;
    corner = above;
    if (side <= best) return;
    best = side;
    const Box first = cells.box(q + 1 - side, k + 1 - side);
    const Box last = cells.box(q, k);
    place = {first.x, first.y, last.x + last.width - first.x,
             last.y + last.height - first.y};
  });
  return place;
}

/// The ring step on a tile: in the middle of what is visible of it, or where
/// most is visible around it; nowhere if it could not be read. Bands and
/// documents leave corners of a tile empty, so its own middle will not do.
void label_tile(SvgWriter& out, const MaskGrid& grid, const Square& square,
                const StepTile& tile, const std::string& widest) {
  const TileCells cells(grid, square, tile.tile);
  for (const bool small : {false, true}) {
    const Box room{0, 0, text_width(widest, small ? 10 : 12) + 3,
                   small ? 9.0 : 12.0};
    Box place = middle_of(cells, room);
    if (!is_clear(cells, place)) {
      place = largest_square(cells);
      if (place.width < room.width || place.height < room.height) continue;
    }
    out.text(place.x + place.width / 2,
             place.y + place.height / 2 + (small ? 3.5 : 4),
             std::to_string(tile.step), small ? "on tiny" : "on",
             Anchor::middle);
    return;
  }
}

std::string legend(const MaskGrid& grid) {
  bool steps = false;
  bool part = false;
  bool many = false;
  for (const MaskCell& cell : grid.cells) {
    if (cell.coverage == Coverage::none) continue;
    steps = steps || cell.step > 0;
    part = part || cell.coverage == Coverage::some;
    many = many || cell.rank == kManyRanks;
  }
  return join("Colour: the rank that computes.",
              steps && !grid.tiles.empty()
                  ? " Number: the ring step at which it holds those keys."
                  : "",
              part ? " Pale: partly visible." : "",
              many ? " Grey: queries of many ranks." : "",
              grid.caption.empty() ? "" : " ", grid.caption);
}

void paint_axes(SvgWriter& out, const MaskGrid& grid, const Square& square,
                double thickness, double gap) {
  const double left = square.across.begin - gap - thickness;
  const double top = square.down.begin - gap - thickness;
  out.text(square.across.begin, top - 6, "keys", "small");
  out.upward_text(left - 6, square.down.begin + 22, "queries", "small");
  StripPainter keys(out, square.across, top, thickness, Direction::across);
  const auto key_runs = owner_runs(grid.key_cells, grid.key_borders);
  keys.fill(grid.key_cells);
  keys.divide(key_runs);
  keys.label(key_runs);
  StripPainter queries(out, square.down, left, thickness, Direction::down);
  const auto query_runs = owner_runs(grid.query_cells, grid.query_borders);
  queries.fill(grid.query_cells);
  queries.divide(query_runs);
  queries.label(query_runs);
}

}  // namespace

double paint(SvgWriter& out, const MaskGrid& grid, Box box) {
  const double y = box.y + paint_heading(out, box, grid.heading);
  if (grid.query_cells.empty() || grid.key_cells.empty()) {
    out.text(box.x, y + 10,
             grid.query_cells.empty() ? "No queries." : "No keys.", "soft");
    return y + 18 - box.y;
  }
  constexpr double kWord = 16;
  constexpr double kThickness = 16;
  constexpr double kGap = 3;
  constexpr double kIndent = kWord + kThickness + kGap;
  const double side = std::min(box.width, 520.0) - kIndent;
  const Square square{{y + kIndent, side, grid.queries},
                      {box.x + kIndent, side, grid.keys}};
  paint_axes(out, grid, square, kThickness, kGap);

  out.rect({square.across.begin, square.down.begin, side, side}, "none");
  std::vector<int> ranks;
  for (const StripCell& cell : grid.query_cells) ranks.push_back(cell.rank);
  std::ranges::sort(ranks);
  ranks.erase(std::ranges::unique(ranks).begin(), ranks.end());
  for (int rank : ranks) {
    out.path(visible_boxes(grid, square, rank, Coverage::all),
             rank_class(rank));
    out.path(visible_boxes(grid, square, rank, Coverage::some),
             rank_class(rank) + " part");
  }
  std::vector<Box> outlines;
  for (const StepTile& tile : grid.tiles) {
    outlines.push_back(square.box(tile.tile.queries, tile.tile.keys));
  }
  out.path(outlines, "cut");
  const double right = square.across.begin + side;
  const double bottom = square.down.begin + side;
  for (int64_t at : grid.query_borders) {
    out.line(square.across.begin, square.down.at(at), right, square.down.at(at),
             "border");
  }
  for (int64_t at : grid.key_borders) {
    out.line(square.across.at(at), square.down.begin, square.across.at(at),
             bottom, "border");
  }
  int last_step = 0;
  for (const StepTile& tile : grid.tiles) {
    last_step = std::max(last_step, tile.step);
  }
  for (const StepTile& tile : grid.tiles) {
    label_tile(out, grid, square, tile, std::to_string(last_step));
  }
  return bottom +
         paint_caption(out, {box.x, bottom, box.width, 0}, legend(grid)) -
         box.y;
}

}  // namespace longspan
