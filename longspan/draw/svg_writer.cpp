#include "longspan/draw/detail/svg_writer.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include "longspan/core/detail/check.h"
#include "longspan/draw/detail/palette.h"
#include "longspan/draw/picture.h"

namespace longspan {

namespace {

/// Bytes of the UTF-8 sequence at the front of `text`, 0 if it is broken.
std::size_t sequence_length(std::string_view text) {
  const auto lead = static_cast<unsigned char>(text[0]);
  const std::size_t length = lead < 0x80                    ? 1
                             : lead >= 0xc2 && lead < 0xe0  ? 2
                             : lead >= 0xe0 && lead < 0xf0  ? 3
                             : lead >= 0xf0 && lead <= 0xf4 ? 4
                                                            : 0;
  if (length == 0 || length > text.size()) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((static_cast<unsigned char>(text[i]) & 0xc0) != 0x80) return 0;
  }
  // Surrogates, overlong forms and the two non-characters are no XML.
  const std::string_view seen = text.substr(0, length);
  if (seen >= "\xed\xa0" && seen < "\xee") return 0;
  if (lead == 0xe0 && seen < "\xe0\xa0") return 0;
  if (lead == 0xf0 && seen < "\xf0\x90") return 0;
  if (lead == 0xf4 && seen >= "\xf4\x90") return 0;
  if (seen == "\xef\xbf\xbe" || seen == "\xef\xbf\xbf") return 0;
  return length;
}

std::string hex(Colour colour) {
  std::array<char, 8> text{};
  std::snprintf(text.data(), text.size(), "#%02x%02x%02x", colour.red,
                colour.green, colour.blue);
  return text.data();
}

const char* anchor_name(Anchor anchor) {
  switch (anchor) {
    case Anchor::start:
      return "";
    case Anchor::middle:
      return " text-anchor=\"middle\"";
    case Anchor::end:
      return " text-anchor=\"end\"";
  }
  throw InternalError("an Anchor without a name");
}

}  // namespace

std::string xml_escaped(std::string_view text) {
  std::string escaped;
  while (!text.empty()) {
    const std::size_t length = sequence_length(text);
    const auto byte = static_cast<unsigned char>(text[0]);
    if (length == 0 || (byte < 0x20 && byte != '\n' && byte != '\t') ||
        byte == 0x7f) {
      escaped += '?';
    } else if (text[0] == '&') {
      escaped += "&amp;";
    } else if (text[0] == '<') {
      escaped += "&lt;";
    } else if (text[0] == '>') {
      escaped += "&gt;";
    } else if (text[0] == '"') {
      escaped += "&quot;";
    } else {
      escaped += text.substr(0, length);
    }
    text.remove_prefix(std::max<std::size_t>(length, 1));
  }
  return escaped;
}

std::string svg_number(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.2f", value);
  std::string number = text.data();
  number.erase(number.find_last_not_of('0') + 1);
  if (number.back() == '.') number.pop_back();
  return number == "-0" ? "0" : number;
}

void SvgWriter::rect(Box box, std::string_view classes, double radius) {
  body_ +=
      join("<rect class=\"", classes, "\" x=\"", svg_number(box.x), "\" y=\"",
           svg_number(box.y), "\" width=\"", svg_number(box.width),
           "\" height=\"", svg_number(box.height), "\"");
  if (radius > 0) body_ += join(" rx=\"", svg_number(radius), "\"");
  body_ += "/>\n";
}

void SvgWriter::path(const std::vector<Box>& boxes, std::string_view classes) {
  if (boxes.empty()) return;
  body_ += join("<path class=\"", classes, "\" d=\"");
  for (Box box : boxes) {
    body_ += join("M", svg_number(box.x), " ", svg_number(box.y), "h",
                  svg_number(box.width), "v", svg_number(box.height), "h",
                  svg_number(-box.width), "z");
  }
  body_ += "\"/>\n";
}

void SvgWriter::line(double x1, double y1, double x2, double y2,
                     std::string_view classes) {
  body_ += join("<line class=\"", classes, "\" x1=\"", svg_number(x1),
                "\" y1=\"", svg_number(y1), "\" x2=\"", svg_number(x2),
                "\" y2=\"", svg_number(y2), "\"/>\n");
}

