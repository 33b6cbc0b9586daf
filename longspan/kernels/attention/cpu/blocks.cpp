#include "longspan/kernels/attention/cpu/blocks.h"

#include <algorithm>
#include <limits>

namespace longspan {

TokenRange reach_of(const Windows& windows) {
  TokenRange reach{std::numeric_limits<int64_t>::max(), 0};
  for (const TokenRange& seen : windows.of) {
    if (seen.empty()) continue;
    reach.begin = std::min(reach.begin, seen.begin);
    reach.end = std::max(reach.end, seen.end);
  }
  return reach.end == 0 ? TokenRange{} : reach;
}

bool next_key_block(const Windows& windows, int64_t key, int64_t end,
                    KeyBlock& block) {
  constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  int64_t first = kNone, last = 0;
  for (const TokenRange& seen : windows.of) {
    if (seen.end <= key || seen.empty()) continue;
    first = std::min(first, std::max(seen.begin, key));
    last = std::max(last, seen.end);
  }
  if (first >= end) return false;
  block.first = first;
  block.count =
      static_cast<int>(std::min<int64_t>({kBlock, last - first, end - first}));
  block.first_query = kBlock;
  block.last_query = 0;
  for (int query = 0; query < kBlock; ++query) {
    const TokenRange seen = windows.of[query];
    const auto place = [&](int64_t k) {
      return static_cast<int32_t>(
          std::clamp<int64_t>(k - first, 0, block.count));
    };
    block.low[query] = place(seen.begin);
    block.high[query] = place(seen.end);
    if (block.low[query] >= block.high[query]) continue;
    block.first_query = std::min(block.first_query, query);
    block.last_query = query + 1;
  }
  block.hides = false;
  for (int query = block.first_query; query < block.last_query; ++query) {
    block.hides |= block.low[query] > 0 || block.high[query] < block.count;
  }
  return true;
}

LineIndex::LineIndex(std::span<const KeyLines> lines) : lines_(lines) {
  reach_.reserve(lines.size());
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const bool same_row = i > 0 && lines[i - 1].row == lines[i].row;
    const int64_t before = same_row ? reach_.back() : 0;
    reach_.push_back(std::max(before, lines[i].queries.end));
  }
}

std::vector<Windows> LineIndex::windows_of(int64_t row, int64_t first,
                                           int count) const {
  const TokenRange block{first, first + count};
  const auto row_begin = std::ranges::partition_point(
      lines_, [&](const KeyLines& line) { return line.row < row; });
  const auto row_end =
      std::partition_point(row_begin, lines_.end(), [&](const KeyLines& line) {
        return line.row == row && line.queries.begin < block.end;
      });
  const auto reach =
      std::partition_point(reach_.begin() + (row_begin - lines_.begin()),
                           reach_.begin() + (row_end - lines_.begin()),
                           [&](int64_t end) { return end <= block.begin; });

  std::vector<Windows> windows;
  int64_t free = block.end;  // queries from here on have no range yet
  for (auto line = lines_.begin() + (reach - reach_.begin()); line != row_end;
       ++line) {
    const TokenRange queries = intersect(line->queries, block);
    if (queries.empty()) continue;
    if (windows.empty() || queries.begin < free) windows.emplace_back();
    free = queries.end;
    for (int64_t query = queries.begin; query < queries.end; ++query) {
      windows.back().of[query - first] = line->keys_of(query);
    }
  }
  return windows;
}

}  // namespace longspan
