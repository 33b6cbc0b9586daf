#include "longspan/draw/svg.h"

#include <algorithm>
#include <cmath>

#include "longspan/core/detail/check.h"
#include "longspan/draw/detail/svg_panels.h"
#include "longspan/draw/detail/svg_writer.h"

namespace longspan {

double paint_heading(SvgWriter& out, Box box, const std::string& text) {
  out.text(box.x, box.y + 15, text, "h");
  return 26;
}

double paint_caption(SvgWriter& out, Box box, const std::string& text) {
  if (text.empty()) return 0;
  return 6 + out.paragraph(box.x, box.y + 6, box.width, text, "soft");
}

std::string to_svg(const Picture& picture) {
  constexpr double kMargin = 20;
  constexpr double kColumnGap = 36;
  constexpr double kPanelGap = 22;
  SvgWriter out;
  double y = kMargin;
  for (const auto& row : picture.rows) {
    const auto columns = static_cast<double>(row.size());
    const double width =
        (kSvgWidth - 2 * kMargin - kColumnGap * (columns - 1)) / columns;
    double x = kMargin;
    double height = 0;
    for (const PanelColumn& column : row) {
      double below = 0;
      for (const Panel& panel : column) {
        if (below > 0) below += kPanelGap;
        const Box box{x, y + below, width, 0};
        below += std::visit(
            [&](const auto& what) { return paint(out, what, box); }, panel);
      }
      height = std::max(height, below);
      x += width + kColumnGap;
    }
    y += height + kPanelGap;
  }
  const std::string height = svg_number(std::ceil(y - kPanelGap + kMargin));
  const std::string width = svg_number(kSvgWidth);
  return join(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"", width,
      "\" height=\"", height, "\" viewBox=\"0 0 ", width, " ", height,
      "\" role=\"img\" aria-labelledby=\"title desc\">\n<title id=\"title\">",
      xml_escaped(picture.title), "</title>\n<desc id=\"desc\">",
      xml_escaped(picture.description), "</desc>\n<style>\n", svg_style(),
      "</style>\n<defs><pattern id=\"hatch\" width=\"6\" height=\"6\" ",
      "patternUnits=\"userSpaceOnUse\"><path d=\"M-1 1l2-2M0 6l6-6M5 7l2-2\"/>",
      "</pattern></defs>\n<rect class=\"paper\" width=\"", width,
      "\" height=\"", height, "\" rx=\"8\"/>\n", out.body(), "</svg>\n");
}

}  // namespace longspan
