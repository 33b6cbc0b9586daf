#include "longspan/kernels/attention/hopper/work_table.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace longspan::hopper {

namespace {

int32_t narrow(int64_t value) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 2;
  return static_cast<int32_t>(std::clamp(value, -kMost, kMost));
}

/// Lines of one row such that no two share a query, ascending.
using Layer = std::vector<KeyLines>;

/// The lines of a row in as few layers as they need.
std::vector<Layer> layers_of(std::span<const KeyLines> lines) {
  std::vector<Layer> layers;
  for (const KeyLines& line : lines) {
    const auto fits = [&](const Layer& layer) {
      return layer.back().queries.end <= line.queries.begin;
    };
    auto layer = std::ranges::find_if(layers, fits);
    if (layer == layers.end()) layer = layers.insert(layer, Layer{});
    layer->push_back(line);
  }
  return layers;
}

/// Where blocks must end: both ends of the long lines.
std::vector<int64_t> borders(std::span<const KeyLines> lines, int64_t block) {
  std::vector<int64_t> places;
  for (const KeyLines& line : lines) {
    if (line.queries.size() < block) continue;
    places.push_back(line.queries.begin);
    places.push_back(line.queries.end);
  }
  std::ranges::sort(places);
  return places;
}

class Builder {
 public:
  Builder(const WorkShape& shape, WorkTable& table)
      : shape_(shape), table_(table) {}

  void add_row(int64_t row, std::span<const KeyLines> lines) {
    const std::vector<Layer> layers = layers_of(lines);
    std::vector<int32_t> first_lines;
    for (const Layer& layer : layers) {
      first_lines.push_back(narrow(std::ssize(table_.lines)));
      for (const KeyLines& line : layer) table_.lines.push_back(as_told(line));
    }
    const std::vector<int64_t> stops = borders(lines, shape_.block_queries);
    std::vector<std::size_t> at(layers.size(), 0);
    std::size_t stop = 0;
    int64_t next = 0;
    while (next < shape_.queries) {
      int64_t begin = next;
      if (!shape_.every_query) {
        // On to the first query that sees something.
        int64_t seen = shape_.queries;
        for (std::size_t i = 0; i < layers.size(); ++i) {
          skip(layers[i], at[i], begin);
          if (at[i] < layers[i].size()) {
            seen =
                std::min(seen, std::max(begin, layers[i][at[i]].queries.begin));
          }
        }
        begin = seen;
        if (begin == shape_.queries) break;
      }
      while (stop < stops.size() && stops[stop] <= begin) ++stop;
      next = std::min(begin + shape_.block_queries, shape_.queries);
      if (stop < stops.size()) next = std::min(next, stops[stop]);
      add_block(row, {begin, next}, layers, first_lines, at);
    }
  }

 private:
  static WorkLine as_told(const KeyLines& line) {
    return {narrow(line.queries.begin), narrow(line.queries.end),
            narrow(line.begin_shift),   narrow(line.begin_min),
            narrow(line.begin_max),     narrow(line.end_shift),
            narrow(line.end_min),       narrow(line.end_max)};
  }

  /// Past the lines that end at or before a query.
  static void skip(const Layer& layer, std::size_t& at, int64_t query) {
    while (at < layer.size() && layer[at].queries.end <= query) ++at;
  }

  void add_block(int64_t row, TokenRange queries,
                 const std::vector<Layer>& layers,
                 const std::vector<int32_t>& first_lines,
                 std::vector<std::size_t>& at) {
    WorkBlock block{narrow(std::ssize(table_.parts)), 0, 0, 0};
    const WorkPart empty{narrow(row),
                         narrow(queries.begin),
                         0,
                         0,
                         0,
                         0,
                         0,
                         static_cast<int16_t>(queries.size()),
                         0};
    for (std::size_t i = 0; i < layers.size(); ++i) {
      skip(layers[i], at[i], queries.begin);
      WorkPart part = empty;
      int64_t counted = 0;
      const auto finish = [&] {
        if (part.lines == 0) return;
        if (counted < queries.size()) part.full_last = part.full_first;
        table_.parts.push_back(part);
        ++block.parts;
        block.tiles += (part.last_key - part.first_key + shape_.tile_keys - 1) /
                       shape_.tile_keys;
        part = empty;
        counted = 0;
      };
      for (std::size_t j = at[i]; j < layers[i].size(); ++j) {
        const KeyLines& line = layers[i][j];
        if (line.queries.begin >= queries.end) break;
        const TokenRange mine{std::max(line.queries.begin, queries.begin),
                              std::min(line.queries.end, queries.end)};
        // Both lines rise, so the first and the last query tell all.
        const TokenRange first = line.keys_of(mine.begin),
                         last = line.keys_of(mine.end - 1);
        if (part.lines > 0 && (first.begin > part.last_key + shape_.tile_keys ||
                               last.end + shape_.tile_keys < part.first_key)) {
          finish();  // keys far from those before: nothing between is looked at
        }
        if (part.lines == 0) {
          part.first_line = first_lines[i] + narrow(static_cast<int64_t>(j));
          part.first_key = narrow(first.begin);
          part.last_key = narrow(last.end);
          part.full_first = narrow(last.begin);
          part.full_last = narrow(first.end);
        } else {
          part.first_key = std::min(part.first_key, narrow(first.begin));
          part.last_key = std::max(part.last_key, narrow(last.end));
          part.full_first = std::max(part.full_first, narrow(last.begin));
          part.full_last = std::min(part.full_last, narrow(first.end));
        }
        ++part.lines;
        counted += mine.size();
      }
      finish();
    }
    if (block.parts == 0) {
      table_.parts.push_back(empty);
      block.parts = 1;
    }
    table_.blocks.push_back(block);
  }

  const WorkShape& shape_;
  WorkTable& table_;
};

template <class Record>
std::size_t bytes_of(const std::vector<Record>& records) {
  return records.size() * sizeof(Record);
}

}  // namespace

std::size_t WorkTable::bytes() const {
  return kHeader + bytes_of(blocks) + bytes_of(parts) + bytes_of(lines);
}

std::vector<std::byte> WorkTable::image() const {
  std::vector<std::byte> made(bytes());
  std::size_t at = kHeader;
  const auto append = [&](const auto& records) {
    if (records.empty()) return;
    std::memcpy(made.data() + at, records.data(), bytes_of(records));
    at += bytes_of(records);
  };
  append(blocks);
  append(parts);
  append(lines);
  return made;
}

WorkTable work_table(std::span<const KeyLines> lines, const WorkShape& shape) {
  WorkTable table;
  Builder builder(shape, table);
  std::size_t at = 0;
  for (int64_t row = 0; row < shape.rows; ++row) {
    std::size_t end = at;
    while (end < lines.size() && lines[end].row == row) ++end;
    if (end > at || shape.every_query) {
      builder.add_row(row, lines.subspan(at, end - at));
    }
    at = end;
  }
  std::ranges::stable_sort(
      table.blocks,
      [](const WorkBlock& a, const WorkBlock& b) { return a.tiles > b.tiles; });
  return table;
}

}  // namespace longspan::hopper
