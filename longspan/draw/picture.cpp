#include "longspan/draw/picture.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include "longspan/core/detail/check.h"

namespace longspan {

std::vector<const Panel*> panels_of(const Picture& picture) {
  std::vector<const Panel*> panels;
  for (const auto& row : picture.rows) {
    for (const PanelColumn& column : row) {
      for (const Panel& panel : column) panels.push_back(&panel);
    }
  }
  return panels;
}

Picture beside(const Picture& left, const Picture& right) {
  Picture both;
  both.title = left.title + " | " + right.title;
  both.description = left.description + " Beside it: " + right.description;
  int64_t scale = 0;
  std::vector<PanelColumn> columns;
  for (const Picture* picture : {&left, &right}) {
    PanelColumn column;
    for (const Panel* panel : panels_of(*picture)) {
      column.push_back(*panel);
      if (const auto* bars = std::get_if<WorkBars>(panel)) {
        scale = std::max(scale, bars->scale);
      }
    }
    columns.push_back(std::move(column));
  }
  for (PanelColumn& column : columns) {
    for (Panel& panel : column) {
      if (auto* bars = std::get_if<WorkBars>(&panel)) bars->scale = scale;
    }
  }
  both.rows.push_back(std::move(columns));
  return both;
}

std::string short_count(int64_t count) {
  if (count < 1'000'000) return std::to_string(count);
  constexpr std::array<const char*, 5> kUnits{"k", "M", "G", "T", "P"};
  auto value = static_cast<double>(count) / 1e3;
  std::size_t unit = 0;
  while (value >= 999.5 && unit + 1 < kUnits.size()) {
    value /= 1e3;
    ++unit;
  }
  std::array<char, 32> text{};
  const int digits = value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  std::snprintf(text.data(), text.size(), "%.*f%s", digits, value,
                kUnits[unit]);
  return text.data();
}

std::string ratio_text(double most, double mean) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.2f", mean > 0 ? most / mean : 1.0);
  return text.data();
}

std::string peers_text(const std::vector<int>& peers, std::size_t most) {
  std::string text;
  for (int peer : peers) {
    text += join(text.empty() ? "" : " ", peer);
    if (text.size() > most) return join(peers.size(), " ranks");
  }
  return text;
}

std::vector<std::string> wrapped(std::string_view text, std::size_t columns) {
  std::vector<std::string> lines;
  while (!text.empty()) {
    const std::size_t end = text.find(' ');
    const std::string_view word = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    if (word.empty()) continue;
    if (!lines.empty() && lines.back().size() + 1 + word.size() <= columns) {
      lines.back() += join(" ", word);
    } else {
      lines.emplace_back(word);
    }
  }
  return lines;
}

}  // namespace longspan
