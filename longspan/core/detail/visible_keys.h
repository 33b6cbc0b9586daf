#pragma once

#include <cstdint>
#include <vector>

#include "longspan/core/token_range.h"

namespace longspan {

/// The keys that are not pads, as ascending pieces that each lie in one
/// document, with running sums, so that a Mask counts pairs without visiting
/// tokens.
///
/// Always true: pieces are not empty and do not overlap; the lists beside them
/// have one entry for each.
struct VisibleKeys {
  std::vector<TokenRange> pieces;
  std::vector<int64_t> begins;        // of the pieces
  std::vector<int64_t> count_before;  // count(begins[i])
  std::vector<int64_t> sum_before;    // sum(begins[i])
  std::vector<int64_t> key_offsets;   // documents + 1, compressed masks only

  /// Adds a piece behind the last one; an empty one is left out.
  void append(TokenRange piece);

  /// Index of the last piece that begins at or before x, or -1.
  int64_t last_piece(int64_t x) const;

  /// Visible tokens in [0, x).
  int64_t count(int64_t x) const;

  /// count(0) + count(1) + ... + count(x - 1).
  int64_t sum(int64_t x) const;

  /// Sum over q in `queries` of count(clamp(q + shift, low, high)).
  int64_t clamped_sum(TokenRange queries, int64_t shift, int64_t low,
                      int64_t high) const;

  /// First visible token at or after x (past every stream if there is none),
  /// and one past the last before x (0 if there is none).
  int64_t first_from(int64_t x) const;
  int64_t end_before(int64_t x) const;
};

}  // namespace longspan
