#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "longspan/draw/detail/svg_writer.h"
#include "longspan/draw/picture.h"

namespace longspan {

/// Room for "rank 4095" at the left of strips, tables and bars, in pixels.
inline constexpr double kSvgLabels = 66;

/// Places tokens [0, tokens) on a stretch of pixels.
struct Axis {
  double begin = 0;
  double length = 0;
  int64_t tokens = 0;

  double at(int64_t token) const {
    return begin + length * static_cast<double>(token) /
                       static_cast<double>(std::max<int64_t>(tokens, 1));
  }
  double span(TokenRange range) const {
    return at(range.end) - at(range.begin);
  }
};

/// Neighbouring cells that share a look and one label.
struct CellRun {
  TokenRange tokens;
  int rank = kNoRank;
  Pads pads = Pads::none;
};

/// Runs of one rank, cut where pads begin and at the given borders.
std::vector<CellRun> owner_runs(const std::vector<StripCell>& cells,
                                const std::vector<int64_t>& borders);

enum class Direction { across, down };

/// Paints strips of cells of one thickness along an axis.
class StripPainter {
 public:
  StripPainter(SvgWriter& out, Axis axis, double side, double thickness,
               Direction direction)
      : out_(out),
        axis_(axis),
        side_(side),
        thickness_(thickness),
        direction_(direction) {}

  void fill(const std::vector<StripCell>& cells);

  /// Gaps between runs.
  void divide(const std::vector<CellRun>& runs);

  /// Marks between single tokens of a rank, `height` pixels high.
  void rule(const std::vector<StripCell>& cells, double height);

  /// Ranks written on their runs of real tokens, where they fit.
  void label(const std::vector<CellRun>& runs);

 private:
  Box box(TokenRange range) const;
  void append(std::vector<Box>& boxes, TokenRange range) const;

  SvgWriter& out_;
  Axis axis_;
  double side_;
  double thickness_;
  Direction direction_;
};

/// What every panel shares; each returns the height it takes.
double paint_heading(SvgWriter& out, Box box, const std::string& text);
double paint_caption(SvgWriter& out, Box box, const std::string& text);

/// Brackets over the documents, named where the name fits. One document that
/// is the whole stream needs none.
double paint_documents(SvgWriter& out, const Axis& axis, double y,
                       const std::vector<DocumentMark>& documents);

/// Numbers of tokens under these borders, ascending, as far as they keep apart,
/// and of the end.
double paint_ticks(SvgWriter& out, const Axis& axis, double y,
                   const std::vector<int64_t>& borders);

/// "step 0" over each column, `width` pixels apart from `box.x` on; numbers
/// alone, some left out, where it is tight, with the word at `label_x`.
double paint_step_names(SvgWriter& out, Box box, double label_x,
                        const std::vector<int>& steps, double width);

/// A bar of `share` of the box, on a pale ground.
void paint_bar(SvgWriter& out, Box box, double share, std::string_view classes,
               double radius);

/// Panels at the top left of a box; only its width counts.
double paint(SvgWriter& out, const Strips& strips, Box box);
double paint(SvgWriter& out, const MaskGrid& grid, Box box);
double paint(SvgWriter& out, const StepTable& table, Box box);
double paint(SvgWriter& out, const WorkBars& bars, Box box);
double paint(SvgWriter& out, const PlanTable& table, Box box);
double paint(SvgWriter& out, const StrategyTable& table, Box box);
double paint(SvgWriter& out, const RunChart& chart, Box box);
double paint(SvgWriter& out, const BorderTable& table, Box box);

}  // namespace longspan
