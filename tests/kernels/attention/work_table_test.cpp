#include "longspan/kernels/attention/hopper/work_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <map>
#include <span>
#include <stdexcept>
#include <utility>

#include "longspan/core/mask.h"
#include "tests/support/masks.h"
#include "tests/support/property.h"

namespace longspan::hopper {
namespace {

using test::at;
using test::Random;
using test::SharedMaskCase;

// ---- What a kernel makes of a table.

template <class Line>
std::span<const WorkPart> parts_of(const WorkOf<Line>& table,
                                   const WorkBlock& block) {
  return std::span(table.parts)
      .subspan(static_cast<std::size_t>(block.first_part),
               static_cast<std::size_t>(block.parts));
}

template <class Line>
std::span<const Line> lines_of(const WorkOf<Line>& table,
                               const WorkPart& part) {
  return std::span(table.lines)
      .subspan(static_cast<std::size_t>(part.first_line),
               static_cast<std::size_t>(part.lines));
}

TokenRange queries_of(const WorkPart& part) {
  return {part.first_query, part.first_query + part.queries};
}

/// The queries that a line has; from here on read keys for queries and queries
/// for keys where the table is one of keys.
TokenRange queries_of(const WorkLine& line) {
  return {line.first_query, line.last_query};
}
TokenRange queries_of(const WorkKeyLine& line) {
  return {line.first_key, line.last_key};
}

TokenRange keys_of(const WorkKeyLine& line, int64_t key) {
  const int64_t first = line.first_query, last = line.last_query;
  return {key < line.end_min ? first
                             : std::clamp(key + line.after_end, first, last),
          key >= line.begin_max
              ? last
              : std::clamp(key + line.after_begin, first, last)};
}
TokenRange keys_of(const WorkLine& line, int64_t query) {
  const auto place = [&](int64_t shift, int64_t least, int64_t most) {
    return std::clamp(query + shift, least, most);
  };
  return {place(line.begin_shift, line.begin_min, line.begin_max),
          place(line.end_shift, line.end_min, line.end_max)};
}

int64_t tiles_of(const WorkPart& part, int tile_keys) {
  return (part.last_key - part.first_key + tile_keys - 1) / tile_keys;
}

/// How often each (row, query, key) is computed.
struct Counts {
  int64_t queries = 0, keys = 0;
  std::vector<int> times;

  Counts(int64_t rows, int64_t of_queries, int64_t of_keys)
      : queries(of_queries),
        keys(of_keys),
        times(static_cast<std::size_t>(rows * of_queries * of_keys)) {}

