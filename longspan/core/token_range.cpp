#include "longspan/core/token_range.h"

namespace longspan {

int64_t count_tokens(const std::vector<TokenRange>& ranges) {
  int64_t total = 0;
  for (TokenRange range : ranges) total += range.size();
  return total;
}

std::vector<TokenRange> normalized(std::vector<TokenRange> ranges) {
  std::erase_if(ranges, [](TokenRange range) { return range.empty(); });
  std::ranges::sort(ranges, {}, &TokenRange::begin);
  std::vector<TokenRange> joined;
  for (TokenRange range : ranges) {
    if (!joined.empty() && range.begin <= joined.back().end) {
      joined.back().end = std::max(joined.back().end, range.end);
    } else {
      joined.push_back(range);
    }
  }
  return joined;
}

void append_range(std::vector<TokenRange>& ranges, TokenRange range) {
  if (range.empty()) return;
  if (!ranges.empty() && ranges.back().end == range.begin) {
    ranges.back().end = range.end;
  } else {
    ranges.push_back(range);
  }
}

}  // namespace longspan
