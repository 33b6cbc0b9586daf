#include "longspan/core/key_lines.h"

#include "longspan/core/detail/check.h"
#include "longspan/core/mask.h"

namespace longspan {

namespace {

/// A range of tokens and where it lies in an array of such ranges.
struct Placed {
  TokenRange tokens;
  int64_t place;
};

std::vector<Placed> placed(const std::vector<TokenRange>& ranges) {
  std::vector<Placed> all;
  int64_t place = 0;
  for (TokenRange range : ranges) {
    if (!range.empty()) all.push_back({range, place});
    place += range.size();
  }
  return all;
}

/// Leaves out the queries that see nothing: those before the end line rises
/// above the first key, and those after the begin line passes the last.
void trim(KeyLines& line) {
  if (line.end_min <= line.begin_min) {
    line.queries.begin =
        std::max(line.queries.begin, line.begin_min - line.end_shift + 1);
  }
  if (line.begin_max >= line.end_max) {
    line.queries.end =
        std::min(line.queries.end, line.end_max - line.begin_shift);
  }
}

/// Sum over q in [begin, end) of clamp(q + shift, low, high).
int64_t sum_clamped(TokenRange queries, int64_t shift, int64_t low,
                    int64_t high) {
  // [begin, rising) gives low, [rising, flat) gives q + shift, then high.
  const int64_t rising = std::clamp(low - shift, queries.begin, queries.end);
  const int64_t flat = std::clamp(high - shift, rising, queries.end);
  const int64_t steps = flat - rising;
  const int64_t ramp =
      steps > 0 ? steps * (rising + shift) + steps * (steps - 1) / 2 : 0;
  return (rising - queries.begin) * low + ramp + (queries.end - flat) * high;
}

}  // namespace

std::vector<KeyLines> key_lines(const Mask& mask,
                                const std::vector<TokenRange>& queries,
                                const std::vector<TokenRange>& keys,
                                int64_t row) {
  std::vector<Placed> held = placed(keys);
  std::ranges::sort(held, {}, [](const Placed& p) { return p.tokens.begin; });
  std::vector<KeyLines> lines;
  for (const auto& [tokens, place] : placed(queries)) {
    const int64_t query_shift = place - tokens.begin;
    mask.for_each_stretch(tokens, [&](const Mask::Stretch& stretch) {
      // Band::kAll is far outside every stream and leaves room to add.
      const int64_t before = -mask.band().before;
      const int64_t after = mask.band().after + 1;
      const auto first = std::clamp(stretch.queries.begin + before,
                                    stretch.keys.begin, stretch.begin_at_most);
      const auto last = std::clamp(stretch.queries.end - 1 + after,
                                   stretch.end_at_least, stretch.keys.end);
      auto key = std::ranges::partition_point(
          held, [&](const Placed& p) { return p.tokens.end <= first; });
      for (; key != held.end() && key->tokens.begin < last; ++key) {
        const int64_t key_shift = key->place - key->tokens.begin;
        const auto add = [&](TokenRange part) {
          const auto local = [&](int64_t token) {
            return std::clamp(token, part.begin, part.end) + key_shift;
          };
          KeyLines line{.row = row,
                        .queries = {stretch.queries.begin + query_shift,
                                    stretch.queries.end + query_shift},
                        .begin_shift = before - query_shift + key_shift,
                        .begin_min = local(stretch.keys.begin),
                        .begin_max = local(stretch.begin_at_most),
                        .end_shift = after - query_shift + key_shift,
                        .end_min = local(stretch.end_at_least),
                        .end_max = local(stretch.keys.end)};
          trim(line);
          if (!line.queries.empty() && line.begin_min < line.end_max) {
            lines.push_back(line);
            check(std::ssize(lines) <= kMostKeyLines,
                  "key_lines: ", queries.size(), " ranges of queries and ",
                  keys.size(), " of keys see each other in more than ",
                  kMostKeyLines, " pairs; deal tokens out in longer ranges");
          }
        };
        const TokenRange part = intersect(key->tokens, {first, last});
        if (mask.is_one_range()) {
          add(part);
        } else {
          for (TokenRange piece : mask.visible_in(part)) add(piece);
        }
      }
    });
  }
  std::ranges::stable_sort(
      lines, {}, [](const KeyLines& line) { return line.queries.begin; });
  return lines;
}

int64_t count_pairs(const KeyLines& line) {
  const int64_t ends =
      sum_clamped(line.queries, line.end_shift, line.end_min, line.end_max);
  const int64_t begins = sum_clamped(line.queries, line.begin_shift,
                                     line.begin_min, line.begin_max);
  return ends - begins;
}

}  // namespace longspan