  void add(int64_t row, int64_t query, int64_t key) {
    if (key < 0 || key >= keys || query < 0 || query >= queries) {
      throw std::out_of_range(join("query ", query, ", key ", key));
    }
    ++at(times, (row * queries + query) * keys + key);
  }
  void add(const WorkLine&, int64_t row, int64_t query, int64_t key) {
    add(row, query, key);
  }
  void add(const WorkKeyLine&, int64_t row, int64_t key, int64_t query) {
    add(row, query, key);
  }
};

/// A tile that lies in the full range is computed whole, of others what the
/// lines show. The first line that has a query speaks for it.
template <class Line>
void compute(const WorkOf<Line>& table, const WorkPart& part, int tile_keys,
             Counts& counts) {
  for (int64_t q = part.first_query; q < queries_of(part).end; ++q) {
    TokenRange mine{};
    for (const Line& line : lines_of(table, part)) {
      if (!queries_of(line).contains(q)) continue;
      mine = keys_of(line, q);
      break;
    }
    for (int64_t tile = part.first_key; tile < part.last_key;
         tile += tile_keys) {
      const TokenRange all{tile, tile + tile_keys};
      const bool whole =
          all.begin >= part.full_first && all.end <= part.full_last;
      const TokenRange seen = whole ? all : intersect(all, mine);
      for (int64_t k = seen.begin; k < seen.end; ++k) {
        counts.add(Line{}, part.row, q, k);
      }
    }
  }
}

// ---- Laws of any table.

template <class Line>
void check_shape_of(const WorkOf<Line>& table, const WorkShape& shape) {
  // Blocks: each query in one of them at most, those with most tiles first.
  std::map<std::pair<int64_t, int64_t>, int> blocks_of;
  int64_t before = std::numeric_limits<int64_t>::max();
  int64_t parts = 0;
  for (const WorkBlock& block : table.blocks) {
    ASSERT_LE(block.tiles, before);
    before = block.tiles;
    ASSERT_GE(block.parts, 1);
    parts += block.parts;
    const WorkPart& first = parts_of(table, block).front();
    ASSERT_GE(first.queries, 1);
    ASSERT_LE(first.queries, shape.block_queries);
    ASSERT_GE(first.first_query, 0);
    ASSERT_LE(queries_of(first).end, shape.queries);
    int64_t tiles = 0, most = 0;
    for (const WorkPart& part : parts_of(table, block)) {
      ASSERT_EQ(part.row, first.row);
      ASSERT_EQ(part.first_query, first.first_query);
      ASSERT_EQ(part.queries, first.queries);
      tiles += tiles_of(part, shape.tile_keys);
      // A kernel waits for a tile of every part.
      if (block.tiles > 0) {
        ASSERT_GT(part.last_key, part.first_key);
      }
      int64_t last = queries_of(part).begin;
      for (const Line& line : lines_of(table, part)) {
        const TokenRange mine = intersect(queries_of(part), queries_of(line));
        ASSERT_FALSE(mine.empty()) << "a line of other queries";
        ASSERT_GE(mine.begin, last) << "lines of a part share a query";
        last = mine.end;
        const int64_t seen =
            keys_of(line, mine.end - 1).end - keys_of(line, mine.begin).begin;
        most += (seen + shape.tile_keys - 1) / shape.tile_keys + 1;
      }
    }
    ASSERT_EQ(block.tiles, tiles);
    ASSERT_LE(block.tiles, most) << "keys far from all lines are looked at";
    if (block.tiles == 0) {
      ASSERT_TRUE(shape.every_query) << "a block that sees nothing";
      ASSERT_EQ(block.parts, 1);
      ASSERT_EQ(first.lines, 0);
    }
    for (int64_t q = first.first_query; q < queries_of(first).end; ++q) {
      ASSERT_EQ((++blocks_of[{first.row, q}]), 1) << "query " << q;
    }
  }
  ASSERT_EQ(parts, std::ssize(table.parts));
  if (shape.every_query) {
    ASSERT_EQ(std::ssize(blocks_of), shape.rows * shape.queries);
  }
}

template <class Line>
void check_full_ranges(const WorkOf<Line>& table) {
  for (const WorkPart& part : table.parts) {
    if (part.full_first >= part.full_last) continue;
    ASSERT_GE(part.full_first, part.first_key);
    ASSERT_LE(part.full_last, part.last_key);
    for (int64_t q = part.first_query; q < queries_of(part).end; ++q) {
      bool found = false;
      for (const Line& line : lines_of(table, part)) {
        if (!queries_of(line).contains(q)) continue;
        found = keys_of(line, q).contains(
            TokenRange{part.full_first, part.full_last});
      }
      ASSERT_TRUE(found) << "query " << q << " does not see all of ["
                         << part.full_first << ", " << part.full_last << ")";
    }
  }
}

// ---- Random masks and ownerships.

struct TableCase {
  SharedMaskCase shared;
  int block_queries = 1, tile_keys = 1;
  bool every_query = false;

  std::vector<TableCase> smaller() const {
    std::vector<TableCase> cases;
    for (const SharedMaskCase& less : shared.smaller()) {
      cases.push_back(*this);
      cases.back().shared = less;
    }
    for (int TableCase::* size :
         {&TableCase::block_queries, &TableCase::tile_keys}) {
      if (this->*size == 1) continue;
      cases.push_back(*this);
      --(cases.back().*size);
    }
    return cases;
  }

