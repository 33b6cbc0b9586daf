#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "longspan/core/key_lines.h"
#include "longspan/core/token_range.h"
#include "longspan/core/work.h"
#include "longspan/plan/strategy.h"

namespace longspan {

struct AttentionLayout;

/// Tokens that go to, or come from, another rank, in the order of the message.
struct PlannedParcel {
  int peer = 0;
  std::vector<TokenRange> tokens;
  friend bool operator==(const PlannedParcel&, const PlannedParcel&) = default;
};

/// One block of keys against all queries of a rank.
struct PlanStep {
  /// Tokens of the key array, in order; the first step has the rank's own.
  std::vector<TokenRange> keys;
  /// What the queries see of them: places in the query and the key array.
  std::vector<KeyLines> lines;
  int64_t pairs = 0;  ///< visible, over all rows

  /// On their way while this step is computed. The arrivals, one after another,
  /// are the key array of the next step.
  std::vector<PlannedParcel> sends, arrivals;

  /// Backward only: gradients of this step's keys that go home to their
  /// owners, and those of our own keys that other ranks found in this step.
  std::vector<PlannedParcel> returns, homecomings;
};

enum class Pass { forward, backward };

/// Bytes that a rank sends to others in one pass, by what they carry.
struct SentBytes {
  int64_t keys = 0;       ///< keys and values, to other teams
  int64_t gradients = 0;  ///< of those, home to their owners; backward only
  int64_t to_heads = 0;   ///< tokens traded for heads in the team, before
  int64_t to_tokens = 0;  ///< and heads for tokens, after

  int64_t total() const { return keys + gradients + to_heads + to_tokens; }
};

/// What one rank does for one strategy, ownership and mask: steps, tiles,
/// transfers and bytes, known before anything moves.
///
/// Always true: every visible pair of the rank's queries lies in exactly one
/// step; every send of a rank is an arrival of its peer in the same step, with
/// the same tokens, and every return to an owner is a homecoming there; keys
/// that no rank further on needs are not sent.
class Plan {
 public:
  /// What is refused before it costs gigabytes: ranks and rows, and stretches
  /// of queries with the same lines, over all rows and steps.
  static constexpr int kMostRanks = 1 << 20;
  static constexpr int64_t kMostRows = int64_t{1} << 24;
  static constexpr int64_t kMostLines = kMostKeyLines;

  /// `rows` are the rows of the batch; there is one mask, or one for each row.
  static Plan of(const AttentionLayout& layout, const Strategy& strategy,
                 int rank, int64_t rows = 1);

  const Strategy& strategy() const { return strategy_; }

  /// Equal on all ranks of one plan, and different for another layout, strategy
  /// or number of rows, so that ranks that disagree notice it.
  uint64_t fingerprint() const { return fingerprint_; }
  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  int64_t rows() const { return rows_; }
  const std::vector<PlanStep>& steps() const { return steps_; }

  /// Members of a team share heads; `member` is the rank's place in its team.
  int member() const { return rank_ % strategy_.head_ranks; }
  int first_of_team() const { return rank_ - member(); }

  /// Tokens held by each member of the rank's team; the queries of the steps
  /// are those of all members, in this order.
  const std::vector<int64_t>& member_tokens() const { return member_tokens_; }

  /// Steps until keys leave or reach this rank for the last time.
  int hops() const;

  /// Heads this rank computes, and those of keys it uses.
  HeadShare head_share(const AttentionShape& shape) const;

  /// Bytes of one token that travels between teams: its keys and values, and
  /// their gradients, for the key heads of this rank and all rows.
  int64_t key_bytes(const AttentionShape& shape) const;
  int64_t gradient_bytes(const AttentionShape& shape) const;

  /// Bytes this rank sends to others, in one pass.
  SentBytes sent(const AttentionShape& shape, Pass pass) const;
  int64_t sent_bytes(const AttentionShape& shape, Pass pass) const {
    return sent(shape, pass).total();
  }

  std::string to_string() const;

 private:
  Strategy strategy_;
  int rank_ = 0, ranks_ = 1;
  int64_t rows_ = 1;
  uint64_t fingerprint_ = 0;
  std::vector<int64_t> member_tokens_;
  std::vector<PlanStep> steps_;
};

/// Where the tokens of `wanted` lie in an array that holds `held`, both in
/// order; runs of places. Every wanted range lies in held ranges.
std::vector<TokenRange> places_in(const std::vector<TokenRange>& held,
                                  const std::vector<TokenRange>& wanted);

/// The parts of `held`, in its order, that lie in `some` (ascending).
std::vector<TokenRange> parts_within(const std::vector<TokenRange>& held,
                                     const std::vector<TokenRange>& some);

}  // namespace longspan
