#include "longspan/draw/detail/cells.h"

#include <algorithm>

#include "longspan/core/detail/check.h"
#include "longspan/core/mask.h"

namespace longspan {

namespace {

/// Appends `parts` cells of nearly equal size.
void append_even(std::vector<TokenRange>& cells, TokenRange range,
                 int64_t parts) {
  for (int64_t i = 0; i < parts; ++i) {
    cells.push_back({range.begin + range.size() * i / parts,
                     range.begin + range.size() * (i + 1) / parts});
  }
}

/// The most cells of one size that respect all borders, not too few; or 0.
int64_t even_count(int64_t tokens, const std::vector<int64_t>& borders,
                   int64_t most) {
  for (int64_t count = most; count >= (most + 1) / 2; --count) {
    if (tokens % count != 0) continue;
    const int64_t size = tokens / count;
    if (std::ranges::all_of(borders,
                            [&](int64_t at) { return at % size == 0; })) {
      return count;
    }
  }
  return 0;
}

Pads pads_in(const std::vector<TokenRange>& pads, TokenRange cell) {
  auto pad = std::ranges::partition_point(
      pads, [&](TokenRange range) { return range.end <= cell.begin; });
  if (pad == pads.end() || pad->begin >= cell.end) return Pads::none;
  return pad->contains(cell) ? Pads::all : Pads::some;
}

/// The one owner of a cell, or kManyRanks.
int owner_in(const Ownership& ownership, TokenRange cell) {
  constexpr int kMostSteps = 64;
  Ownership::Holding holding = ownership.holding(cell.begin);
  const int rank = holding.rank;
  for (int step = 0; step < kMostSteps; ++step) {
    if (holding.range.end >= cell.end) return rank;
    holding = ownership.holding(holding.range.end);
    if (holding.rank != rank) break;
  }
  return kManyRanks;
}

}  // namespace

std::vector<TokenRange> cut_cells(int64_t tokens, std::vector<int64_t> borders,
                                  int64_t most) {
  std::vector<TokenRange> cells;
  if (tokens <= most) {
    append_even(cells, {0, tokens}, tokens);
    return cells;
  }
  std::erase_if(borders, [&](int64_t at) { return at <= 0 || at >= tokens; });
  borders.push_back(tokens);
  std::ranges::sort(borders);
  borders.erase(std::ranges::unique(borders).begin(), borders.end());
  if (std::ssize(borders) > most) borders = {tokens};
  if (const int64_t even = even_count(tokens, borders, most); even > 0) {
    append_even(cells, {0, tokens}, even);
    return cells;
  }
  const int64_t to_spread = most - std::ssize(borders);
  int64_t begin = 0;
  for (int64_t end : borders) {
    const int64_t size = end - begin;
    append_even(cells, {begin, end},
                std::min(size, 1 + size * to_spread / tokens));
    begin = end;
  }
  return cells;
}

std::vector<int64_t> owner_borders(const Ownership& ownership, int64_t most) {
  std::vector<int64_t> borders;
  for (int64_t token = 0; token < ownership.tokens();) {
    token = ownership.holding(token).range.end;
    borders.push_back(token);
    if (std::ssize(borders) > most) return {};
  }
  return borders;
}

std::vector<int64_t> packing_borders(const Packing& packing, int64_t most) {
  if (packing.documents() > most) return {};
  std::vector<int64_t> borders;
  for (int64_t d = 0; d < packing.documents(); ++d) {
    borders.push_back(packing.real(d).end);
    borders.push_back(packing.slot(d).end);
  }
  borders.erase(std::ranges::unique(borders).begin(), borders.end());
  return borders;
}

std::vector<StripCell> stream_cells(const Ownership& ownership,
                                    const Packing& packing, int64_t most) {
  std::vector<int64_t> borders = owner_borders(ownership, most);
  std::vector<int64_t> all = packing_borders(packing, most);
  all.insert(all.end(), borders.begin(), borders.end());
  std::ranges::sort(all);
  all.erase(std::ranges::unique(all).begin(), all.end());
  if (std::ssize(all) <= most) borders = all;
  const std::vector<TokenRange> pads = packing.pads();
  std::vector<StripCell> cells;
  for (TokenRange range :
       cut_cells(ownership.tokens(), std::move(borders), most)) {
    cells.push_back({range, owner_in(ownership, range), range.size(),
                     pads_in(pads, range)});
  }
  return cells;
}

std::vector<int> spread(int count, int most) {
  std::vector<int> shown;
  const int64_t rows = std::min(count, most);
  for (int64_t i = 0; i < rows; ++i) {
    shown.push_back(rows == 1 ? 0
                              : static_cast<int>(i * (count - 1) / (rows - 1)));
  }
  return shown;
}

std::string shown_note(int shown, int count, const char* what) {
  return shown == count
             ? ""
             : join(" ", shown, " of ", count, " ", what, " are shown.");
}

std::string cell_note(const std::vector<StripCell>& cells, const char* what) {
  int64_t most = 0;
  for (const StripCell& cell : cells) most = std::max(most, cell.tokens.size());
  return most <= 1 ? ""
                   : join(" Reduced: a cell stands for up to ",
                          counted(most, what), ".");
}

std::string counted(int64_t count, const char* what) {
  return join(count, " ", what, count == 1 ? "" : "s");
}

std::string words_of(const Ownership& ownership) {
  return ownership.kind() == OwnershipKind::ranges
             ? "uneven"
             : std::string(to_string(ownership.kind()));
}

std::string words_of(const Mask& mask) {
  if (mask.ratio() > 0) return join("compressed ", mask.ratio(), ":1");
  const Band band = mask.band();
  if (band == Band{}) return "causal";
  if (band == Band{Band::kAll, Band::kAll}) return "full";
  if (band.after != 0) return "banded";
  const bool clipped =
      mask.group_reach() == GroupReach::within_window && !mask.groups().empty();
  return clipped ? join("groups in a window of ", band.before + 1)
                 : join("sliding window of ", band.before + 1);
}

void check_drawable(const Packing& packing, int ranks) {
  check(packing.tokens() <= kMostDrawnTokens, "draw: a stream of ",
        packing.tokens(), " tokens; pictures go up to ", kMostDrawnTokens);
  check(ranks <= kMostDrawnRanks, "draw: ", ranks, " ranks; pictures go up to ",
        kMostDrawnRanks);
}

void check_together(const char* who, const Mask& mask,
                    const Ownership& ownership) {
  check(mask.queries() == ownership.tokens(), who, ": a mask of ",
        mask.queries(), " queries over an ownership of ", ownership.tokens(),
        " tokens; make both from one packing");
  check_drawable(mask.packing(), ownership.ranks());
}

void check_options(const DrawOptions& options) {
  constexpr int kMostCells = 512;
  for (int count : {options.strip_cells, options.grid_cells, options.rows}) {
    check(count >= 1 && count <= kMostCells, "draw: options ask for ", count,
          " cells or rows; expected 1 to ", kMostCells);
  }
}

}  // namespace longspan