  std::string to_string() const {
    return join(shared.to_string(), "; blocks of ", block_queries,
                " queries, tiles of ", tile_keys, " keys",
                every_query ? ", every query" : "");
  }
};

TableCase draw_table(Random& random, const SharedMaskCase& shared,
                     const std::vector<int>& sizes) {
  return {shared, random.pick(sizes), random.pick(sizes), random.one_in(2)};
}

template <class Line>
void check_pairs(const WorkOf<Line>& table, const WorkShape& shape,
                 const Counts& visible) {
  ASSERT_NO_FATAL_FAILURE(check_shape_of(table, shape));
  ASSERT_NO_FATAL_FAILURE(check_full_ranges(table));
  Counts computed = visible;
  std::ranges::fill(computed.times, 0);
  for (const WorkPart& part : table.parts) {
    compute(table, part, shape.tile_keys, computed);
  }
  const auto [got, wanted] =
      std::ranges::mismatch(computed.times, visible.times);
  ASSERT_EQ(got, computed.times.end())
      << "a pair is computed " << *got << " times, not " << *wanted << ", at "
      << got - computed.times.begin();
}

/// Two tables in place of one: documents whose queries see few keys have
/// blocks of their own. One of them writes what a query sees; that it sees
/// nothing both may say.
void check_two_tables(std::span<const KeyLines> lines, WorkShape shape,
                      const Counts& visible) {
  const int64_t most = shape.tile_keys + 1;
  const LinesByWidth by_width = lines_by_width(lines, most);
  for (const KeyLines& line : by_width.narrow) {
    for (int64_t q = line.queries.begin; q < line.queries.end; ++q) {
      ASSERT_LE(line.keys_of(q).size(), most);
    }
  }
  const bool every_query = shape.every_query;
  shape.elsewhere = by_width.narrow;
  const WorkTable wide = work_table(by_width.wide, shape);
  shape.every_query = false;
  shape.elsewhere = by_width.wide;
  shape.block_queries = std::max(1, shape.block_queries / 4);
  const WorkTable narrow = work_table(by_width.narrow, shape);
  std::map<std::pair<int64_t, int64_t>, int> blocks_of;
  Counts computed = visible;
  std::ranges::fill(computed.times, 0);
  for (const WorkTable* table : {&wide, &narrow}) {
    ASSERT_NO_FATAL_FAILURE(check_full_ranges(*table));
    for (const WorkBlock& block : table->blocks) {
      const WorkPart& first = parts_of(*table, block).front();
      for (int64_t q = first.first_query; q < queries_of(first).end; ++q) {
        ++blocks_of[{first.row, q}];
      }
    }
    for (const WorkPart& part : table->parts) {
      compute(*table, part, shape.tile_keys, computed);
    }
  }
  ASSERT_EQ(computed.times, visible.times) << "in two tables";
  for (const KeyLines& line : lines) {
    for (int64_t q = line.queries.begin; q < line.queries.end; ++q) {
      if (line.keys_of(q).empty()) continue;
      ASSERT_EQ((blocks_of[{line.row, q}]), 1) << "query " << q;
    }
  }
  if (every_query) {
    ASSERT_EQ(std::ssize(blocks_of), shape.rows * shape.queries);
  }
}

/// The steps of a ring: every rank against every owner, one in each row, with
/// a row without keys between them and a last one against the keys of all.
void table_shows_every_pair_once(const TableCase& c) {
  const Mask mask = c.shared.mask.mask();
  const Ownership owners = c.shared.owners.ownership();
  std::vector<std::vector<TokenRange>> held;
  for (int owner = 0; owner < owners.ranks(); ++owner) {
    held.push_back(owners.ranges_of(owner));
    if (owner == 0) held.emplace_back();
  }
  held.emplace_back();
  for (int owner = owners.ranks() - 1; owner >= 0; --owner) {
    for (TokenRange range : owners.ranges_of(owner)) {
      held.back().push_back(range);
    }
  }
  for (int rank = 0; rank < owners.ranks(); ++rank) {
    const auto queries = test::tokens_of(owners.ranges_of(rank));
    std::vector<KeyLines> lines;
    Counts visible(std::ssize(held), std::ssize(queries), owners.tokens());
    for (std::size_t row = 0; row < held.size(); ++row) {
      const auto told = static_cast<int64_t>(row);
      for (const KeyLines& line :
           key_lines(mask, owners.ranges_of(rank), held[row], told)) {
        lines.push_back(line);
      }
      const auto keys = test::tokens_of(held[row]);
      for (int64_t q = 0; q < std::ssize(queries); ++q) {
        for (int64_t k = 0; k < std::ssize(keys); ++k) {
          if (mask.allows(at(queries, q), at(keys, k))) {
            visible.add(told, q, k);
          }
        }
      }
    }
    WorkShape shape{.rows = std::ssize(held),
                    .queries = visible.queries,
                    .block_queries = c.block_queries,
                    .tile_keys = c.tile_keys,
                    .every_query = c.every_query};
    const WorkTable table = work_table(lines, shape);
    ASSERT_EQ(table.lines.size(), lines.size());
    ASSERT_NO_FATAL_FAILURE(check_pairs(table, shape, visible));
    ASSERT_NO_FATAL_FAILURE(check_two_tables(lines, shape, visible));
    shape.queries = visible.keys;
    const KeyWorkTable of_keys = key_work_table(lines, shape);
    ASSERT_EQ(of_keys.lines.size(), lines.size());
    ASSERT_NO_FATAL_FAILURE(check_pairs(of_keys, shape, visible))
        << "blocks of keys";
  }
}

TEST(WorkTable, ShowsEveryVisiblePairOnce) {
  test::for_all(
      4000,
      [](Random& random) {
        return draw_table(random, test::draw_shared_mask(random, 24),
                          {1, 2, 3, 5, 8, 16, 64});
      },
      table_shows_every_pair_once);
}

TEST(WorkTable, ShowsEveryPairOfTheStepsOfAHeadTailRing) {
  test::for_all(
      600,
      [](Random& random) {
        const int ranks = static_cast<int>(random.between(1, 7));
        const test::PackingCase packing = test::draw_packing(random, 120, 3);
        const test::OwnershipCase owners =
            test::OwnershipCase{OwnershipKind::head_tail, ranks, packing}
                .fitted();
        const SharedMaskCase shared{
            test::draw_mask(random, owners.packing, test::token_masks()),
            owners};
        return draw_table(random, shared.fitted(), {7, 16, 32, 64, 128});
      },
      table_shows_every_pair_once);
}

/// Lines whose queries need not see a key: bounds that cross once or twice.
struct AnyLine {
  int64_t first = 0, queries = 0, keys = 1;
  int64_t begin_shift = 0, begin_min = 0, begin_max = 0;
  int64_t end_shift = 0, end_min = 0, end_max = 0;
  int block_queries = 1, tile_keys = 1;
  bool every_query = false;

