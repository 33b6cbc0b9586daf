#include "longspan/kernels/attention/hopper/work_table.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <limits>
#include <utility>

namespace longspan::hopper {

namespace {

int32_t narrow(int64_t value) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 2;
  return static_cast<int32_t>(std::clamp(value, -kMost, kMost));
}

/// The queries of a line that see a key, as lines of their own. Both bounds
/// rise by one with the query or stand still, so between two places where one
/// of them starts or stops the number of keys is a straight line.
std::vector<KeyLines> seeing_parts(const KeyLines& line) {
  const auto [first, last] = line.queries;
  std::array<int64_t, 6> cuts{first,
                              line.begin_min - line.begin_shift,
                              line.begin_max - line.begin_shift,
                              line.end_min - line.end_shift,
                              line.end_max - line.end_shift,
                              last};
  for (int64_t& cut : cuts) cut = std::clamp(cut, first, std::max(first, last));
  std::ranges::sort(cuts);
  const auto keys = [&](int64_t query) {
    return std::clamp(query + line.end_shift, line.end_min, line.end_max) -
           std::clamp(query + line.begin_shift, line.begin_min, line.begin_max);
  };
  std::vector<KeyLines> parts;
  for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
    TokenRange queries{cuts[i], cuts[i + 1]};
    if (queries.empty()) continue;
    const int64_t at_first = keys(queries.begin), at_end = keys(queries.end);
    if (at_first > at_end) {
      queries.end = std::min(queries.end, queries.begin + at_first);
    } else if (at_first < at_end) {
      queries.begin = std::max(queries.begin, queries.begin + 1 - at_first);
    } else if (at_first <= 0) {
      continue;
    }
    if (queries.begin >= queries.end) continue;
    if (!parts.empty() && parts.back().queries.end == queries.begin) {
      parts.back().queries.end = queries.end;
    } else {
      parts.push_back(line);
      parts.back().queries = queries;
    }
  }
  return parts;
}

/// A line all of whose queries see a key, as blocks of queries read it: rows
/// are queries and columns keys.
struct QuerySide {
  KeyLines line;

  int64_t row() const { return line.row; }
  TokenRange rows() const { return line.queries; }
  TokenRange columns_of(int64_t query) const { return line.keys_of(query); }
  WorkLine told() const {
    return {narrow(line.queries.begin), narrow(line.queries.end),
            narrow(line.begin_shift),   narrow(line.begin_min),
            narrow(line.begin_max),     narrow(line.end_shift),
            narrow(line.end_min),       narrow(line.end_max)};
  }
};

/// The same as blocks of keys read it: rows are keys and columns queries.
struct KeySide {
  KeyLines line;

  int64_t row() const { return line.row; }
  TokenRange rows() const {
    return {line.keys_of(line.queries.begin).begin,
            line.keys_of(line.queries.end - 1).end};
  }
  /// Bounds rise by one with the query or stand still, so the first query that
  /// sees a key is where the end passes it, the last where the begin does.
  TokenRange columns_of(int64_t key) const {
    const auto [first, last] = line.queries;
    return {key < line.end_min
                ? first
                : std::clamp(key + 1 - line.end_shift, first, last),
            key >= line.begin_max
                ? last
                : std::clamp(key + 1 - line.begin_shift, first, last)};
  }
  WorkKeyLine told() const {
    return {narrow(rows().begin),       narrow(rows().end),
            narrow(line.queries.begin), narrow(line.queries.end),
            narrow(line.end_min),       narrow(1 - line.end_shift),
            narrow(line.begin_max),     narrow(1 - line.begin_shift)};
  }
};

/// Lines of one row such that no two share a row of the block, ascending.
template <class Side>
using Layer = std::vector<Side>;

