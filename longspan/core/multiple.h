#pragma once

#include <cstdint>
#include <vector>

namespace longspan {

/// The smallest multiple of `multiple` that is not below `value`.
int64_t round_up(int64_t value, int64_t multiple);

/// Least common multiple; where one argument is 0, the other argument.
int64_t common_multiple(int64_t a, int64_t b);

/// Tokens of which a rank's share must be a multiple so that no compressed key
/// is cut: a ratio R > 0 asks for R tokens, and for 2R where R is 4, because
/// there a key overlaps its left neighbour. Ratios <= 0 ask for nothing. The
/// result is 1 when no ratio asks for anything.
int64_t share_multiple(const std::vector<int64_t>& ratios);

}  // namespace longspan
