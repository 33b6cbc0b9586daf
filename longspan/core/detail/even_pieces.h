#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "longspan/core/token_range.h"

namespace longspan {

class Mask;

/// Cuts a stream of queries into one run for each rank with even work, whoever
/// owns the queries. Work is counted in visible pairs, over all masks (one for
/// each row of a batch).
///
/// Always true: the pieces follow one another from token 0 to the last and may
/// be empty; the first r pieces hold at least r / ranks of the work, and would
/// hold less without their last query. Where nothing is visible, the last piece
/// holds all queries.
std::vector<TokenRange> even_pieces(const std::vector<Mask>& masks, int ranks);

/// Even pieces for any work; sums[t], never falling, is that of queries 0 to t.
std::vector<TokenRange> even_pieces(std::span<const int64_t> sums, int ranks);

}  // namespace longspan
