#pragma once

#include <cstdint>
#include <vector>

#include "longspan/core/token_range.h"

namespace longspan {

/// `length` tokens that go from [source, ...) to [target, ...).
struct Run {
  int64_t source = 0;
  int64_t target = 0;
  int64_t length = 0;
  friend bool operator==(const Run&, const Run&) = default;
};

/// Which token goes where: the one index formula behind pack, pad, shard and
/// unshard.
///
/// Always true: runs ascend by target and are not empty; no source token moves
/// twice and no target token is written twice. Source tokens may stay behind
/// (they are dropped) and target tokens may be left over (they are filled), so
/// the derivative of a move is its inverse with zero fill.
class Moves {
 public:
  /// Nothing moves between streams without tokens.
  Moves() = default;

  /// Runs in any order; checks all promises above.
  static Moves of(std::vector<Run> runs, int64_t source_tokens,
                  int64_t target_tokens);

  /// Every token stays where it is.
  static Moves identity(int64_t tokens);

  /// The listed source ranges, one after another.
  static Moves gather(const std::vector<TokenRange>& ranges,
                      int64_t source_tokens);

  const std::vector<Run>& runs() const& { return runs_; }
  void runs() const&& = delete;  // would dangle
  int64_t source_tokens() const { return source_tokens_; }
  int64_t target_tokens() const { return target_tokens_; }
  int64_t moved_tokens() const;

  bool is_identity() const;

  /// Target ranges that no run writes, ascending.
  std::vector<TokenRange> gaps() const;

  Moves inverse() const;

  /// First this, then `next`, whose source stream is our target stream.
  Moves then(const Moves& next) const;

  friend bool operator==(const Moves&, const Moves&) = default;

 private:
  std::vector<Run> runs_;
  int64_t source_tokens_ = 0;
  int64_t target_tokens_ = 0;
};

}  // namespace longspan
