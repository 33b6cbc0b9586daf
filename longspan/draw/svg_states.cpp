#include <algorithm>
#include <map>
#include <set>

#include "longspan/draw/detail/cells.h"
#include "longspan/draw/detail/svg_panels.h"

namespace longspan {

namespace {

constexpr double kThick = 16;
constexpr double kBetween = 20;
constexpr double kSmallFont = 11;

/// A line from one height to another, with a head where it ends.
void paint_arrow(SvgWriter& out, double x, double from, double to) {
  constexpr double kHead = 5;
  const double back = to > from ? to - kHead : to + kHead;
  out.line(x, from, x, to, "rule");
  out.line(x - kHead / 2, back, x, to, "rule");
  out.line(x + kHead / 2, back, x, to, "rule");
}

/// The runs of one rank: the strip, gaps where documents meet, and a 0 over
/// those that begin with nothing.
void paint_runs(SvgWriter& out, const Axis& axis, double y, int rank,
                const std::vector<DrawnRun>& runs) {
  out.rect({axis.begin, y, axis.length, kThick}, "none");
  std::vector<Box> boxes, cuts;
  std::map<int64_t, const DrawnRun*> ordered;  // local order may be another
  for (const DrawnRun& run : runs) {
    if (run.rank == rank) ordered[run.tokens.begin] = &run;
  }
  double free_from = axis.begin - 1;
  for (const auto& [begin, run] : ordered) {
    const double x = axis.at(begin);
    boxes.push_back({x, y, std::max(axis.span(run->tokens), 0.5), kThick});
    cuts.push_back({x, y, 0, kThick});
    if (run->before != kNoRank) continue;
    out.line(x, y - 4, x, y, "rule");
    if (x < free_from) continue;
    out.text(x + 2, y - 3, "0", "small");
    free_from = x + 2 + text_width("0", kSmallFont) + 2;
  }
  out.path(boxes, rank_class(rank));
  out.path(cuts, "cut");
}

/// "2 states, 1 transition" and "6 rows": what the bytes of a cell are.
std::string states_text(const BorderCell& cell) {
  if (cell.states == 0) return "";
  std::string text = counted(cell.states, "state");
  if (cell.transitions > 0) {
    text += ", " + counted(cell.transitions, "transition");
  }
  return text;
}

std::string rows_text(const BorderCell& cell) {
  return cell.rows == 0 ? "" : counted(cell.rows, "row");
}

/// Lines of words under the numbers of a table: 0 where they do not fit.
int lines_of(const BorderTable& table, double room) {
  bool states = false, rows = false;
  for (const BorderRow& row : table.rows) {
    for (const BorderCell& cell : row.cells) {
      for (const std::string& text : {states_text(cell), rows_text(cell)}) {
        if (text_width(text, kSmallFont) > room) return 0;
      }
      states = states || cell.states > 0;
      rows = rows || cell.rows > 0;
    }
  }
  return (states ? 1 : 0) + (rows ? 1 : 0);
}

}  // namespace

double paint(SvgWriter& out, const RunChart& chart, Box box) {
  double y = box.y + paint_heading(out, box, chart.heading);
  if (!chart.ranks.empty()) {
    const Axis axis{box.x + kSvgLabels, box.width - kSvgLabels - 52,
                    chart.tokens};
    out.text(box.x + box.width, box.y + 15, "runs", "small", Anchor::end);
    y += paint_documents(out, axis, y, chart.documents) + 14;
    std::map<int, double> top;
    std::set<int64_t> borders;
    for (int rank : chart.ranks) {
      top[rank] = y;
      out.text(box.x, y + kThick - 4, "rank " + std::to_string(rank), "soft");
      const auto held = std::ranges::count(chart.runs, rank, &DrawnRun::rank);
      out.text(box.x + box.width, y + kThick - 4, short_count(held), "soft",
               Anchor::end);
      paint_runs(out, axis, y, rank, chart.runs);
      y += kThick + kBetween;
    }
    y -= kBetween;
    for (const DrawnRun& run : chart.runs) {
      borders.insert(run.tokens.begin);
      const auto from = top.find(run.before);
      if (from == top.end() || run.before == run.rank) continue;
      const bool down = from->second < top[run.rank];
      paint_arrow(out, axis.at(run.tokens.begin),
                  from->second + (down ? kThick : 0),
                  top[run.rank] + (down ? 0 : kThick));
    }
    y += paint_ticks(out, axis, y, {borders.begin(), borders.end()});
  }
  const bool begins = std::ranges::any_of(
      chart.runs, [](const DrawnRun& run) { return run.before == kNoRank; });
  const std::string caption =
      chart.caption + (begins ? " 0: a document begins." : "");
  return y + paint_caption(out, {box.x, y, box.width, 0}, caption) - box.y;
}

double paint(SvgWriter& out, const BorderTable& table, Box box) {
  constexpr double kBar = 7;
  constexpr double kLine = 14;
  constexpr double kSum = 70;
  constexpr double kGap = 10;
  double y = box.y + paint_heading(out, box, table.heading);
  const double width =
      (box.width - kSvgLabels - kSum) /
      static_cast<double>(std::max<std::size_t>(table.rows.size(), 1));
  const int lines = lines_of(table, width - kGap);
  double x = box.x + kSvgLabels;
  for (const BorderRow& row : table.rows) {
    out.text(x, y + 10, "to " + std::to_string(row.rank), "small");
    x += width;
  }
  out.text(box.x + box.width, y + 10, "in all", "small", Anchor::end);
  y += 18;
  for (const BorderRow& row : table.rows) {
    out.text(box.x, y + 11, "rank " + std::to_string(row.rank), "soft");
    out.text(box.x + box.width, y + 11,
             row.bytes == 0 ? "-" : short_count(row.bytes),
             row.bytes == 0 ? "soft" : "number", Anchor::end);
    x = box.x + kSvgLabels;
    for (const BorderCell& cell : row.cells) {
      const bool nothing = cell.states + cell.rows == 0;
      out.text(x, y + 11, nothing ? "-" : short_count(cell.bytes),
               nothing ? "soft" : "number");
      const double share =
          static_cast<double>(cell.bytes) /
          static_cast<double>(std::max<int64_t>(1, table.most_bytes));
      paint_bar(out, {x, y + 15, width - kGap, kBar}, share,
                rank_class(row.rank), 1);
      double below = y + 15 + kBar;
      for (const std::string& text : {states_text(cell), rows_text(cell)}) {
        if (lines == 0 || text.empty()) continue;
        below += kLine;
        out.text(x, below, text, "small");
      }
      x += width;
    }
    y += 26 + kLine * lines + 4;
  }
  return y + paint_caption(out, {box.x, y - 4, box.width, 0}, table.caption) -
         box.y;
}

}  // namespace longspan
