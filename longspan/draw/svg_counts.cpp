#include <algorithm>

#include "longspan/core/detail/check.h"
#include "longspan/draw/detail/svg_panels.h"

namespace longspan {

double paint_step_names(SvgWriter& out, Box box, double label_x,
                        const std::vector<int>& steps, double width) {
  const bool whole = std::ranges::all_of(steps, [&](int step) {
    return text_width(join("step ", step), 11) <= width;
  });
  if (!whole) out.text(label_x, box.y + 10, "step", "small");
  double free_from = 0;
  for (std::size_t c = 0; c < steps.size(); ++c) {
    const double x = box.x + width * static_cast<double>(c);
    const std::string name = join(whole ? "step " : "", steps[c]);
    if (x < free_from) continue;
    free_from = x + text_width(name, 11) + 4;
    out.text(x, box.y + 10, name, "small");
  }
  return 18;
}

void paint_bar(SvgWriter& out, Box box, double share, std::string_view classes,
               double radius) {
  out.rect(box, "none", radius);
  if (share <= 0) return;
  box.width = std::max(1.0, box.width * share);
  out.rect(box, classes, radius);
}

double paint(SvgWriter& out, const StepTable& table, Box box) {
  double y = box.y + paint_heading(out, box, table.heading);
  const double columns =
      table.rows.empty() ? 1
                         : static_cast<double>(table.rows.front().cells.size());
  const double width = (box.width - kSvgLabels) / columns;
  if (!table.rows.empty()) {
    std::vector<int> steps;
    for (const StepCell& cell : table.rows.front().cells) {
      steps.push_back(cell.step);
    }
    y += paint_step_names(out, {box.x + kSvgLabels, y, 0, 0}, box.x, steps,
                          width);
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
      const double share =
          static_cast<double>(cell.pairs) /
          static_cast<double>(std::max<int64_t>(1, table.most_pairs));
      paint_bar(out, {x, bar, room, kBar}, share, rank_class(row.rank), 1);
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
    out.text(box.x + box.width, y + kThick - 4, short_count(bar.amount),
             "number", Anchor::end);
    const double share = length(static_cast<double>(bar.amount)) / room;
    paint_bar(out, {x, y, room, kThick}, share, rank_class(bar.rank), 2);
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
