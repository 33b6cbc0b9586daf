#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace longspan {

/// Text as XML character data: markup is escaped, and bytes that XML does not
/// allow (control characters, broken UTF-8) become question marks.
std::string xml_escaped(std::string_view text);

/// A number with at most two decimals and no trailing zeros.
std::string svg_number(double value);

struct Box {
  double x = 0;
  double y = 0;
  double width = 0;
  double height = 0;
};

enum class Anchor { start, middle, end };

/// Collects SVG elements. Looks come from CSS classes; see svg_style().
class SvgWriter {
 public:
  void rect(Box box, std::string_view classes, double radius = 0);

  /// Many boxes of one look as one path; nothing for no boxes.
  void path(const std::vector<Box>& boxes, std::string_view classes);

  void line(double x1, double y1, double x2, double y2,
            std::string_view classes);
  void text(double x, double y, std::string_view text, std::string_view classes,
            Anchor anchor = Anchor::start);

  /// Text that reads upwards, centred at (x, y).
  void upward_text(double x, double y, std::string_view text,
                   std::string_view classes);

  /// Lines of at most `width` pixels; returns the height they take.
  double paragraph(double x, double y, double width, std::string_view text,
                   std::string_view classes);

  const std::string& body() const { return body_; }

 private:
  std::string body_;
};

/// Shades of a heat map, classes "heat1" (pale) to "heat8".
inline constexpr int kHeatLevels = 8;

/// The style sheet: light, and dark where the reader prefers it.
std::string svg_style();

/// Class of a rank's colour, "r0" and so on; "many" for a negative rank.
std::string rank_class(int rank);

/// A guess, on the safe side, at the width of text in pixels.
double text_width(std::string_view text, double font_size);

}  // namespace longspan
