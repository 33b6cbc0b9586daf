#pragma once

#include "longspan/kernels/attention/hopper/work_table.h"
#include "longspan/kernels/common/hopper/ptx.cuh"

namespace longspan::hopper {

/// A place in a ring of `kCount` slots, and how often it was round.
template <int kCount>
struct RingPlace {
  int slot = 0;
  uint32_t round = 0;
  __device__ void advance() {
    if (++slot == kCount) {
      slot = 0;
      round ^= 1;
    }
  }
};

/// A block of up to kRows queries and one run of its keys, on its way from the
/// warp that deals to the others; in the backward kernel, of keys and queries.
/// Several heads of a block follow one another, each with the same queries.
template <int kRows_>
struct WorkRecordOf {
  static constexpr int kRows = kRows_;
  int tiles;  // of the whole item; -1: there is no more work
  int row, first_row, rows;
  int head, heads;  // the first, and how many
  int first_column, last_column, full_first, full_last;
  int begin[kRows], end[kRows];  // columns that each row sees
};
using WorkRecord = WorkRecordOf<128>;

/// Which block and which head an item is. Items come in sections of some heads:
/// all blocks of them before other heads, each block for one head after
/// another. So heads that share keys find them in the cache.
struct DenseItem {
  int block, head;
  __device__ DenseItem(int item, int blocks, int heads, int section_heads) {
    const int section = item / (section_heads * blocks);
    const int first = section * section_heads;
    const int width = min(section_heads, heads - first);
    const int rest = item - first * blocks;
    block = rest / width;
    head = first + rest % width;
  }
};

/// The keys of a query, or the queries of a key.
__device__ __forceinline__ int2 columns_of(const WorkLine& line, int query) {
  return make_int2(
      min(max(query + line.begin_shift, line.begin_min), line.begin_max),
      min(max(query + line.end_shift, line.end_min), line.end_max));
}
__device__ __forceinline__ int2 columns_of(const WorkKeyLine& line, int key) {
  const int first = line.first_query, last = line.last_query;
  return make_int2(
      key < line.end_min ? first : min(max(key + line.after_end, first), last),
      key >= line.begin_max ? last
                            : min(max(key + line.after_begin, first), last));
}
__device__ __forceinline__ bool has_row(const WorkLine& line, int query) {
  return query >= line.first_query && query < line.last_query;
}
__device__ __forceinline__ bool has_row(const WorkKeyLine& line, int key) {
  return key >= line.first_key && key < line.last_key;
}

__device__ __forceinline__ int row_after(const WorkLine& line) {
  return line.last_query;
}
__device__ __forceinline__ int row_after(const WorkKeyLine& line) {
  return line.last_key;
}

/// How many lines end at or before a lane's row: they ascend, so the next one
/// is the row's or nobody's. Lanes read one line each, where a search would
/// wait for one after another.
template <class Line>
__device__ __forceinline__ int lines_before(int row, const Line* lines,
                                            int count, int lane) {
  int passed = 0;
#pragma unroll 1
  for (int n = 0; n < count; n += 32) {
    const int last = n + lane < count ? row_after(lines[n + lane]) : 0;
#pragma unroll 1
    for (int i = 0; i < min(count - n, 32); ++i) {
      passed += row >= __shfl_sync(~0u, last, i);
    }
  }
  return passed;
}

/// One warp writes a part down, for blocks of `tokens` queries of each head, a
/// power of two.
template <int kRows, class Line>
__device__ __forceinline__ void write_record(WorkRecordOf<kRows>& record,
                                             const WorkPart& part,
                                             const Line* lines, int tiles,
                                             int head, int heads, int lane,
                                             int tokens = kRows) {
  if (lane == 0) {
    record.tiles = tiles;
    record.row = part.row;
    record.head = head;
    record.heads = heads;
    record.first_row = part.first_query;
    record.rows = part.queries;
    record.first_column = part.first_key;
    record.last_column = part.last_key;
    record.full_first = part.full_first;
    record.full_last = part.full_last;
  }
  lines += part.first_line;
#pragma unroll 1
  for (int i = lane; i < kRows; i += 32) {
    const int token = i & (tokens - 1), at = part.first_query + token;
    const int mine =
        part.lines > 1 ? lines_before(at, lines, part.lines, lane) : 0;
    int2 seen = make_int2(0, 0);
    if (token < part.queries && mine < part.lines) {
      const Line line = lines[mine];
      if (has_row(line, at)) seen = columns_of(line, at);
    }
    record.begin[i] = seen.x;
    record.end[i] = seen.y;
  }
}

/// Where the last tile of a part begins, before its first column if there is
/// none; tiles are counted from that column on.
template <class Record>
__device__ __forceinline__ int last_tile(const Record& record, int columns) {
  const int first = record.first_column;
  const int tiles = (record.last_column - first + columns - 1) / columns;
  return first + (tiles - 1) * columns;
}

/// How many of a thread's columns lie before one: pairs, eight apart.
__device__ __forceinline__ int bits_before(int column) {
  column = max(column, 0);
  return 2 * (column >> 3) + min(column & 7, 2);
}
__device__ __forceinline__ uint32_t low_bits(int count) {
  return count >= 32 ? ~0u : (1u << max(count, 0)) - 1;
}

/// The columns of a part, as a loop over its tiles remembers them: what is read
/// from the record for every tile costs the wait for it.
struct WorkColumns {
  int first, last, full_first, full_last;
  template <class Record>
  __device__ explicit WorkColumns(const Record& record)
      : first(record.first_column),
        last(record.last_column),
        full_first(record.full_first),
        full_last(record.full_last) {}
  /// Whether every row sees all columns of a tile.
  __device__ bool all_see(int tile, int columns) const {
    return tile >= full_first && tile + columns <= full_last;
  }
};

/// What a thread's two rows see of the columns of a tile that are the thread's.
template <int kCount>
struct SeenColumns {
  // Bit 2 j + e is column 8 j + e from the thread's first one on.
  uint32_t bits[2][(kCount / 2 + 31) / 32];
  template <class Record>
  __device__ __forceinline__ SeenColumns(const Record& record, int tile,
                                         int row, int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int mine = tile + 2 * (lane & 3);
      const int begin = record.begin[row + 8 * i] - mine;
      const int end = record.end[row + 8 * i] - mine;
      const int first = bits_before(begin), last = bits_before(end);
#pragma unroll
      for (int w = 0; w < (kCount / 2 + 31) / 32; ++w) {
        bits[i][w] = low_bits(last - 32 * w) & ~low_bits(first - 32 * w);
      }
    }
  }
  /// Of element i of a product.
  __device__ bool operator()(int i) const {
    const int bit = 2 * (i / 4) + (i & 1);
    return bits[i / 2 & 1][bit / 32] >> (bit % 32) & 1;
  }
};