void SvgWriter::text(double x, double y, std::string_view text,
                     std::string_view classes, Anchor anchor) {
  body_ += join("<text class=\"", classes, "\" x=\"", svg_number(x), "\" y=\"",
                svg_number(y), "\"", anchor_name(anchor), ">",
                xml_escaped(text), "</text>\n");
}

void SvgWriter::upward_text(double x, double y, std::string_view text,
                            std::string_view classes) {
  body_ += join("<text class=\"", classes, "\" text-anchor=\"middle\" ",
                "transform=\"translate(", svg_number(x), " ", svg_number(y),
                ") rotate(-90)\">", xml_escaped(text), "</text>\n");
}

double SvgWriter::paragraph(double x, double y, double width,
                            std::string_view text, std::string_view classes) {
  constexpr double kFont = 12;
  constexpr double kLine = 16;
  const auto columns = static_cast<std::size_t>(width / (kFont * 0.53));
  double height = 0;
  for (const std::string& part : wrapped(text, columns)) {
    height += kLine;
    this->text(x, y + height - 4, part, classes);
  }
  return height;
}

std::string svg_style() {
  std::string style =
      "text{font:12px -apple-system,\"Segoe UI\",\"Noto Sans\",Helvetica,"
      "Arial,sans-serif;fill:#1f2328}\n"
      "text.h{font-size:15px;font-weight:600}\n"
      "text.soft{fill:#59636e}\n"
      "text.small{font-size:11px;fill:#59636e}\n"
      "text.on{fill:#14181c;font-weight:600}\n"
      "text.tiny{font-size:10px}\n"
      "path{shape-rendering:crispEdges}\n"
      ".paper{fill:#ffffff}\n.none{fill:#eef1f4}\n.many{fill:" +
      hex(kManyRanksColour) + "}\n";
  for (int index = 0; index < kColours; ++index) {
    style += join(".r", index, "{fill:", hex(colour_at(index)), "}\n");
  }
  for (int level = 1; level <= kHeatLevels; ++level) {
    style += join(".heat", level, "{fill:", hex(colour_at(0)), ";opacity:",
                  svg_number(static_cast<double>(level) / kHeatLevels), "}\n");
  }
  style +=
      ".part{opacity:.6}\n"
      ".hatch{fill:url(#hatch)}\n"
      "#hatch path{stroke:#ffffff;stroke-width:2.4;fill:none;"
      "shape-rendering:auto}\n"
      ".cut{stroke:#ffffff;stroke-width:1.5;fill:none;shape-rendering:auto}\n"
      ".hair{stroke:#ffffff;stroke-width:1;fill:none;shape-rendering:auto;"
      "vector-effect:non-scaling-stroke}\n"
      ".border{stroke:#1f2328;stroke-width:1;stroke-dasharray:4 3;opacity:.6}\n"
      ".rule{stroke:#59636e;stroke-width:1}\n"
      ".mean{stroke:#1f2328;stroke-width:1.2;stroke-dasharray:3 3}\n"
      "@media (prefers-color-scheme:dark){\n"
      "text{fill:#e6edf3}\ntext.on{fill:#14181c}\ntext.soft,text.small{fill:#"
      "9aa4ae}\n"
      ".paper{fill:#0d1117}\n.none{fill:#1c232c}\n"
      "#hatch path,.cut,.hair{stroke:#0d1117}\n"
      ".border,.mean{stroke:#e6edf3}\n.rule{stroke:#9aa4ae}\n}\n";
  return style;
}

std::string rank_class(int rank) {
  return rank < 0 ? "many" : join("r", colour_index(rank));
}

double text_width(std::string_view text, double font_size) {
  const auto letters = std::ranges::count_if(text, [](char byte) {
    return (static_cast<unsigned char>(byte) & 0xc0) != 0x80;
  });
  return static_cast<double>(letters) * font_size * 0.6;
}

}  // namespace longspan