  KeyLines line() const {
    return {.queries = {first, first + queries},
            .begin_shift = begin_shift,
            .begin_min = begin_min,
            .begin_max = begin_max,
            .end_shift = end_shift,
            .end_min = end_min,
            .end_max = end_max};
  }
  std::vector<AnyLine> smaller() const { return {}; }
  std::string to_string() const {
    return join("queries ", first, " + ", queries, " of ", keys,
                " keys; begin ", begin_shift, " in [", begin_min, ", ",
                begin_max, "], end ", end_shift, " in [", end_min, ", ",
                end_max, "]; blocks of ", block_queries, ", tiles of ",
                tile_keys);
  }
};

AnyLine draw_any_line(Random& random) {
  const int64_t keys = random.between(1, 20);
  const auto bounds = [&] {
    const int64_t x = random.between(0, keys), y = random.between(0, keys);
    return std::pair(std::min(x, y), std::max(x, y));
  };
  const auto [begin_min, begin_max] = bounds();
  const auto [end_min, end_max] = bounds();
  return {.first = random.between(0, 5),
          .queries = random.between(0, 24),
          .keys = keys,
          .begin_shift = random.between(-24, 24),
          .begin_min = begin_min,
          .begin_max = begin_max,
          .end_shift = random.between(-24, 24),
          .end_min = end_min,
          .end_max = end_max,
          .block_queries = random.pick(std::vector{1, 2, 5, 8, 64}),
          .tile_keys = random.pick(std::vector{1, 2, 5, 8, 64}),
          .every_query = random.one_in(2)};
}

TEST(WorkTable, TakesLinesWhoseQueriesSeeNothing) {
  test::for_all(4000, draw_any_line, [](const AnyLine& c) {
    const std::vector lines{c.line()};
    Counts visible(1, c.first + c.queries + 3, c.keys);
    for (int64_t q = lines[0].queries.begin; q < lines[0].queries.end; ++q) {
      const TokenRange keys = lines[0].keys_of(q);
      for (int64_t k = keys.begin; k < keys.end; ++k) visible.add(0, q, k);
    }
    WorkShape shape{.rows = 1,
                    .queries = visible.queries,
                    .block_queries = c.block_queries,
                    .tile_keys = c.tile_keys,
                    .every_query = c.every_query};
    ASSERT_NO_FATAL_FAILURE(
        check_pairs(work_table(lines, shape), shape, visible));
    shape.queries = visible.keys;
    ASSERT_NO_FATAL_FAILURE(
        check_pairs(key_work_table(lines, shape), shape, visible));
  });
}

// ---- Long documents, and short ones.

/// The blocks of the queries in a range, with all numbers counted from its
/// first query and key: ascending by query.
struct Told {
  int64_t first_query, queries;
  std::vector<std::array<int64_t, 5>> parts;
  std::vector<std::array<int64_t, 8>> lines;
  friend bool operator==(const Told&, const Told&) = default;
};

std::vector<Told> blocks_in(const WorkTable& table, TokenRange range) {
  std::vector<Told> found;
  const int64_t zero = range.begin;
  for (const WorkBlock& block : table.blocks) {
    const WorkPart& first = parts_of(table, block).front();
    if (intersect(queries_of(first), range).empty()) continue;
    Told told{first.first_query - zero, first.queries, {}, {}};
    for (const WorkPart& part : parts_of(table, block)) {
      told.parts.push_back({part.first_key - zero, part.last_key - zero,
                            part.full_first - zero, part.full_last - zero,
                            part.lines});
      for (const WorkLine& line : lines_of(table, part)) {
        told.lines.push_back({line.first_query - zero, line.last_query - zero,
                              line.begin_shift, line.begin_min - zero,
                              line.begin_max - zero, line.end_shift,
                              line.end_min - zero, line.end_max - zero});
      }
    }
    found.push_back(std::move(told));
  }
  std::ranges::sort(found, {}, &Told::first_query);
  return found;
}

constexpr int kBlock = 32, kTile = 16;

/// A document with holes, groups or a prefix, among others without.
struct SurroundedCase {
  test::MaskKind kind = test::MaskKind::causal;
  int64_t length = kBlock;
  std::vector<TokenRange> hidden = {}, groups = {};
  int64_t prefix = 0;
  std::vector<int64_t> before = {}, after = {};