/// Hides what a thread's two rows do not see of a tile of columns.
template <int kCount, class Record>
__device__ __forceinline__ void hide_some(float (&score)[kCount],
                                          const Record& record, int tile,
                                          int row, int lane) {
  const SeenColumns<kCount> seen(record, tile, row, lane);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    score[i] = seen(i) ? score[i] : -INFINITY;
  }
}

/// The same, unless every row sees all of it.
template <int kCount, class Record>
__device__ __forceinline__ void hide(float (&score)[kCount],
                                     const Record& record,
                                     const WorkColumns& columns, int tile,
                                     int row, int lane) {
  if (!columns.all_see(tile, 2 * kCount)) {
    hide_some(score, record, tile, row, lane);
  }
}

/// The same, where nobody remembers the columns.
template <int kCount, class Record>
__device__ __forceinline__ void hide(float (&score)[kCount],
                                     const Record& record, int tile, int row,
                                     int lane) {
  hide(score, record, WorkColumns(record), tile, row, lane);
}

/// Sets weights or derivatives of scores to 0 that belong to what a thread's
/// two rows do not see, whatever they were made of. Operands as `pack_operand`
/// makes them, over a tile of columns.
template <int kSteps, class Record>
__device__ __forceinline__ void hide_some(uint32_t (&operand)[kSteps][4],
                                          const Record& record, int tile,
                                          int row, int lane) {
  const SeenColumns<8 * kSteps> seen(record, tile, row, lane);
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 8 * k + 2 * i;
      operand[k][i] &=
          (seen(at) ? 0xFFFFu : 0) | (seen(at + 1) ? 0xFFFF0000u : 0);
    }
  }
}

}  // namespace longspan::hopper
