#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "longspan/core/token_range.h"

namespace longspan {

class Mask;

/// Queries whose keys lie between two straight lines: what a kernel needs to
/// know about a mask, in as few numbers as the mask has documents.
///
/// Query q sees the keys [clamp(q + begin_shift, begin_min, begin_max),
/// clamp(q + end_shift, end_min, end_max)), and none where that is empty.
/// Queries and keys are local indices: places in the query and key arrays that
/// the lines were made for, not tokens of the stream.
///
/// Always true: 0 <= begin_min <= begin_max, end_min <= end_max <= keys. Lines
/// that share a query show it different keys.
struct KeyLines {
  int64_t row = 0;  ///< of the batch
  TokenRange queries;
  int64_t begin_shift = 0, begin_min = 0, begin_max = 0;
  int64_t end_shift = 0, end_min = 0, end_max = 0;

  /// [0, 0) when the query sees nothing.
  TokenRange keys_of(int64_t query) const {
    const TokenRange keys{std::clamp(query + begin_shift, begin_min, begin_max),
                          std::clamp(query + end_shift, end_min, end_max)};
    return keys.empty() ? TokenRange{} : keys;
  }
  friend bool operator==(const KeyLines&, const KeyLines&) = default;
};

/// The most that are made; more are refused before they cost gigabytes.
inline constexpr int64_t kMostKeyLines = int64_t{1} << 22;

/// The visible pairs of queries x keys. The query array holds the tokens of
/// `queries` one range after another, and the key array those of `keys`; ranges
/// come in any order and do not overlap. Ascending by first query; each visible
/// pair lies in exactly one of the lines, and every query of a line sees a key.
/// Not for compressed masks.
/// Cost: O(log) for each query range, document and pair of ranges that see
/// each other.
std::vector<KeyLines> key_lines(const Mask& mask,
                                const std::vector<TokenRange>& queries,
                                const std::vector<TokenRange>& keys,
                                int64_t row = 0);

/// Number of pairs that a line holds.
int64_t count_pairs(const KeyLines& line);

}  // namespace longspan
