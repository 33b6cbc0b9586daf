#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "longspan/core/detail/check.h"
#include "longspan/draw/detail/svg_panels.h"

namespace longspan {

namespace {

constexpr double kLine = 14;
constexpr double kSmallFont = 11;
constexpr double kCellGap = 10;

/// How much is said about what travels: as much as fits into every cell.
enum class Words { all, unnamed, sent, counts };
constexpr std::array kWords{Words::all, Words::unnamed, Words::sent,
                            Words::counts};

/// "keys 16 → 1, 16 ← 3", or one of the two; "" when nothing moves.
std::string flow_text(const char* name, const PlanFlow& out, const PlanFlow& in,
                      Words words) {
  if (out.tokens == 0 && (in.tokens == 0 || words >= Words::sent)) return "";
  if (words == Words::counts) return short_count(out.tokens);
  const auto one = [](const PlanFlow& flow, const char* arrow) {
    return flow.tokens == 0 ? ""
                            : join(short_count(flow.tokens), " ", arrow, " ",
                                   peers_text(flow.peers, 8));
  };
  const std::string left = one(out, "→");
  if (words == Words::sent) return left;
  const std::string right = one(in, "←");
  const std::string both =
      join(left, left.empty() || right.empty() ? "" : ", ", right);
  return words == Words::all ? join(name, " ", both) : both;
}

std::string keys_text(const PlanCell& cell, Words words) {
  return flow_text("keys", cell.sends, cell.arrivals, words);
}
std::string home_text(const PlanCell& cell, Words words) {
  return flow_text("home", cell.returns, cell.homecomings, words);
}

Words words_for(const PlanTable& table, double room) {
  const auto fits = [&](Words words) {
    return std::ranges::all_of(table.rows, [&](const PlanRow& row) {
      return std::ranges::all_of(row.cells, [&](const PlanCell& cell) {
        return text_width(keys_text(cell, words), kSmallFont) <= room &&
               text_width(home_text(cell, words), kSmallFont) <= room;
      });
    });
  };
  const auto found = std::ranges::find_if(kWords, fits);
  return found == kWords.end() ? Words::counts : *found;
}

std::string legend(Words words) {
  const std::string pairs = "Number and bar: visible pairs.";
  if (words >= Words::sent) {
    return join(pairs, " Lines below: tokens whose keys and values go to other",
                " ranks, and those whose gradients go home.");
  }
  return join(pairs, words == Words::all ? " keys: " : " First line below: ",
              "tokens whose keys and values go to (→) and come from (←) other ",
              "ranks; ", words == Words::all ? "home: " : "second line: ",
              "those whose gradients do.");
}

/// Where the columns of a table stand.
struct Columns {
  double trade = 0;  ///< width of each of the two trades; 0 without teams
  double first = 0;  ///< x of the first step
  double width = 0;  ///< of a step
};

Columns columns_of(const PlanTable& table, Box box) {
  const auto steps = static_cast<double>(table.rows.front().cells.size());
  Columns columns;
  columns.trade = table.head_ranks > 1 ? 130 : 0;
  columns.first = box.x + kSvgLabels + columns.trade;
  columns.width = (box.width - kSvgLabels - 2 * columns.trade) / steps;
  return columns;
}

void paint_trade(SvgWriter& out, double x, double y, const PlanTrade& trade) {
  out.text(x, y + 11, join(short_count(trade.forward), " B forward"), "small");
  out.text(x, y + 11 + kLine, join(short_count(trade.backward), " B backward"),
           "small");
}

void paint_row(SvgWriter& out, const PlanTable& table, const PlanRow& row,
               const Columns& columns, Words words, Box box) {
  constexpr double kBar = 7;
  const double y = box.y;
  out.text(box.x, y + 11, join("rank ", row.rank), "soft");
  const double room = columns.width - kCellGap;
  for (std::size_t c = 0; c < row.cells.size(); ++c) {
    const PlanCell& cell = row.cells[c];
    const double x = columns.first + columns.width * static_cast<double>(c);
    out.text(x, y + 11, cell.pairs == 0 ? "-" : short_count(cell.pairs),
             cell.pairs == 0 ? "soft" : "number");
    const double share =
        static_cast<double>(cell.pairs) /
        static_cast<double>(std::max<int64_t>(1, table.most_pairs));
    paint_bar(out, {x, y + 15, room, kBar}, share, rank_class(row.rank), 1);
    double below = y + 15 + kBar;
    for (const std::string& text :
         {keys_text(cell, words), home_text(cell, words)}) {
      below += kLine;
      if (!text.empty()) out.text(x, below, text, "small");
    }
  }
  if (table.head_ranks > 1) {
    paint_trade(out, box.x + kSvgLabels, y, row.to_heads);
    paint_trade(out, box.x + box.width - columns.trade, y, row.to_tokens);
  }
}

/// More ranks than this are shades and not numbers.
constexpr std::size_t kMostReadable = 8;

/// One measure of all cells: the stronger the colour, the more.
struct HeatMap {
  const char* name;
  int64_t (*amount)(const PlanCell& cell);
};

int64_t most_of(const PlanTable& table, const HeatMap& map) {
  int64_t most = 0;
  for (const PlanRow& row : table.rows) {
    for (const PlanCell& cell : row.cells) {
      most = std::max(most, map.amount(cell));
    }
  }
  return most;
}

/// Paints a map whose steps start at box.x; returns its height.
double paint_map(SvgWriter& out, const PlanTable& table, const HeatMap& map,
                 Box box) {
  constexpr double kRow = 14;
  constexpr double kGap = 2;
  const int64_t most = most_of(table, map);
  out.text(box.x, box.y + 11, map.name, "soft");
  out.text(box.x + box.width, box.y + 11, join("at most ", short_count(most)),
           "small", Anchor::end);
  std::vector<int> steps;
  for (const PlanCell& cell : table.rows.front().cells) {
    steps.push_back(cell.step);
  }
  const double width = box.width / static_cast<double>(steps.size());
  double y = box.y + 18;
  std::array<std::vector<Box>, kHeatLevels + 1> shades;
  for (const PlanRow& row : table.rows) {
    for (std::size_t c = 0; c < row.cells.size(); ++c) {
      const double share = static_cast<double>(map.amount(row.cells[c])) /
                           static_cast<double>(std::max<int64_t>(1, most));
      shades[static_cast<std::size_t>(std::ceil(share * kHeatLevels))]
          .push_back({box.x + width * static_cast<double>(c), y, width - kGap,
                      kRow - kGap});
    }
    y += kRow;
  }
  for (std::size_t level = 0; level < shades.size(); ++level) {
    out.path(shades[level], level == 0 ? "none" : join("heat", level));
  }
  out.text(box.x, y + 11, join("step ", steps.front()), "small");
  out.text(box.x + box.width, y + 11, std::to_string(steps.back()), "small",
           Anchor::end);
  return y + 15 - box.y;
}

/// Tables of many ranks: a map for each measure, side by side.
double paint_maps(SvgWriter& out, const PlanTable& table, bool travels,
                  Box box) {
  static constexpr std::array kMaps{
      HeatMap{"visible pairs", [](const PlanCell& cell) { return cell.pairs; }},
      HeatMap{"keys sent, in tokens",
              [](const PlanCell& cell) { return cell.sends.tokens; }},
      HeatMap{"gradients sent home",
              [](const PlanCell& cell) { return cell.returns.tokens; }}};
  constexpr double kGap = 24;
  const std::size_t maps = travels ? kMaps.size() : 1;
  double y = box.y + 18;
  for (const PlanRow& row : table.rows) {
    out.text(box.x, y + 10, join("rank ", row.rank), "small");
    y += 14;
  }
  const double room = box.width - kSvgLabels + kGap;
  const double width = room / static_cast<double>(kMaps.size());
  double height = 0;
  for (std::size_t i = 0; i < maps; ++i) {
    const double x = box.x + kSvgLabels + width * static_cast<double>(i);
    height = paint_map(out, table, kMaps[i], {x, box.y, width - kGap, 0});
  }
  return height;
}

bool moves_keys(const PlanTable& table) {
  return std::ranges::any_of(table.rows, [](const PlanRow& row) {
    return std::ranges::any_of(row.cells, [](const PlanCell& cell) {
      return cell.sends.tokens + cell.arrivals.tokens + cell.returns.tokens +
                 cell.homecomings.tokens >
             0;
    });
  });
}

}  // namespace

double paint(SvgWriter& out, const PlanTable& table, Box box) {
  double y = box.y + paint_heading(out, box, table.heading);
  std::string caption = table.caption;
  if (table.rows.size() > kMostReadable) {
    y += paint_maps(out, table, moves_keys(table), {box.x, y, box.width, 0});
    caption =
        join("The stronger the colour, the more, of the most in each map.",
             table.head_ranks > 1
                 ? " What teams trade for heads is in the bars below."
                 : "",
             " ", caption);
  } else if (!table.rows.empty()) {
    const Columns columns = columns_of(table, box);
    std::vector<int> steps;
    for (const PlanCell& cell : table.rows.front().cells) {
      steps.push_back(cell.step);
    }
    if (table.head_ranks > 1) {
      out.text(box.x + kSvgLabels, y + 10, "tokens for heads", "small");
      out.text(box.x + box.width - columns.trade, y + 10, "heads for tokens",
               "small");
    }
    y += paint_step_names(out, {columns.first, y, 0, 0}, box.x, steps,
                          columns.width);
    const bool travels = moves_keys(table);
    const Words words = words_for(table, columns.width - kCellGap);
    const double height = 22 + (travels ? 2 * kLine + 4 : 4);
    for (const PlanRow& row : table.rows) {
      paint_row(out, table, row, columns, words, {box.x, y, box.width, 0});
      y += height + 6;
    }
    y -= 6;
    caption = join(travels ? legend(words) : "Number and bar: visible pairs.",
                   " ", caption);
  }
  return y + paint_caption(out, {box.x, y, box.width, 0}, caption) - box.y;
}

double paint(SvgWriter& out, const StrategyTable& table, Box box) {
  constexpr double kBar = 7;
  constexpr double kHeight = 30;
  double y = box.y + paint_heading(out, box, table.heading);
  if (!table.rows.empty()) {
    StrategyRow most;
    for (const StrategyRow& row : table.rows) {
      most.most_pairs = std::max(most.most_pairs, row.most_pairs);
      most.most_forward = std::max(most.most_forward, row.most_forward);
      most.most_backward = std::max(most.most_backward, row.most_backward);
    }
    const int64_t bytes = std::max(most.most_forward, most.most_backward);
    constexpr double kName = 212;
    constexpr double kCount = 44;
    constexpr double kBalance = 56;
    const double width = (box.width - kName - 2 * kCount - kBalance) / 3;
    const double steps = box.x + kName;
    const double pairs = steps + 2 * kCount;
    const double balance = pairs + width;
    const double forward = balance + kBalance;
    const double backward = forward + width;
    out.text(steps, y + 10, "steps", "small");
    out.text(steps + kCount, y + 10, "hops", "small");
    out.text(pairs, y + 10, "pairs", "small");
    out.text(balance, y + 10, "balance", "small");
    out.text(forward, y + 10, "bytes forward", "small");
    out.text(backward, y + 10, "bytes backward", "small");
    y += 18;
    for (std::size_t i = 0; i < table.rows.size(); ++i) {
      const StrategyRow& row = table.rows[i];
      out.text(box.x, y + 11, row.name, "soft");
      out.text(steps, y + 11, short_count(row.steps), "number");
      out.text(steps + kCount, y + 11, short_count(row.hops), "number");
      out.text(balance, y + 11,
               ratio_text(static_cast<double>(row.most_pairs), row.mean_pairs),
               "number");
      const auto bar = [&](double x, int64_t amount, int64_t whole) {
        out.text(x, y + 11, amount == 0 ? "-" : short_count(amount),
                 amount == 0 ? "soft" : "number");
        paint_bar(out, {x, y + 15, width - 12, kBar},
                  static_cast<double>(amount) /
                      static_cast<double>(std::max<int64_t>(1, whole)),
                  rank_class(static_cast<int>(i)), 1);
      };
      bar(pairs, row.most_pairs, most.most_pairs);
      bar(forward, row.most_forward, bytes);
      bar(backward, row.most_backward, bytes);
      y += kHeight;
    }
    y -= kHeight - 22;
  }
  return y + paint_caption(out, {box.x, y, box.width, 0}, table.caption) -
         box.y;
}

}  // namespace longspan
