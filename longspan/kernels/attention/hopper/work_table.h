#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "longspan/core/key_lines.h"

namespace longspan::hopper {

/// What the kernels of dense attention are told about a mask: blocks of queries
/// with the keys that they see, made on the host from lines and nothing else.
/// Numbers are 32 bits wide: at most 2^30 queries and keys.

/// A line, narrow. Query q of [first_query, last_query) sees the keys
/// [clamp(q + begin_shift, ...), clamp(q + end_shift, ...)).
struct WorkLine {
  int32_t first_query, last_query;
  int32_t begin_shift, begin_min, begin_max;
  int32_t end_shift, end_min, end_max;
};

/// One run of keys for a block of queries, [first_key, last_key). All queries
/// of the block see all keys of [full_first, full_last), which may be empty.
/// Who sees the others follow from `lines` lines from `first_line` on; no two
/// of them share a query, and a query outside of them sees nothing here.
struct WorkPart {
  int32_t row, first_query;
  int32_t first_key, last_key, full_first, full_last;
  int32_t first_line;
  int16_t queries, lines;
};

/// A block of queries: `parts` parts from `first_part` on, `tiles` tiles of
/// keys in all of them. A block without tiles has one part without keys.
struct WorkBlock {
  int32_t first_part, parts, tiles, unused;
};

/// When a block may add to what it has in common with others: those of a chain
/// share columns and add in the order of the table, each from its last columns
/// to its first. A block says from which column on everything is added, by
/// itself and by all before it.
struct WorkTurn {
  static constexpr int32_t kNever = 1 << 30;  // beyond every column
  int32_t before;      // the block before it in the chain, or -1
  int32_t alone_from;  // no block before it adds from this column on
  // A later one begins at this column, before the last part of this one does:
  // so when this is through, it waits for those before to come here, and says
  // so. Or kNever.
  int32_t hands_on;
  int32_t unused;
};

static_assert(sizeof(WorkLine) == 32 && sizeof(WorkPart) == 32 &&
              sizeof(WorkBlock) == 16 && sizeof(WorkTurn) == 16);

template <class Line>
struct WorkOf {
  std::vector<WorkBlock> blocks;  // those with most tiles first
  std::vector<WorkPart> parts;
  std::vector<Line> lines;
  std::vector<WorkTurn> turns;  // of the blocks, or none

  /// As it lies on the device: a header of zeros where kernels count, then
  /// blocks, parts, lines and turns.
  static constexpr std::size_t kHeader = 64;
  std::size_t bytes() const;
  std::vector<std::byte> image() const;
};
using WorkTable = WorkOf<WorkLine>;

struct WorkShape {
  int64_t rows = 0, queries = 0;
  int block_queries = 128;  // at most so many queries a block
  int tile_keys = 128;
  bool every_query = false;  // also those that see nothing
  /// Not those of these lines, though: another table has them. Ascending.
  std::span<const KeyLines> elsewhere = {};
};

/// Lines ascend by row and first query. Blocks end where a document of at least
/// block_queries queries begins or ends, so what it costs and how its sums are
/// ordered does not depend on its neighbours; shorter ones share blocks. A
/// document is lines that hang together by queries or keys; one that holes
/// wider than its window tear apart is several.
/// Cost: O(n log n) for n lines and blocks, and O(queries) blocks for lines
/// that overlap.
WorkTable work_table(std::span<const KeyLines> lines, const WorkShape& shape);

/// Lines in two: those of documents none of whose lines shows a query more than
/// `most_keys` keys, and all others. What a document is told to be depends on
/// its own lines alone. Queries that see nothing are in neither.
struct LinesByWidth {
  std::vector<KeyLines> narrow, wide;
};
LinesByWidth lines_by_width(std::span<const KeyLines> lines, int64_t most_keys);

/// The other way round: blocks of keys and the queries that see them. In parts
/// and shapes, read queries for keys and keys for queries.

/// A line as its keys see it: key k of [first_key, last_key) is seen by the
/// queries from (k < end_min ? first_query : k + after_end) to
/// (k >= begin_max ? last_query : k + after_begin), both clamped to
/// [first_query, last_query].
struct WorkKeyLine {
  int32_t first_key, last_key;
  int32_t first_query, last_query;
  int32_t end_min, after_end, begin_max, after_begin;
};
static_assert(sizeof(WorkKeyLine) == 32);

using KeyWorkTable = WorkOf<WorkKeyLine>;

KeyWorkTable key_work_table(std::span<const KeyLines> lines,
                            const WorkShape& shape);

/// Gives blocks turns, and sorts their parts, those with the last columns
/// first. The order of blocks that share a column follows from their document
/// alone.
void give_turns(KeyWorkTable& table);

}  // namespace longspan::hopper
