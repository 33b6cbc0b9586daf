#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "longspan/core/key_lines.h"

namespace longspan {

/// One call of a fused kernel: queries of a line against one run of keys. Key j
/// of query i is visible when j - i, counted from the last query and the last
/// key, lies in [-left, right]; -1 is no bound. With a bound there are never
/// more queries than keys: torch's flash kernel takes a bound as wide as there
/// are keys for none, and a missing one beside it for one that wide.
struct FusedSegment {
  int64_t row = 0;
  TokenRange queries, keys;
  int64_t left = -1, right = -1;

  /// Every query sees every key.
  bool is_full() const { return left < 0 && right < 0; }

  /// The last query sees every key, the one before it all but the last key.
  bool is_causal() const { return left < 0 && right == 0; }
};

/// The pairs of a line, in at most five segments.
std::vector<FusedSegment> fused_segments(const KeyLines& line);

/// The pairs of all lines, ascending by row and first query. Neighbours
/// are joined where one segment can hold them: the head and the tail of a rank
/// against its own keys are one causal square, and against those of another
/// rank one rectangle.
std::vector<FusedSegment> fused_segments(std::span<const KeyLines> lines);

/// How many segments each row has, when all rows have the same ones; or 0.
std::size_t segments_of_each_row(std::span<const FusedSegment> segments,
                                 int64_t rows);

}  // namespace longspan
