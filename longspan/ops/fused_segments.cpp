#include "longspan/ops/fused_segments.h"

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <tuple>

namespace longspan {

namespace {

/// The queries of a line in several, which begin at these places.
std::vector<KeyLines> cut_at(const KeyLines& line,
                             std::initializer_list<int64_t> places) {
  std::vector<int64_t> cuts{line.queries.begin, line.queries.end};
  for (int64_t place : places) {
    cuts.push_back(std::clamp(place, line.queries.begin, line.queries.end));
  }
  std::ranges::sort(cuts);
  std::vector<KeyLines> parts;
  for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
    if (cuts[i] == cuts[i + 1]) continue;
    parts.push_back(line);
    parts.back().queries = {cuts[i], cuts[i + 1]};
  }
  return parts;
}

/// A line whose first key stops to move, or its last key starts to, at its ends
/// only: what has stopped or not yet started is where the keys end anyway.
FusedSegment segment_of(const KeyLines& line) {
  const int64_t first = line.queries.begin, last = line.queries.end - 1;
  FusedSegment segment{line.row,
                       line.queries,
                       {line.keys_of(first).begin, line.keys_of(last).end}};
  // Query and key are counted from the ends of their runs.
  const int64_t diagonal = segment.keys.end - segment.queries.end;
  if (line.keys_of(last).begin != segment.keys.begin) {
    segment.left = diagonal - line.begin_shift;
  }
  if (line.keys_of(first).end != segment.keys.end) {
    segment.right = line.end_shift - 1 - diagonal;
  }
  return segment;
}

using Joined = std::optional<FusedSegment>;

/// Two segments of the same queries, the keys of b right after those of a.
Joined side_by_side(const FusedSegment& a, const FusedSegment& b) {
  if (a.row != b.row || a.queries != b.queries || a.keys.end != b.keys.begin ||
      a.right >= 0 || b.left >= 0) {
    return std::nullopt;
  }
  // Distances of a are counted from a key that is no longer the last.
  return FusedSegment{.row = a.row,
                      .queries = a.queries,
                      .keys = {a.keys.begin, b.keys.end},
                      .left = a.left < 0 ? -1 : a.left + b.keys.size(),
                      .right = b.right};
}

/// The queries of b right after those of a, their keys from the same one on.
Joined one_above_other(const FusedSegment& a, const FusedSegment& b) {
  if (a.row != b.row || a.queries.end != b.queries.begin ||
      a.keys.begin != b.keys.begin) {
    return std::nullopt;
  }
  const bool rectangle = a.is_full() && b.is_full() && a.keys == b.keys;
  const bool triangle = a.is_causal() && b.is_causal() &&
                        b.keys.end - a.keys.end == b.queries.size();
  if (!rectangle && !triangle) return std::nullopt;
  FusedSegment both = b;
  both.queries = {a.queries.begin, b.queries.end};
  return both;
}

template <class Key, class Join>
void sort_and_join(std::vector<FusedSegment>& segments, const Key& key,
                   const Join& join) {
  std::ranges::sort(segments, {}, key);
  std::vector<FusedSegment> joined;
  for (const FusedSegment& segment : segments) {
    const Joined both =
        joined.empty() ? std::nullopt : join(joined.back(), segment);
    if (both) {
      joined.back() = *both;
    } else {
      joined.push_back(segment);
    }
  }
  segments = std::move(joined);
}

}  // namespace

std::vector<FusedSegment> fused_segments(const KeyLines& line) {
  std::vector<FusedSegment> segments;
  for (const KeyLines& part :
       cut_at(line, {line.begin_max - line.begin_shift + 1,
                     line.end_min - line.end_shift})) {
    const FusedSegment whole = segment_of(part);
    if (whole.is_full() || whole.queries.size() <= whole.keys.size()) {
      segments.push_back(whole);
      continue;
    }
    // Some queries see what others do: apart from those, each query moves one
    // of the bounds on, and there are no more of them than keys.
    for (const KeyLines& piece :
         cut_at(part, {part.begin_min - part.begin_shift,
                       part.end_max - part.end_shift + 1})) {
      segments.push_back(segment_of(piece));
    }
  }
  return segments;
}

std::vector<FusedSegment> fused_segments(std::span<const KeyLines> lines) {
  std::vector<FusedSegment> segments;
  for (const KeyLines& line : lines) {
    const auto parts = fused_segments(line);
    segments.insert(segments.end(), parts.begin(), parts.end());
  }
  const auto by_queries = [](const FusedSegment& s) {
    return std::tuple(s.row, s.queries.begin, s.queries.end, s.keys.begin);
  };
  const auto by_keys = [](const FusedSegment& s) {
    return std::tuple(s.row, s.keys.begin, s.queries.begin, s.keys.end);
  };
  sort_and_join(segments, by_queries, side_by_side);
  sort_and_join(segments, by_keys, one_above_other);
  std::ranges::sort(segments, {}, by_queries);
  return segments;
}

std::size_t segments_of_each_row(std::span<const FusedSegment> segments,
                                 int64_t rows) {
  const auto count = static_cast<std::size_t>(rows);
  if (count == 0 || segments.size() % count != 0) return 0;
  const std::size_t each = segments.size() / count;
  for (std::size_t i = each; i < segments.size(); ++i) {
    const FusedSegment &a = segments[i], &b = segments[i - each];
    if (a.queries != b.queries || a.keys != b.keys || a.left != b.left ||
        a.right != b.right) {
      return 0;
    }
  }
  return each;
}

}  // namespace longspan
