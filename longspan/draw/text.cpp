#include "longspan/draw/text.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "longspan/core/check.h"
#include "longspan/draw/palette.h"

namespace longspan {

namespace {

/// The marks of both alphabets; each is one column wide.
struct Marks {
  const char* held;
  const char* pad;
  const char* part;
  const char* nothing;
  const char* open;
  const char* dash;
  const char* close;
  const char* alone;
};
constexpr Marks kUnicode{"█", "░", "▒", "·", "├", "─", "┤", "│"};
constexpr Marks kAscii{"#", "%", "+", ".", "[", "-", "]", "|"};
constexpr std::array<const char*, 8> kEighths{"",  "▏", "▎", "▍",
                                              "▌", "▋", "▊", "▉"};

class TextPainter {
 public:
  explicit TextPainter(const TextOptions& options)
      : options_(options),
        marks_(options.glyphs == Glyphs::ascii ? kAscii : kUnicode) {}

  void paint(const Strips& strips);
  void paint(const MaskGrid& grid);
  void paint(const StepTable& table);
  void paint(const WorkBars& bars);
  void paragraph(const std::string& text);
  void line(const std::string& text = "");
  const std::string& text() const { return out_; }

 private:
  int room() const { return options_.width - kTextGutter; }
  void check_room(std::size_t cells) const;
  void gutter(const std::string& label, const std::string& note);
  void documents(const Strips& strips);
  std::string coloured(int rank, const std::string& text) const;
  std::string repeated(const char* mark, int64_t times) const;
  std::string owner_mark(const StripCell& cell) const;
  std::string strip_mark(const StripCell& cell) const;
  std::string mask_mark(const MaskCell& cell, int columns) const;
  std::string bar(double length) const;