/// The lines of a row in as few layers as they need.
template <class Side>
std::vector<Layer<Side>> layers_of(std::span<const Side> lines) {
  std::vector<Layer<Side>> layers;
  for (const Side& line : lines) {
    const auto fits = [&](const Layer<Side>& layer) {
      return layer.back().rows().end <= line.rows().begin;
    };
    auto layer = std::ranges::find_if(layers, fits);
    if (layer == layers.end()) layer = layers.insert(layer, Layer<Side>{});
    layer->push_back(line);
  }
  return layers;
}

/// Calls visit(lines of a document, its rows) for one after another. Lines that
/// share a row or a column are of one document, and follow one another.
template <class Side, class Visit>
void each_document(std::span<const Side> lines, const Visit& visit) {
  TokenRange rows, columns;  // of the document so far
  std::size_t first = 0;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const TokenRange mine = lines[i].rows();
    const TokenRange seen{lines[i].columns_of(mine.begin).begin,
                          lines[i].columns_of(mine.end - 1).end};
    if (mine.begin < rows.end || !intersect(seen, columns).empty()) {
      rows.end = std::max(rows.end, mine.end);
      columns = {std::min(columns.begin, seen.begin),
                 std::max(columns.end, seen.end)};
    } else {
      if (i > first) visit(lines.subspan(first, i - first), rows);
      first = i;
      rows = mine;
      columns = seen;
    }
  }
  if (!lines.empty()) visit(lines.subspan(first), rows);
}

/// Where blocks must end: both ends of long documents, ascending.
template <class Side>
std::vector<int64_t> borders(std::span<const Side> lines, int64_t block) {
  std::vector<int64_t> places;
  each_document(lines, [&](std::span<const Side>, TokenRange rows) {
    if (rows.size() < block) return;
    places.push_back(rows.begin);
    places.push_back(rows.end);
  });
  return places;
}

/// The lines of a row, each in parts all of which see something, ascending.
template <class Side>
std::vector<Side> sides_of(std::span<const KeyLines> lines) {
  std::vector<Side> sides;
  for (const KeyLines& line : lines) {
    for (const KeyLines& part : seeing_parts(line)) sides.push_back({part});
  }
  std::ranges::stable_sort(sides, {},
                           [](const Side& side) { return side.rows().begin; });
  return sides;
}

/// Those of `lines`, which ascend, that are of a row.
std::span<const KeyLines> lines_of_row(std::span<const KeyLines> lines,
                                       int64_t row) {
  const auto [first, last] =
      std::ranges::equal_range(lines, row, {}, &KeyLines::row);
  return {first, last};
}

/// The most keys that a query of a line sees: it is one where a bound starts or
/// stops to rise.
int64_t most_keys(const KeyLines& line) {
  int64_t most = 0;
  for (const int64_t query :
       {line.queries.begin, line.queries.end - 1,
        line.begin_min - line.begin_shift, line.begin_max - line.begin_shift,
        line.end_min - line.end_shift, line.end_max - line.end_shift}) {
    most = std::max(most, line.keys_of(std::clamp(query, line.queries.begin,
                                                  line.queries.end - 1))
                              .size());
  }
  return most;
}

template <class Side, class Line>
class Builder {
 public:
  Builder(const WorkShape& shape, WorkOf<Line>& table)
      : shape_(shape), table_(table) {}

