#include "longspan/draw/text.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "longspan/core/detail/check.h"
#include "longspan/draw/detail/palette.h"

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

/// One line of a table over steps: a label, and an entry for each step.
struct TextRow {
  std::string label, note;
  int rank = kNoRank;
  std::vector<std::string> entries;
};

std::size_t letters_of(const std::string& text) {
  return static_cast<std::size_t>(std::ranges::count_if(text, [](char byte) {
    return (static_cast<unsigned char>(byte) & 0xc0) != 0x80;
  }));
}

class TextPainter {
 public:
  explicit TextPainter(const TextOptions& options)
      : options_(options),
        marks_(options.glyphs == Glyphs::ascii ? kAscii : kUnicode) {}

  void paint(const Strips& strips);
  void paint(const MaskGrid& grid);
  void paint(const StepTable& table);
  void paint(const WorkBars& bars);
  void paint(const PlanTable& table);
  void paint(const StrategyTable& table);
  void paint(const RunChart& chart);
  void paint(const BorderTable& table);
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
  std::string flow(const PlanFlow& flow, const char* arrow) const;
  void steps(const std::vector<TextRow>& rows, const std::vector<int>& numbers,
             std::size_t least);
  void columns(const std::vector<std::vector<std::string>>& lines);

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

/// As many steps beside each other as fit, and the others below.
void TextPainter::steps(const std::vector<TextRow>& rows,
                        const std::vector<int>& numbers, std::size_t least) {
  std::size_t width = least;
  for (int step : numbers) {
    width = std::max(width, std::to_string(step).size() + 1);
  }
  for (const TextRow& row : rows) {
    for (const std::string& entry : row.entries) {
      width = std::max(width, letters_of(entry));
    }
  }
  const auto padded = [&](const std::string& text) {
    return std::string(width + 1 - std::min(width, letters_of(text)), ' ') +
           text;
  };
  const std::size_t block = std::max<std::size_t>(
      1, static_cast<std::size_t>(std::max(0, room())) / (width + 1));
  for (std::size_t first = 0; first < numbers.size(); first += block) {
    const std::size_t end = std::min(numbers.size(), first + block);
    gutter("step", "");
    for (std::size_t c = first; c < end; ++c) {
      out_ += padded(std::to_string(numbers[c]));
    }
    line();
    for (const TextRow& row : rows) {
      gutter(row.label, row.note);
      for (std::size_t c = first; c < end; ++c) {
        const std::string& entry = row.entries[c];
        out_ += coloured(entry == "-" ? kNoRank : row.rank, padded(entry));
      }
      line();
    }
  }
}

void TextPainter::paint(const StepTable& table) {
  line(table.heading);
  std::vector<TextRow> rows;
  std::vector<int> numbers;
  for (const StepRow& row : table.rows) {
    TextRow text{join("rank ", row.rank), "", row.rank, {}};
    for (const StepCell& cell : row.cells) {
      text.entries.push_back(cell.pairs == 0 ? "-" : short_count(cell.pairs));
      if (rows.empty()) numbers.push_back(cell.step);
    }
    rows.push_back(std::move(text));
  }
  steps(rows, numbers, 6);
  paragraph(table.caption);
}

std::string TextPainter::flow(const PlanFlow& flow, const char* arrow) const {
  if (flow.tokens == 0) return "-";
  return join(short_count(flow.tokens), " ", arrow, " ",
              peers_text(flow.peers, 9));
}

void TextPainter::paint(const PlanTable& table) {
  line(table.heading);
  const bool ascii = options_.glyphs == Glyphs::ascii;
  const char* const to = ascii ? ">" : "→";
  const char* const from = ascii ? "<" : "←";
  std::vector<TextRow> rows;
  std::vector<int> numbers;
  for (const PlanRow& row : table.rows) {
    TextRow pairs{join("rank ", row.rank), "pairs", row.rank, {}};
    TextRow sends{"", "sends", row.rank, {}};
    TextRow gets{"", "gets", row.rank, {}};
    TextRow returns{"", "grads out", row.rank, {}};
    TextRow homecomings{"", "grads in", row.rank, {}};
    for (const PlanCell& cell : row.cells) {
      if (rows.empty()) numbers.push_back(cell.step);
      pairs.entries.push_back(cell.pairs == 0 ? "-" : short_count(cell.pairs));
      sends.entries.push_back(flow(cell.sends, to));
      gets.entries.push_back(flow(cell.arrivals, from));
      returns.entries.push_back(flow(cell.returns, to));
      homecomings.entries.push_back(flow(cell.homecomings, from));
    }
    rows.push_back(std::move(pairs));
    for (TextRow* more : {&sends, &gets, &returns, &homecomings}) {
      const bool moves = std::ranges::any_of(
          more->entries, [](const std::string& entry) { return entry != "-"; });
      if (moves) rows.push_back(std::move(*more));
    }
  }
  if (!rows.empty()) steps(rows, numbers, 6);
  if (table.head_ranks > 1) {
    line();
    line("Bytes traded inside the team: tokens for heads before, and back.");
    std::vector<std::vector<std::string>> lines{
        {"", "forward", "and back", "backward", "and back"}};
    for (const PlanRow& row : table.rows) {
      lines.push_back({join("rank ", row.rank),
                       short_count(row.to_heads.forward),
                       short_count(row.to_tokens.forward),
                       short_count(row.to_heads.backward),
                       short_count(row.to_tokens.backward)});
    }
    columns(lines);
  }
  paragraph(table.caption);
}

/// Lines of a table: the first column to the left, the others to the right.
void TextPainter::columns(const std::vector<std::vector<std::string>>& lines) {
  std::vector<std::size_t> widths(lines.front().size(), 0);
  for (const auto& cells : lines) {
    for (std::size_t c = 0; c < cells.size(); ++c) {
      widths[c] = std::max(widths[c], cells[c].size());
    }
  }
  for (const auto& cells : lines) {
    std::string text = cells[0] + std::string(widths[0] - cells[0].size(), ' ');
    for (std::size_t c = 1; c < cells.size(); ++c) {
      text += std::string(widths[c] + 2 - cells[c].size(), ' ') + cells[c];
    }
    line(text);
  }
}

void TextPainter::paint(const StrategyTable& table) {
  line(table.heading);
  std::vector<std::vector<std::string>> lines{
      {"", "steps", "hops", "pairs", "balance", "forward", "backward"}};
  for (const StrategyRow& row : table.rows) {
    lines.push_back(
        {row.name, short_count(row.steps), short_count(row.hops),
         short_count(row.most_pairs),
         ratio_text(static_cast<double>(row.most_pairs), row.mean_pairs),
         short_count(row.most_forward), short_count(row.most_backward)});
  }
  if (!table.rows.empty()) columns(lines);
  paragraph(table.caption);
}

/// A line for each run: where it lies, and whose state comes in and goes on.
void TextPainter::paint(const RunChart& chart) {
  line(chart.heading);
  const auto name = [](int rank) {
    return rank == kNoRank ? std::string("-") : join("rank ", rank);
  };
  std::vector<std::vector<std::string>> lines{
      {"", "document", "tokens", "comes from", "goes on to"}};
  for (const DrawnRun& run : chart.runs) {
    lines.push_back({name(run.rank), std::to_string(run.document),
                     join(run.tokens.begin, " .. ", run.tokens.end - 1),
                     name(run.before), name(run.after)});
  }
  if (!chart.runs.empty()) columns(lines);
  paragraph(chart.caption);
}

void TextPainter::paint(const BorderTable& table) {
  line(table.heading);
  std::vector<std::vector<std::string>> lines{{"from, to"}};
  for (const BorderRow& row : table.rows) {
    lines.front().push_back(std::to_string(row.rank));
    std::vector<std::string>& cells =
        lines.emplace_back(std::vector{std::to_string(row.rank)});
    for (const BorderCell& cell : row.cells) {
      const bool nothing = cell.states + cell.rows == 0;
      cells.push_back(nothing ? "-" : short_count(cell.bytes));
    }
    cells.push_back(short_count(row.bytes));
  }
  lines.front().emplace_back("in all");
  columns(lines);
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
    gutter(join("rank ", work.rank), short_count(work.amount));
    const double share = bars.scale == 0 ? 0
                                         : static_cast<double>(work.amount) /
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
  check(options.width > kTextGutter + 8 && options.width <= kMostColumns,
        "to_text: a width of ", options.width, " columns; expected ",
        kTextGutter + 9, " to ", kMostColumns);
  TextPainter painter(options);
  painter.paragraph(picture.title);
  for (const Panel* panel : panels_of(picture)) {
    painter.line();
    std::visit([&](const auto& what) { painter.paint(what); }, *panel);
  }
  return painter.text();
}

}  // namespace longspan