  TextOptions options_;
  Marks marks_;
  std::string out_;
};

/// Ends a line; no line ends in spaces.
void TextPainter::line(const std::string& text) {
  out_ += text;
  while (!out_.empty() && out_.back() == ' ') out_.pop_back();
  out_ += '\n';
}

void TextPainter::check_room(std::size_t cells) const {
  check(static_cast<int64_t>(cells) <= room(), "to_text: ", cells,
        " cells need a width of ",
        cells + static_cast<std::size_t>(kTextGutter), " columns, not ",
        options_.width, "; draw with fewer cells");
}

std::string TextPainter::repeated(const char* mark, int64_t times) const {
  std::string text;
  for (int64_t i = 0; i < times; ++i) text += mark;
  return text;
}

std::string TextPainter::coloured(int rank, const std::string& text) const {
  if (options_.ink == Ink::plain || rank == kNoRank || text.empty()) {
    return text;
  }
  const Colour colour = rank_colour(rank);
  return join("\x1b[38;2;", int{colour.red}, ";", int{colour.green}, ";",
              int{colour.blue}, "m", text, "\x1b[0m");
}

/// "rank 3      16 ": what does not fit loses the word, then the note.
void TextPainter::gutter(const std::string& label, const std::string& note) {
  constexpr std::size_t kRoom = kTextGutter - 1;
  std::string text = label;
  if (text.size() + 1 + note.size() > kRoom && text.starts_with("rank ")) {
    text.erase(0, 5);
  }
  text.resize(std::min(text.size(), kRoom));
  if (!note.empty() && text.size() + 1 + note.size() <= kRoom) {
    text += std::string(kRoom - text.size() - note.size(), ' ') + note;
  }
  text.resize(kTextGutter, ' ');
  out_ += text;
}

void TextPainter::paragraph(const std::string& text) {
  for (const std::string& part :
       wrapped(text, static_cast<std::size_t>(options_.width))) {
    line(part);
  }
}

std::string TextPainter::owner_mark(const StripCell& cell) const {
  if (cell.rank == kManyRanks) return coloured(cell.rank, marks_.part);
  if (cell.rank == kNoRank) return marks_.nothing;
  return coloured(cell.rank, std::string(1, letter_of(cell.rank)));
}

std::string TextPainter::strip_mark(const StripCell& cell) const {
  if (cell.rank == kNoRank) return marks_.nothing;
  const char* mark = cell.held < cell.tokens.size() ? marks_.part
                     : cell.pads == Pads::none      ? marks_.held
                                                    : marks_.pad;
  return coloured(cell.rank, mark);
}

/// A line of brackets, one for each document, and pads after them.
void TextPainter::documents(const Strips& strips) {
  const auto& cells = strips.strips.front().cells;
  const bool plain =
      strips.documents.size() < 2 &&
      std::ranges::all_of(
          cells, [](const StripCell& cell) { return cell.pads == Pads::none; });
  if (plain || strips.documents.empty()) return;
  gutter("document", "");
  std::size_t cell = 0;
  const auto count_until = [&](int64_t token) {
    const std::size_t first = cell;
    while (cell < cells.size() && cells[cell].tokens.begin < token) ++cell;
    return static_cast<int64_t>(cell - first);
  };
  for (const DocumentMark& mark : strips.documents) {
    const int64_t real = count_until(mark.slot.begin + mark.length);
    const std::string number = std::to_string(mark.document);
    if (real == 1) out_ += marks_.alone;
    if (real >= 2) {
      const int64_t inside = real - 2;
      const int64_t named =
          std::ssize(number) <= inside ? std::ssize(number) : 0;
      out_ += marks_.open + repeated(marks_.dash, (inside - named) / 2);
      if (named > 0) out_ += number;
      out_ += repeated(marks_.dash, inside - named - (inside - named) / 2);
      out_ += marks_.close;
    }
    out_ += repeated(marks_.pad, count_until(mark.slot.end));
  }
  out_ += repeated(marks_.pad, std::ssize(cells) - static_cast<int64_t>(cell));
  line();
}

void TextPainter::paint(const Strips& strips) {
  line(strips.heading);
  if (strips.tokens == 0) line("No tokens.");
  check_room(strips.strips.front().cells.size());
  documents(strips);
  for (std::size_t i = 0; i < strips.strips.size(); ++i) {
    const Strip& strip = strips.strips[i];
    gutter(i == 0 ? "owner" : strip.label, i == 0 ? "" : strip.note);
    for (const StripCell& cell : strip.cells) {
      out_ += i == 0 ? owner_mark(cell) : strip_mark(cell);
    }
    line();
  }
  bool pads = false;
  bool part = false;
  for (const Strip& strip : strips.strips) {
    for (const StripCell& cell : strip.cells) {
      pads = pads || cell.pads != Pads::none;
      part = part || cell.rank == kManyRanks ||
             (cell.rank >= 0 && cell.held < cell.tokens.size());
    }
  }
  paragraph(join(strips.caption, pads ? join(" ", marks_.pad, " pads.") : "",
                 part ? join(" ", marks_.part, " shared cells.") : ""));
}

std::string TextPainter::mask_mark(const MaskCell& cell, int columns) const {
  if (cell.coverage == Coverage::none) return repeated(marks_.nothing, columns);
  if (cell.coverage == Coverage::some) {
    return coloured(cell.rank, repeated(marks_.part, columns));
  }
  if (cell.step == kNoStep || letter_of(cell.step) == '#') {
    return coloured(cell.rank, repeated(marks_.held, columns));
  }
  const std::string letter(1, letter_of(cell.step));
  return coloured(cell.rank, repeated(letter.c_str(), columns));
}

void TextPainter::paint(const MaskGrid& grid) {
  line(grid.heading);
  if (grid.query_cells.empty() || grid.key_cells.empty()) {
    line(grid.query_cells.empty() ? "No queries." : "No keys.");
    return;
  }
  check_room(grid.key_cells.size());
  // A letter is about twice as high as wide, so two make a square.
  const int columns = 2 * std::ssize(grid.key_cells) <= room() ? 2 : 1;
  gutter("queries", "keys of");
  for (const StripCell& key : grid.key_cells) {
    for (int i = 0; i < columns; ++i) out_ += owner_mark(key);
  }
  line();
  int previous = kNoRank;
  for (std::size_t q = 0; q < grid.query_cells.size(); ++q) {
    const StripCell& query = grid.query_cells[q];
    gutter(query.rank == previous     ? ""
           : query.rank == kManyRanks ? "many ranks"
                                      : join("rank ", query.rank),
           "");
    previous = query.rank;
    for (std::size_t k = 0; k < grid.key_cells.size(); ++k) {
      out_ += mask_mark(grid.at(q, k), columns);
    }
    line();
  }
  bool steps = false;
  bool part = false;
  for (const MaskCell& cell : grid.cells) {
    steps = steps || (cell.coverage == Coverage::all && cell.step > 0);
    part = part || cell.coverage == Coverage::some;
  }
  paragraph(join(
      steps ? "Digit: the ring step at which the rank holds those keys. " : "",
      part ? join(marks_.part, " partly visible. ") : "", grid.caption));
}

void TextPainter::paint(const StepTable& table) {
  line(table.heading);
  std::size_t width = 6;
  for (const StepRow& row : table.rows) {
    for (const StepCell& cell : row.cells) {
      width = std::max({width, short_count(cell.pairs).size(),
                        std::to_string(cell.step).size() + 1});
    }
  }
  const auto padded = [&](const std::string& text) {
    return std::string(width + 1 - std::min(width, text.size()), ' ') + text;
  };
  const std::size_t columns =
      table.rows.empty() ? 0 : table.rows.front().cells.size();
  const std::size_t block = std::max<std::size_t>(
      1, static_cast<std::size_t>(std::max(0, room())) / (width + 1));
  for (std::size_t first = 0; first < columns; first += block) {
    const std::size_t end = std::min(columns, first + block);
    gutter("step", "");
    for (std::size_t c = first; c < end; ++c) {
      out_ += padded(std::to_string(table.rows.front().cells[c].step));
    }
    line();
    for (const StepRow& row : table.rows) {
      gutter(join("rank ", row.rank), "");
      for (std::size_t c = first; c < end; ++c) {
        const int64_t pairs = row.cells[c].pairs;
        out_ += coloured(pairs == 0 ? kNoRank : row.rank,
                         padded(pairs == 0 ? "-" : short_count(pairs)));
      }
      line();
    }
  }
  paragraph(table.caption);
}

std::string TextPainter::bar(double length) const {
  const auto eighths = static_cast<int64_t>(length * 8 + 0.5);
  std::string text = repeated(marks_.held, eighths / 8);
  if (options_.glyphs == Glyphs::unicode) {
    text += kEighths[static_cast<std::size_t>(eighths % 8)];
  } else if (eighths % 8 >= 4) {
    text += marks_.held;
  }
  return text.empty() && length > 0 ? marks_.alone : text;
}

void TextPainter::paint(const WorkBars& bars) {
  line(bars.heading);
  for (const WorkBar& work : bars.bars) {
    gutter(join("rank ", work.rank), short_count(work.pairs));
    const double share = bars.scale == 0 ? 0
                                         : static_cast<double>(work.pairs) /
                                               static_cast<double>(bars.scale);
    line(coloured(work.rank, bar(share * room())));
  }
  paragraph(bars.caption);
}

}  // namespace

char letter_of(int number) {
  constexpr std::string_view kLetters =
      "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
  return number >= 0 && number < static_cast<int>(kLetters.size())
             ? kLetters[static_cast<std::size_t>(number)]
             : '#';
}

std::string to_text(const Picture& picture, const TextOptions& options) {
  check(options.width > kTextGutter + 8, "to_text: a width of ", options.width,
        " columns; expected at least ", kTextGutter + 9);
  TextPainter painter(options);
  painter.paragraph(picture.title);
  for (const Panel* panel : panels_of(picture)) {
    painter.line();
    std::visit([&](const auto& what) { painter.paint(what); }, *panel);
  }
  return painter.text();
}

}  // namespace longspan