  /// Rows of `elsewhere`, which ascend, are left out where no line has them.
  void add_row(int64_t row, std::span<const Side> lines,
               std::span<const KeyLines> elsewhere) {
    const std::vector<Layer<Side>> layers = layers_of(lines);
    std::vector<int32_t> first_lines;
    for (const Layer<Side>& layer : layers) {
      first_lines.push_back(narrow(std::ssize(table_.lines)));
      for (const Side& line : layer) table_.lines.push_back(line.told());
    }
    const std::vector<int64_t> stops = borders(lines, shape_.block_queries);
    std::vector<std::size_t> at(layers.size(), 0);
    std::size_t stop = 0;
    int64_t next = 0;
    while (next < shape_.queries) {
      int64_t begin = next;
      if (!shape_.every_query) {
        // On to the first row that sees something.
        int64_t seen = shape_.queries;
        for (std::size_t i = 0; i < layers.size(); ++i) {
          skip(layers[i], at[i], begin);
          if (at[i] < layers[i].size()) {
            seen =
                std::min(seen, std::max(begin, layers[i][at[i]].rows().begin));
          }
        }
        begin = seen;
      }
      while (!elsewhere.empty() && elsewhere.front().queries.begin <= begin) {
        begin = std::max(begin, elsewhere.front().queries.end);
        elsewhere = elsewhere.subspan(1);
      }
      if (begin >= shape_.queries) break;
      while (stop < stops.size() && stops[stop] <= begin) ++stop;
      next = std::min(begin + shape_.block_queries, shape_.queries);
      if (stop < stops.size()) next = std::min(next, stops[stop]);
      if (!elsewhere.empty()) {
        next = std::min(next, elsewhere.front().queries.begin);
      }
      add_block(row, {begin, next}, layers, first_lines, at);
    }
  }

 private:
  /// Past the lines that end at or before a row.
  static void skip(const Layer<Side>& layer, std::size_t& at, int64_t row) {
    while (at < layer.size() && layer[at].rows().end <= row) ++at;
  }

