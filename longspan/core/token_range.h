#pragma once

#include <algorithm>
#include <cstdint>
#include <ostream>
#include <vector>

namespace longspan {

/// A half-open run [begin, end) of token indices; begin <= end.
struct TokenRange {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
  bool empty() const { return end <= begin; }
  bool contains(int64_t token) const { return begin <= token && token < end; }
  bool contains(TokenRange other) const {
    return other.empty() || (begin <= other.begin && other.end <= end);
  }
  friend bool operator==(TokenRange, TokenRange) = default;
};

/// The tokens in both; an empty range where there are none.
inline TokenRange intersect(TokenRange a, TokenRange b) {
  const int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

inline std::ostream& operator<<(std::ostream& out, TokenRange range) {
  return out << '[' << range.begin << ", " << range.end << ')';
}

/// Sum of the sizes.
int64_t count_tokens(const std::vector<TokenRange>& ranges);

/// These tokens as ascending ranges that neither overlap nor touch.
std::vector<TokenRange> normalized(std::vector<TokenRange> ranges);

/// Appends a range; one that continues the last range extends it instead.
void append_range(std::vector<TokenRange>& ranges, TokenRange range);

}  // namespace longspan