  /// All documents, and where this one begins.
  std::pair<Mask, int64_t> among() const {
    test::MaskCase made{{}, kind, /*before=*/10, /*after=*/3};
    int64_t begin = 0;
    const auto add = [&](int64_t tokens, int64_t first) {
      made.packing.documents.push_back({tokens, tokens});
      if (prefix > 0) made.prefix.push_back(first);
    };
    for (int64_t tokens : before) {
      add(tokens, 0);
      begin += tokens;
    }
    add(length, prefix);
    for (int64_t tokens : after) add(tokens, 0);
    made.hidden = hidden;
    made.groups = groups;
    for (auto* ranges : {&made.hidden, &made.groups}) {
      for (TokenRange& range : *ranges) {
        range = {range.begin + begin, range.end + begin};
      }
    }
    return {made.mask(), begin};
  }

  std::vector<SurroundedCase> smaller() const {
    std::vector<SurroundedCase> cases;
    const auto fewer = [&](auto SurroundedCase::* list) {
      for (const auto& less : test::without_one(this->*list)) {
        cases.push_back(*this);
        cases.back().*list = less;
      }
    };
    fewer(&SurroundedCase::before);
    fewer(&SurroundedCase::after);
    fewer(&SurroundedCase::hidden);
    fewer(&SurroundedCase::groups);
    if (prefix > 0) {
      cases.push_back(*this);
      --cases.back().prefix;
    }
    return cases;
  }

