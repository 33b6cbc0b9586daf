#include <cmath>
#include <map>

#include "longspan/core/detail/check.h"
#include "longspan/draw/detail/svg_panels.h"

namespace longspan {

std::vector<CellRun> owner_runs(const std::vector<StripCell>& cells,
                                const std::vector<int64_t>& borders) {
  std::vector<CellRun> runs;
  for (const StripCell& cell : cells) {
    const bool continues =
        !runs.empty() && runs.back().rank == cell.rank &&
        runs.back().pads == cell.pads &&
        std::ranges::find(borders, cell.tokens.begin) == borders.end();
    if (continues) {
      runs.back().tokens.end = cell.tokens.end;
    } else {
      runs.push_back({cell.tokens, cell.rank, cell.pads});
    }
  }
  return runs;
}

Box StripPainter::box(TokenRange range) const {
  const double at = axis_.at(range.begin);
  const double span = axis_.span(range);
  return direction_ == Direction::across ? Box{at, side_, span, thickness_}
                                         : Box{side_, at, thickness_, span};
}

/// Joins the range to the last box where it continues it.
void StripPainter::append(std::vector<Box>& boxes, TokenRange range) const {
  const Box next = box(range);
  const bool across = direction_ == Direction::across;
  if (!boxes.empty()) {
    Box& last = boxes.back();
    const double end = across ? last.x + last.width : last.y + last.height;
    if (std::abs(end - (across ? next.x : next.y)) < 1e-6) {
      (across ? last.width : last.height) += across ? next.width : next.height;
      return;
    }
  }
  boxes.push_back(next);
}

void StripPainter::fill(const std::vector<StripCell>& cells) {
  std::map<std::string, std::vector<Box>> looks;
  std::vector<Box> hatched;
  for (const StripCell& cell : cells) {
    std::string look = cell.rank == kNoRank ? "none" : rank_class(cell.rank);
    if (cell.rank != kNoRank && cell.held < cell.tokens.size()) look += " part";
    append(looks[look], cell.tokens);
    if (cell.pads != Pads::none && cell.rank != kNoRank) {
      append(hatched, cell.tokens);
    }
  }
  for (const auto& [look, boxes] : looks) out_.path(boxes, look);
  out_.path(hatched, "hatch");
}

void StripPainter::divide(const std::vector<CellRun>& runs) {
  std::vector<Box> cuts;
  for (std::size_t i = 1; i < runs.size(); ++i) {
    Box at = box(runs[i].tokens);
    (direction_ == Direction::across ? at.width : at.height) = 0;
    cuts.push_back(at);
  }
  out_.path(cuts, "cut");
}

void StripPainter::rule(const std::vector<StripCell>& cells, double height) {
  std::vector<Box> marks;
  for (std::size_t i = 1; i < cells.size(); ++i) {
    if (cells[i].tokens.size() > 1) return;
    if (cells[i].rank == kNoRank || cells[i].rank != cells[i - 1].rank) {
      continue;
    }
    marks.push_back({axis_.at(cells[i].tokens.begin),
                     side_ + thickness_ - height, 0, height});
  }
  out_.path(marks, "hair");
}

void StripPainter::label(const std::vector<CellRun>& runs) {
  constexpr double kTinyFont = 10;
  constexpr double kTinyHeight = 8;
  const auto named = [](const CellRun& run) {
    return run.rank >= 0 && run.pads != Pads::all;
  };
  const auto room = [&](const CellRun& run) {
    return axis_.span(run.tokens) - 2;
  };
  const auto along = [&](const CellRun& run) {
    return !named(run) || text_width(std::to_string(run.rank), 12) <= room(run);
  };
  // Short runs of many ranks have room for numbers across the strip.
  const auto across = [&](const CellRun& run) {
    return !named(run) ||
           (text_width(std::to_string(run.rank), kTinyFont) <= thickness_ &&
            kTinyHeight <= room(run));
  };
  const bool turned =
      !std::ranges::all_of(runs, along) && std::ranges::all_of(runs, across);
  for (const CellRun& run : runs) {
    if (!named(run) || !(turned || along(run))) continue;
    const double middle = axis_.at(run.tokens.begin) + room(run) / 2 + 1;
    const double base = side_ + thickness_ / 2 + 4;
    const std::string number = std::to_string(run.rank);
    if (turned && direction_ == Direction::across) {
      out_.upward_text(middle + 3.5, side_ + thickness_ / 2, number, "on tiny");
    } else if (turned) {
      out_.text(side_ + thickness_ / 2, middle + 3.5, number, "on tiny",
                Anchor::middle);
    } else {
      const std::string name = "rank " + number;
      const bool whole = text_width(name, 12) + 6 <= room(run);
      if (direction_ == Direction::across) {
        out_.text(middle, base, whole ? name : number, "on", Anchor::middle);
      } else {
        out_.upward_text(base, middle, whole ? name : number, "on");
      }
    }
  }
}

double paint_documents(SvgWriter& out, const Axis& axis, double y,
                       const std::vector<DocumentMark>& documents) {
  const auto trivial = [&](const DocumentMark& mark) {
    return mark.slot.empty() || mark.slot.size() == axis.tokens;
  };
  if (std::ranges::all_of(documents, trivial)) return 0;
  for (const DocumentMark& mark : documents) {
    if (mark.slot.empty()) continue;
    const double begin = axis.at(mark.slot.begin) + 1;
    const double end = std::max(begin, axis.at(mark.slot.end) - 1);
    out.line(begin, y + 17, end, y + 17, "rule");
    out.line(begin, y + 17, begin, y + 22, "rule");
    out.line(end, y + 17, end, y + 22, "rule");
    const std::string number = std::to_string(mark.document);
    std::string lengths;
    if (mark.length < mark.slot.size()) {
      lengths = join(", ", mark.length, " of ", mark.slot.size());
    }
    for (const std::string& name :
         {"document " + number + lengths, "doc " + number + lengths,
          "document " + number, "doc " + number, number}) {
      if (text_width(name, 11) * 0.95 > end - begin) continue;
      out.text((begin + end) / 2, y + 12, name, "small", Anchor::middle);
      break;
    }
  }
  return 25;
}

double paint_ticks(SvgWriter& out, const Axis& axis, double y,
                   const std::vector<int64_t>& borders) {
  const std::string end_name = short_count(axis.tokens);
  const double end = axis.at(axis.tokens);
  const double last = end - text_width(end_name, 11) - 6;
  double free_from = axis.begin;
  for (int64_t token : borders) {
    const std::string name = short_count(token);
    const double width = text_width(name, 11);
    const bool first = token == 0;
    const double x = axis.at(token);
    const double left = first ? x : x - width / 2;
    if (left < free_from || left + width > last) continue;
    free_from = left + width + 6;
    out.text(x, y + 13, name, "small", first ? Anchor::start : Anchor::middle);
  }
  out.text(end, y + 13, end_name, "small", Anchor::end);
  return 18;
}

namespace {

std::string legend(const Strips& strips) {
  bool pads = false;
  bool many = false;
  for (const StripCell& cell : strips.strips.front().cells) {
    pads = pads || cell.pads != Pads::none;
    many = many || cell.rank == kManyRanks;
  }
  return join(strips.caption, pads ? " Hatched: pads." : "",
              many ? " Grey: many owners." : "");
}

}  // namespace

double paint(SvgWriter& out, const Strips& strips, Box box) {
  double y = box.y + paint_heading(out, box, strips.heading);
  const Strip& stream = strips.strips.front();
  if (strips.tokens == 0) {
    out.text(box.x, y + 10, "No tokens.", "soft");
    y += 22;
  }
  const bool labelled = !stream.label.empty();
  const double left = labelled ? kSvgLabels : 0;
  const double right = labelled ? 52 : 0;
  const Axis axis{box.x + left, box.width - left - right, strips.tokens};
  if (labelled) {
    out.text(box.x + box.width, box.y + 15, "tokens", "small", Anchor::end);
  }
  std::vector<int64_t> borders;
  for (const DocumentMark& mark : strips.documents) {
    borders.push_back(mark.slot.begin);
  }
  y += paint_documents(out, axis, y, strips.documents);
  for (const Strip& strip : strips.strips) {
    const bool is_stream = &strip == &stream;
    const double thickness = is_stream ? 28 : 14;
    out.text(box.x, y + thickness / 2 + 4, strip.label, "soft");
    out.text(box.x + box.width, y + thickness / 2 + 4, strip.note, "soft",
             Anchor::end);
    StripPainter painter(out, axis, y, thickness, Direction::across);
    painter.fill(strip.cells);
    painter.rule(strip.cells, is_stream ? 5 : thickness);
    y += thickness + 4;
    if (!is_stream || strips.tokens == 0) continue;
    const std::vector<CellRun> runs = owner_runs(strip.cells, borders);
    painter.divide(runs);
    if (strips.owned) painter.label(runs);
    std::vector<int64_t> ticks;
    for (const CellRun& run : runs) ticks.push_back(run.tokens.begin);
    y += paint_ticks(out, axis, y - 4, ticks);
  }
  y -= 4;
  const std::string words = labelled ? legend(strips) : strips.caption;
  return y + paint_caption(out, {box.x, y, box.width, 0}, words) - box.y;
}

}  // namespace longspan
