#include "longspan/core/check.h"
#include "longspan/draw/svg_panels.h"

namespace longspan {

namespace {

/// "step 0" over each column; numbers alone, some left out, where it is tight.
double step_names(SvgWriter& out, const StepTable& table, Box box,
                  double width) {
  const auto& cells = table.rows.front().cells;
  bool whole = true;
  for (const StepCell& cell : cells) {
    whole = whole && text_width(join("step ", cell.step), 11) <= width;
  }
  if (!whole) out.text(box.x, box.y + 10, "step", "small");
  double free_from = box.x;
  for (std::size_t c = 0; c < cells.size(); ++c) {
    const double x = box.x + kSvgLabels + width * static_cast<double>(c);
    const std::string name = join(whole ? "step " : "", cells[c].step);
    if (x < free_from) continue;
    free_from = x + text_width(name, 11) + 4;
    out.text(x, box.y + 10, name, "small");
  }
  return 18;
}

}  // namespace

double paint(SvgWriter& out, const StepTable& table, Box box) {
  double y = box.y + paint_heading(out, box, table.heading);
  const double columns =
      table.rows.empty() ? 1
                         : static_cast<double>(table.rows.front().cells.size());
  const double width = (box.width - kSvgLabels) / columns;
  if (!table.rows.empty()) {
    y += step_names(out, table, {box.x, y, box.width, 0}, width);
  }
  constexpr double kBar = 7;
  const bool numbers = width >= 44;
  const double height = numbers ? 26 : 12;
  const double room = width - (numbers ? 8 : 3);
  for (const StepRow& row : table.rows) {
    out.text(box.x, y + height / 2 + 4, join("rank ", row.rank), "soft");
    for (std::size_t c = 0; c < row.cells.size(); ++c) {
      const StepCell& cell = row.cells[c];
      const double x = box.x + kSvgLabels + width * static_cast<double>(c);
      const double bar = y + (numbers ? 15 : 3);
      if (numbers) {
        out.text(x, y + 11, cell.pairs == 0 ? "-" : short_count(cell.pairs),
                 cell.pairs == 0 ? "soft" : "number");
      }
      out.rect({x, bar, room, kBar}, "none", 1);
      if (cell.pairs > 0) {
        const double share = static_cast<double>(cell.pairs) /
                             static_cast<double>(table.most_pairs);
        out.rect({x, bar, std::max(1.0, room * share), kBar},
                 rank_class(row.rank), 1);
      }
    }
    y += height + 4;
  }
  return y - 4 +
         paint_caption(out, {box.x, y - 4, box.width, 0}, table.caption) -
         box.y;
}

double paint(SvgWriter& out, const WorkBars& bars, Box box) {
  constexpr double kValue = 52;
  constexpr double kThick = 16;
  constexpr double kGap = 5;
  double y = box.y + paint_heading(out, box, bars.heading);
  const double top = y;
  const double x = box.x + kSvgLabels;
  const double room = box.width - kSvgLabels - kValue;
  const auto length = [&](double pairs) {
    return bars.scale == 0 ? 0 : room * pairs / static_cast<double>(bars.scale);
  };
  for (const WorkBar& bar : bars.bars) {
    out.text(box.x, y + kThick - 4, join("rank ", bar.rank), "soft");
    out.text(box.x + box.width, y + kThick - 4, short_count(bar.pairs),
             "number", Anchor::end);
    out.rect({x, y, room, kThick}, "none", 2);
    if (bar.pairs > 0) {
      out.rect(
          {x, y, std::max(1.0, length(static_cast<double>(bar.pairs))), kThick},
          rank_class(bar.rank), 2);
    }
    y += kThick + kGap;
  }
  y -= kGap;
  std::string caption = bars.caption;
  if (bars.scale > 0 && bars.bars.size() > 1) {
    const double mean = x + length(bars.mean);
    out.line(mean, top - 3, mean, y + 3, "mean");
    caption += " Dashed: mean.";
  }
  return y + 2 + paint_caption(out, {box.x, y + 2, box.width, 0}, caption) -
         box.y;
}

}  // namespace longspan
