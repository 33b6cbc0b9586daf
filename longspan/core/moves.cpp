#include "longspan/core/moves.h"

#include <algorithm>

#include "longspan/core/detail/check.h"

namespace longspan {

namespace {

/// Joins neighbours that continue each other on both sides.
void append_run(std::vector<Run>& runs, Run run) {
  if (run.length == 0) return;
  if (!runs.empty()) {
    Run& last = runs.back();
    if (last.source + last.length == run.source &&
        last.target + last.length == run.target) {
      last.length += run.length;
      return;
    }
  }
  runs.push_back(run);
}

}  // namespace

Moves Moves::of(std::vector<Run> runs, int64_t source_tokens,
                int64_t target_tokens) {
  check(source_tokens >= 0 && target_tokens >= 0, "Moves: streams of ",
        source_tokens, " and ", target_tokens,
        " tokens; neither may be negative");
  for (const Run& run : runs) {
    check(run.length >= 0 && run.source >= 0 && run.target >= 0 &&
              run.source <= source_tokens - run.length &&
              run.target <= target_tokens - run.length,
          "Moves: ", run.length, " tokens from ", run.source, " to ",
          run.target, " do not fit ", source_tokens, " source and ",
          target_tokens, " target tokens");
  }
  std::erase_if(runs, [](const Run& run) { return run.length == 0; });
  // The usual moves ascend on both sides already.
  if (!std::ranges::is_sorted(runs, {}, &Run::source)) {
    std::ranges::sort(runs, {}, &Run::source);
  }
  for (std::size_t i = 1; i < runs.size(); ++i) {
    check(runs[i - 1].source + runs[i - 1].length <= runs[i].source,
          "Moves: source token ", runs[i].source, " moves twice");
  }
  if (!std::ranges::is_sorted(runs, {}, &Run::target)) {
    std::ranges::sort(runs, {}, &Run::target);
  }
  Moves moves;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    check(i == 0 || runs[i - 1].target + runs[i - 1].length <= runs[i].target,
          "Moves: target token ", runs[i].target, " is written twice");
    append_run(moves.runs_, runs[i]);
  }
  moves.source_tokens_ = source_tokens;
  moves.target_tokens_ = target_tokens;
  return moves;
}

Moves Moves::identity(int64_t tokens) {
  return of({{0, 0, tokens}}, tokens, tokens);
}

Moves Moves::gather(const std::vector<TokenRange>& ranges,
                    int64_t source_tokens) {
  Moves moves;
  moves.source_tokens_ = source_tokens;
  moves.runs_.reserve(ranges.size());
  int64_t source = 0;
  bool ascending = true;
  for (TokenRange range : ranges) {
    ascending = ascending && source <= range.begin && range.begin <= range.end;
    source = range.end;
    append_run(moves.runs_, {range.begin, moves.target_tokens_, range.size()});
    moves.target_tokens_ += range.size();
  }
  if (ascending && source <= source_tokens) return moves;
  return of(std::move(moves.runs_), source_tokens, moves.target_tokens_);
}

int64_t Moves::moved_tokens() const {
  int64_t moved = 0;
  for (const Run& run : runs_) moved += run.length;
  return moved;
}

bool Moves::is_identity() const {
  return source_tokens_ == target_tokens_ &&
         (source_tokens_ == 0 ||
          (runs_.size() == 1 && runs_[0] == Run{0, 0, source_tokens_}));
}

std::vector<TokenRange> Moves::gaps() const {
  std::vector<TokenRange> gaps;
  int64_t next = 0;
  for (const Run& run : runs_) {
    append_range(gaps, {next, run.target});
    next = run.target + run.length;
  }
  append_range(gaps, {next, target_tokens_});
  return gaps;
}

Moves Moves::inverse() const {
  std::vector<Run> runs;
  runs.reserve(runs_.size());
  for (const Run& run : runs_) {
    runs.push_back({run.target, run.source, run.length});
  }
  return of(std::move(runs), target_tokens_, source_tokens_);
}

Moves Moves::then(const Moves& next) const {
  check(target_tokens_ == next.source_tokens_, "Moves: ", target_tokens_,
        " tokens arrive but the next move takes ", next.source_tokens_);
  if (is_identity()) return next;
  Moves both;
  both.source_tokens_ = source_tokens_;
  both.target_tokens_ = next.target_tokens_;
  for (const Run& second : next.runs_) {
    const int64_t end = second.source + second.length;
    auto first = std::ranges::partition_point(runs_, [&](const Run& run) {
      return run.target + run.length <= second.source;
    });
    for (; first != runs_.end() && first->target < end; ++first) {
      const TokenRange shared = intersect(
          {first->target, first->target + first->length}, {second.source, end});
      append_run(both.runs_, {first->source + (shared.begin - first->target),
                              second.target + (shared.begin - second.source),
                              shared.size()});
    }
  }
  return both;
}

}  // namespace longspan
