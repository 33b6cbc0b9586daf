#include "longspan/core/detail/visible_keys.h"

#include <algorithm>
#include <limits>

#include "longspan/core/detail/search.h"

namespace longspan {

void VisibleKeys::append(TokenRange piece) {
  if (piece.empty()) return;
  const int64_t counted = count(piece.begin);
  const int64_t summed = sum(piece.begin);
  pieces.push_back(piece);
  begins.push_back(piece.begin);
  count_before.push_back(counted);
  sum_before.push_back(summed);
}

int64_t VisibleKeys::last_piece(int64_t x) const {
  return begins.empty() || x < begins[0] ? -1 : last_not_above(begins, x);
}

int64_t VisibleKeys::count(int64_t x) const {
  const int64_t at = last_piece(x);
  if (at < 0) return 0;
  const auto i = static_cast<std::size_t>(at);
  return count_before[i] + std::min(x - begins[i], pieces[i].size());
}

int64_t VisibleKeys::sum(int64_t x) const {
  const int64_t at = last_piece(x);
  if (at < 0) return 0;
  const auto i = static_cast<std::size_t>(at);
  const int64_t steps = x - begins[i];
  const int64_t rising = std::min(steps, pieces[i].size());
  return sum_before[i] + steps * count_before[i] + rising * (rising - 1) / 2 +
         (steps - rising) * pieces[i].size();
}

int64_t VisibleKeys::clamped_sum(TokenRange queries, int64_t shift, int64_t low,
                                 int64_t high) const {
  const int64_t begin = queries.begin + shift;
  const int64_t end = queries.end + shift;
  const int64_t below = std::clamp(low - begin, int64_t{0}, queries.size());
  const int64_t above = std::clamp(end - high, int64_t{0}, queries.size());
  int64_t total = 0;
  if (below > 0) total += below * count(low);
  if (above > 0) total += above * count(high);
  const TokenRange rising = intersect({begin, end}, {low, high});
  if (!rising.empty()) total += sum(rising.end) - sum(rising.begin);
  return total;
}

int64_t VisibleKeys::first_from(int64_t x) const {
  const int64_t at = last_piece(x);
  if (at >= 0 && x < pieces[static_cast<std::size_t>(at)].end) return x;
  const auto next = static_cast<std::size_t>(at + 1);
  return next < begins.size() ? begins[next]
                              : std::numeric_limits<int64_t>::max();
}

int64_t VisibleKeys::end_before(int64_t x) const {
  const int64_t at = last_piece(x - 1);
  return at < 0 ? 0 : std::min(x, pieces[static_cast<std::size_t>(at)].end);
}

}  // namespace longspan