  void add_block(int64_t row, TokenRange rows,
                 const std::vector<Layer<Side>>& layers,
                 const std::vector<int32_t>& first_lines,
                 std::vector<std::size_t>& at) {
    WorkBlock block{narrow(std::ssize(table_.parts)), 0, 0, 0};
    WorkPart empty{};
    empty.row = narrow(row);
    empty.first_query = narrow(rows.begin);
    empty.queries = static_cast<int16_t>(rows.size());
    for (std::size_t i = 0; i < layers.size(); ++i) {
      skip(layers[i], at[i], rows.begin);
      WorkPart part = empty;
      int64_t counted = 0;
      const auto finish = [&] {
        if (part.lines == 0) return;
        if (counted < rows.size()) part.full_last = part.full_first;
        table_.parts.push_back(part);
        ++block.parts;
        block.tiles += (part.last_key - part.first_key + shape_.tile_keys - 1) /
                       shape_.tile_keys;
        part = empty;
        counted = 0;
      };
      for (std::size_t j = at[i]; j < layers[i].size(); ++j) {
        const Side& line = layers[i][j];
        if (line.rows().begin >= rows.end) break;
        const TokenRange mine{std::max(line.rows().begin, rows.begin),
                              std::min(line.rows().end, rows.end)};
        // Both bounds rise, so the first and the last row tell all.
        const TokenRange first = line.columns_of(mine.begin),
                         last = line.columns_of(mine.end - 1);
        if (part.lines > 0 && (first.begin > part.last_key + shape_.tile_keys ||
                               last.end + shape_.tile_keys < part.first_key)) {
          finish();  // far from those before: nothing between is looked at
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
  WorkOf<Line>& table_;
};

template <class Side, class Line>
WorkOf<Line> table_of(std::span<const KeyLines> lines, const WorkShape& shape) {
  WorkOf<Line> table;
  Builder<Side, Line> builder(shape, table);
  for (int64_t row = 0; row < shape.rows; ++row) {
    const auto sides = sides_of<Side>(lines_of_row(lines, row));
    if (sides.empty() && !shape.every_query) continue;
    builder.add_row(row, std::span<const Side>(sides),
                    lines_of_row(shape.elsewhere, row));
  }
  std::ranges::stable_sort(table.blocks, std::ranges::greater(),
                           &WorkBlock::tiles);
  return table;
}

template <class Record>
std::size_t bytes_of(const std::vector<Record>& records) {
  return records.size() * sizeof(Record);
}

}  // namespace

template <class Line>
std::size_t WorkOf<Line>::bytes() const {
  return kHeader + bytes_of(blocks) + bytes_of(parts) + bytes_of(lines) +
         bytes_of(turns);
}

template <class Line>
std::vector<std::byte> WorkOf<Line>::image() const {
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
  append(turns);
  return made;
}

template struct WorkOf<WorkLine>;
template struct WorkOf<WorkKeyLine>;

WorkTable work_table(std::span<const KeyLines> lines, const WorkShape& shape) {
  return table_of<QuerySide, WorkLine>(lines, shape);
}

LinesByWidth lines_by_width(std::span<const KeyLines> lines, int64_t most) {
  LinesByWidth by_width;
  while (!lines.empty()) {
    const auto of_row = lines_of_row(lines, lines.front().row);
    lines = lines.subspan(of_row.size());
    const auto sides = sides_of<QuerySide>(of_row);
    each_document(
        std::span<const QuerySide>(sides),
        [&](std::span<const QuerySide> document, TokenRange) {
          const bool narrow = std::ranges::all_of(
              document,
              [&](const auto& side) { return most_keys(side.line) <= most; });
          for (const QuerySide& side : document) {
            (narrow ? by_width.narrow : by_width.wide).push_back(side.line);
          }
        });
  }
  return by_width;
}

KeyWorkTable key_work_table(std::span<const KeyLines> lines,
                            const WorkShape& shape) {
  return table_of<KeySide, WorkKeyLine>(lines, shape);
}

namespace {

/// The columns of a block, from its first to its last, and its row.
struct BlockColumns {
  int32_t row, first, last;
  int32_t told;  // of its last part, the first: from here on it tells itself
  BlockColumns(const KeyWorkTable& table, const WorkBlock& block) {
    const auto parts = std::span(table.parts)
                           .subspan(static_cast<std::size_t>(block.first_part),
                                    static_cast<std::size_t>(block.parts));
    row = parts.front().row;
    told = parts.back().first_key;
    first = std::ranges::min(parts, {}, &WorkPart::first_key).first_key;
    last = std::ranges::max(parts, {}, &WorkPart::last_key).last_key;
  }
};

/// The number of a chain for each block: those whose columns hang together.
std::vector<std::size_t> chains_of(const std::vector<BlockColumns>& blocks) {
  std::vector<std::size_t> order(blocks.size()), chains(blocks.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::ranges::stable_sort(order, {}, [&](std::size_t i) {
    return std::pair(blocks[i].row, blocks[i].first);
  });
  std::size_t count = 0;
  int32_t row = -1, reach = 0;
  for (const std::size_t i : order) {
    const BlockColumns& block = blocks[i];
    const bool goes_on = block.row == row && block.first < reach;
    reach = goes_on ? std::max(reach, block.last) : block.last;
    row = block.row;
    count += goes_on ? 0 : 1;
    chains[i] = count - 1;
  }
  return chains;
}

}  // namespace

void give_turns(KeyWorkTable& table) {
  std::vector<BlockColumns> columns;
  for (const WorkBlock& block : table.blocks) {
    std::ranges::stable_sort(
        std::span(table.parts)
            .subspan(static_cast<std::size_t>(block.first_part),
                     static_cast<std::size_t>(block.parts)),
        std::ranges::greater(), &WorkPart::last_key);
    columns.emplace_back(table, block);
  }
  const std::vector<std::size_t> chains = chains_of(columns);
  struct Chain {
    int32_t last = -1, reach = 0, begin = WorkTurn::kNever;
  };
  std::vector<Chain> walked(chains.size());
  table.turns.assign(chains.size(), {});
  for (std::size_t i = 0; i < chains.size(); ++i) {
    Chain& chain = walked[chains[i]];
    table.turns[i].before = chain.last;
    table.turns[i].alone_from = chain.reach;
    chain.last = narrow(static_cast<int64_t>(i));
    chain.reach = std::max(chain.reach, columns[i].last);
  }
  for (std::size_t i = chains.size(); i-- > 0;) {
    Chain& chain = walked[chains[i]];
    table.turns[i].hands_on =
        chain.begin < columns[i].told ? chain.begin : WorkTurn::kNever;
    chain.begin = std::min(chain.begin, columns[i].first);
  }
}

}  // namespace longspan::hopper