  std::string to_string() const {
    return join(among().first.to_string(), ": ", length, " tokens, hidden ",
                test::listed(hidden), ", groups ", test::listed(groups),
                ", prefix ", prefix, ", after ", test::listed(before),
                " and before ", test::listed(after));
  }
};

SurroundedCase draw_surrounded(Random& random) {
  SurroundedCase drawn{random.pick(test::token_masks()),
                       random.between(kBlock, 4 * kBlock)};
  if (random.one_in(3)) {
    // Narrower than the window: what lies on both sides hangs together.
    const int64_t first = random.between(1, drawn.length - 6);
    drawn.hidden = {{first, first + random.between(1, 5)}};
  }
  if (random.one_in(3)) {
    drawn.prefix = random.between(1, drawn.length);
  } else if (random.one_in(2)) {
    const int64_t first = random.between(0, drawn.length - 9);
    drawn.groups = {{first, first + 4}, {first + 5, first + 9}};
  }
  for (auto* around : {&drawn.before, &drawn.after}) {
    for (int64_t i = random.between(0, 5); i > 0; --i) {
      around->push_back(random.between(1, random.one_in(3) ? 90 : 20));
    }
  }
  return drawn;
}

WorkTable table_of(const Mask& mask, int block_queries, int tile_keys,
                   bool every_query = true) {
  const TokenRange all{0, mask.queries()};
  return work_table(key_lines(mask, {all}, {all}),
                    {.rows = 1,
                     .queries = mask.queries(),
                     .block_queries = block_queries,
                     .tile_keys = tile_keys,
                     .every_query = every_query});
}

void blocks_do_not_depend_on_neighbours(const SurroundedCase& c) {
  SurroundedCase lonely = c;
  lonely.before = lonely.after = {};
  const Mask alone = lonely.among().first;
  const auto [mask, begin] = c.among();
  const TokenRange document{begin, begin + c.length};
  for (const bool every_query : {false, true}) {
    ASSERT_EQ(
        blocks_in(table_of(mask, kBlock, kTile, every_query), document),
        blocks_in(table_of(alone, kBlock, kTile, every_query), {0, c.length}));
  }
}

TEST(WorkTable, OfALongDocumentDoesNotDependOnItsNeighbours) {
  test::for_all(4000, draw_surrounded, blocks_do_not_depend_on_neighbours);
}

/// Which table it is in is decided by its own lines, and its blocks there.
void two_tables_do_not_depend_on_neighbours(const SurroundedCase& c) {
  SurroundedCase lonely = c;
  lonely.before = lonely.after = {};
  const Mask alone = lonely.among().first;
  const auto [mask, begin] = c.among();
  const TokenRange document{begin, begin + c.length};
  const auto blocks = [](const Mask& of, TokenRange range, bool narrow) {
    const TokenRange all{0, of.queries()};
    const LinesByWidth lines = lines_by_width(key_lines(of, {all}, {all}), 40);
    return blocks_in(
        work_table(narrow ? lines.narrow : lines.wide,
                   {.rows = 1,
                    .queries = of.queries(),
                    .block_queries = narrow ? kBlock / 4 : kBlock,
                    .tile_keys = kTile,
                    .elsewhere = narrow ? lines.wide : lines.narrow}),
        range);
  };
  for (const bool narrow : {false, true}) {
    ASSERT_EQ(blocks(mask, document, narrow),
              blocks(alone, {0, c.length}, narrow));
  }
}

TEST(WorkTable, TellsALongDocumentsWidthByItsOwnLines) {
  test::for_all(4000, draw_surrounded, two_tables_do_not_depend_on_neighbours);
}

TEST(WorkTable, TakesWindowsAndShortDocumentsForNarrow) {
  const auto documents = [](const Mask& mask, int64_t most) {
    const TokenRange all{0, mask.queries()};
    const LinesByWidth lines =
        lines_by_width(key_lines(mask, {all}, {all}), most);
    return std::pair(lines.narrow.size(), lines.wide.size());
  };
  using Counted = std::pair<std::size_t, std::size_t>;
  const Mask causal = Mask::causal(Packing::of({100, 3, 101, 99}));
  EXPECT_EQ(documents(causal, 100), Counted(3, 1));
  EXPECT_EQ(documents(causal, 2), Counted(0, 4));
  EXPECT_EQ(documents(causal, 101), Counted(4, 0));
  const Mask window = Mask::sliding(Packing::single(1000), 128);
  EXPECT_EQ(documents(window, 127), Counted(0, 1));
  EXPECT_EQ(documents(window, 128), Counted(1, 0));
}

TEST(WorkTable, PutsManyShortDocumentsIntoABlock) {
  const std::vector<int64_t> documents(1000, 16);
  const WorkTable table =
      table_of(Mask::causal(Packing::of(documents)), 128, 128);
  ASSERT_EQ(table.blocks.size(), 125U);
  for (const WorkBlock& block : table.blocks) {
    EXPECT_EQ(block.tiles, 1);
    EXPECT_EQ(block.parts, 1);
    EXPECT_EQ(parts_of(table, block).front().lines, 8);
  }
  // Cut by the ends of blocks they reach into two tiles, never more.
  std::vector<int64_t> shifted = documents;
  shifted.insert(shifted.begin(), 5);
  const WorkTable cut = table_of(Mask::causal(Packing::of(shifted)), 128, 128);
  ASSERT_EQ(cut.blocks.size(), 126U);
  EXPECT_EQ(cut.blocks.front().tiles, 2);
  for (const WorkBlock& block : cut.blocks) EXPECT_LE(block.tiles, 2);
}

TEST(WorkTable, LooksAtNothingBetweenKeysThatLieFarApart) {
  // The head and the tail of a rank: the first sees its document at the start
  // of the keys, the second another one 1000 keys on.
  const Mask mask = Mask::full(Packing::of({20, 1000, 20}));
  const WorkTable table =
      work_table(key_lines(mask, {{0, 20}, {1020, 1040}}, {{0, 1040}}),
                 {.rows = 1, .queries = 40});
  ASSERT_EQ(table.blocks.size(), 1U);
  EXPECT_EQ(table.blocks[0].parts, 2);
  EXPECT_EQ(table.blocks[0].tiles, 2);
}

TEST(WorkTable, OfCausalTokensIsWorkedOutByHand) {
  // 300 tokens: blocks of 128, 128 and 44 queries, the last with most keys.
  const WorkTable table = table_of(Mask::causal(Packing::single(300)), 128, 64);
  ASSERT_EQ(table.blocks.size(), 3U);
  const std::array<std::array<int64_t, 6>, 3> expected{{
      {256, 44, 0, 300, 0, 257},
      {128, 128, 0, 256, 0, 129},
      {0, 128, 0, 128, 0, 1},
  }};
  const std::array<int32_t, 3> tiles{5, 4, 2};
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(table.blocks[i].tiles, tiles.at(i));
    const WorkPart& part = parts_of(table, table.blocks[i]).front();
    EXPECT_EQ((std::array<int64_t, 6>{part.first_query, part.queries,
                                      part.first_key, part.last_key,
                                      part.full_first, part.full_last}),
              expected.at(i));
  }
}

TEST(WorkTable, OfThreeDocumentsIsWhatThePageSays) {
  // docs/kernels.md: 6, 2 and 3 tokens in blocks of 4 queries, tiles of 4 keys.
  const WorkTable table = table_of(Mask::causal(Packing::of({6, 2, 3})), 4, 4);
  struct Expected {
    TokenRange queries, keys, full;
    int32_t tiles, lines;
  };
  const std::vector<Expected> expected{
      {{4, 6}, {0, 6}, {0, 5}, 2, 1},
      {{0, 4}, {0, 4}, {0, 1}, 1, 1},
      {{6, 10}, {6, 10}, {}, 1, 2},
      {{10, 11}, {8, 11}, {8, 11}, 1, 1},
  };
  ASSERT_EQ(table.blocks.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const WorkPart& part = parts_of(table, table.blocks[i]).front();
    EXPECT_EQ(queries_of(part), expected[i].queries);
    EXPECT_EQ((TokenRange{part.first_key, part.last_key}), expected[i].keys);
    const TokenRange full{part.full_first, part.full_last};
    EXPECT_EQ(full.empty() ? TokenRange{} : full, expected[i].full);
    EXPECT_EQ(table.blocks[i].tiles, expected[i].tiles);
    EXPECT_EQ(part.lines, expected[i].lines);
  }
}

// ---- Nothing to do.

TEST(WorkTable, WithoutLinesHasBlocksOnlyForEveryQuery) {
  WorkShape shape{.rows = 2, .queries = 130};
  EXPECT_TRUE(work_table({}, shape).blocks.empty());
  EXPECT_TRUE(work_table({}, shape).parts.empty());
  shape.every_query = true;
  const WorkTable table = work_table({}, shape);
  EXPECT_TRUE(table.lines.empty());
  ASSERT_EQ(table.blocks.size(), 4U);
  check_shape_of(table, shape);
  for (const WorkPart& part : table.parts) {
    EXPECT_EQ(part.first_key, part.last_key);
    EXPECT_EQ(part.full_first, part.full_last);
  }
}

TEST(WorkTable, WithoutQueriesOrRowsIsEmpty) {
  for (const bool every_query : {false, true}) {
    for (const auto& [rows, queries] :
         std::vector<std::pair<int64_t, int64_t>>{{3, 0}, {0, 3}, {0, 0}}) {
      const WorkTable table = work_table(
          {}, {.rows = rows, .queries = queries, .every_query = every_query});
      EXPECT_TRUE(table.blocks.empty() && table.parts.empty());
      EXPECT_EQ(table.bytes(), WorkTable::kHeader);
      EXPECT_EQ(table.image(), std::vector<std::byte>(WorkTable::kHeader));
    }
  }
}

// ---- In memory.

TEST(WorkTable, LiesInMemoryAsHeaderBlocksPartsAndLines) {
  const WorkTable table =
      table_of(Mask::causal(Packing::of({300, 7, 1, 200})), 128, 128);
  ASSERT_FALSE(table.blocks.empty());
  const std::vector<std::byte> image = table.image();
  EXPECT_EQ(image.size(), table.bytes());
  EXPECT_EQ(image.size() % 16, 0U);  // it travels in words of 16 bytes
  std::size_t place = 0;
  for (; place < WorkTable::kHeader; ++place) {
    ASSERT_EQ(at(image, place), std::byte{0}) << "byte " << place;
  }
  const auto expect_next = [&](const auto& records) {
    const std::size_t bytes = records.size() * sizeof(records[0]);
    ASSERT_LE(place + bytes, image.size());
    EXPECT_EQ(std::memcmp(image.data() + place, records.data(), bytes), 0);
    place += bytes;
  };
  expect_next(table.blocks);
  expect_next(table.parts);
  expect_next(table.lines);
  EXPECT_EQ(place, image.size());
}

}  // namespace
}  // namespace longspan::hopper
