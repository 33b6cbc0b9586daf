#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "longspan/core/key_lines.h"
#include "longspan/kernels/common/cpu/jobs.h"

namespace longspan {

/// Consecutive queries of one row, and query heads that share a key head.
struct QueryBlock {
  int64_t row = 0, key_head = 0;
  int64_t first = 0;  // query
  int count = 0;      // of queries, 1 to kBlock
  int64_t first_head = 0;
  int heads = 0;
};

/// What every query of a block sees, as one range of keys; [0, 0) is nothing.
struct Windows {
  TokenRange of[kBlock];
};

/// The keys from the first to the last that a query of the block sees.
TokenRange reach_of(const Windows& windows);

/// Consecutive keys, and which of them each query of a block sees: those
/// [low, high) of the block. Queries outside [first_query, last_query) see
/// none of them.
struct KeyBlock {
  int64_t first = 0;  // key
  int count = 0;      // of keys, 1 to kBlock
  int first_query = 0, last_query = 0;
  bool hides = false;  // some key from some query of [first_query, last_query)
  int32_t low[kBlock] = {}, high[kBlock] = {};
};

/// Finds the next block of keys at or behind `key` and before `end` that some
/// query sees. Its first key is visible, so gaps between documents cost
/// nothing. False where there is none.
bool next_key_block(const Windows& windows, int64_t key, int64_t end,
                    KeyBlock& block);

/// The lines of a mask, ready to be asked about one block of queries.
class LineIndex {
 public:
  /// Ascending by row, then by first query, as in AttentionArgs.
  explicit LineIndex(std::span<const KeyLines> lines);

  /// What queries [first, first + count) of a row see. One Windows holds one
  /// range for each query, so lines that share queries come one after another.
  std::vector<Windows> windows_of(int64_t row, int64_t first, int count) const;

 private:
  std::span<const KeyLines> lines_;
  std::vector<int64_t> reach_;  // last query of a line and those before it
};

}  // namespace longspan
