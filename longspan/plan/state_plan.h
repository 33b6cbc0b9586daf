#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "longspan/core/document_runs.h"
#include "longspan/plan/halo_plan.h"

namespace longspan {

struct AttentionLayout;

/// How pairs (transition, state) come to the runs behind theirs.
///
/// direct: in one exchange. A rank gets the pairs of all runs of a document
/// before its own last one, each once, and folds them in the order of the
/// document: no transition is ever multiplied by another.
///
/// scan: in rounds, ceil(log2 L) of them for a document of L runs. After r
/// rounds a run knows the pair of the 2^r - 1 runs before it, combined; in the
/// next it tells the run 2^r behind it what those and itself make of a state.
/// A run sends at most one pair a round.
enum class StateWay { direct, scan };

/// A pair of one rank that goes to another, in the exchange of a round.
struct StateSend {
  int64_t round = 0;
  int64_t from = 0;
  int64_t to = 0;
  int64_t place = 0;       ///< of the pair at the sender, as in StateStep
  int64_t transition = 0;  ///< 1 where the transition goes along, else 0
  friend bool operator==(const StateSend&, const StateSend&) = default;
};

/// One step of folding a document, after the exchange of a round: first the
/// pair at hand goes where it is wanted, then it is combined with another:
/// (M, S) at hand becomes (M' M, M' S + S') by the pair (M', S') at `place`.
/// Without a pair at hand that one is taken up as it is; kNone lays it down. A
/// pair without its transition begins a document, and so does all that it is
/// combined with.
///
/// Places count the rank's own chained runs first, and then, round by round,
/// what came, by sender and in the order of the sends, and what was kept.
struct StateStep {
  static constexpr int64_t kNone = -1;

  int64_t round = 0;
  int64_t gives = kNone;   ///< to a chained run of this rank: what comes in
  int64_t keeps = 0;       ///< 1 where it gets a place
  int64_t place = kNone;   ///< of the pair that is combined with it
  int64_t transition = 0;  ///< 1 where that has a transition
  friend bool operator==(const StateStep&, const StateStep&) = default;
};

/// What a pair weighs, where a way is chosen.
struct StatePair {
  int64_t transition_bytes = 0;
  int64_t state_bytes = 0;
  int64_t matrix_rows = 1;  ///< of a transition that is a matrix, else 1
  friend auto operator<=>(const StatePair&, const StatePair&) = default;
};

/// What things cost, where a way is chosen: an exchange before its first byte,
/// a byte that a rank sends or gets, an addition or a multiplication. As for
/// ranks that are nodes of their own, each with a link of 200 Gbit/s.
struct StateCosts {
  double exchange_seconds = 20e-6;
  double bytes_per_second = 25e9;
  double operations_per_second = 10e12;
};

/// How the state of a recurrence comes to each run of a rank: every run makes
/// `transition * incoming + state` of what comes in, and the next run of its
/// document gets that. Documents begin with nothing. Known from owners and
/// documents alone.
///
/// Only documents that lie in several runs have anything to carry; their runs
/// are called chained, and tensors of states have a row for each of them. Of a
/// document's first run the transition is never asked for.
///
/// Always true: `sends` is equal on all ranks, nobody sends to itself, and the
/// backward lists are the forward ones of documents read from their ends.
class StatePlan {
 public:
  /// `rows` rows, with one mask or one for each; only their packings count.
  static StatePlan of(const AttentionLayout& layout, int rank, int64_t rows = 1,
                      StateWay way = StateWay::direct);

  /// What a way takes for pairs of this weight, forward and backward: of every
  /// round the exchange, the bytes of the rank that sends or gets most, and the
  /// arithmetic of the rank that combines most. Cost: O(log) for each run and
  /// round.
  static double seconds(const AttentionLayout& layout, StateWay way,
                        const StatePair& pair, int64_t rows = 1,
                        const StateCosts& costs = {});

  /// The way that takes less. The same on every rank; direct where both take as
  /// long, as without bytes.
  static StateWay choose(const AttentionLayout& layout, const StatePair& pair,
                         int64_t rows = 1, const StateCosts& costs = {});

  struct Lists {
    /// Of all ranks, by round, then receiver, then sender.
    std::vector<StateSend> sends;
    std::vector<StateStep> steps;  ///< of this rank, by round
  };

  int rank() const { return rank_; }
  StateWay way() const { return way_; }

  /// Exchanges of one pass.
  int64_t rounds(Pass pass) const;

  /// Of this rank: row by row, in local order.
  const std::vector<HaloPlan::RowRun>& runs() const { return runs_; }

  /// Which of runs() are chained, ascending.
  const std::vector<int64_t>& chained() const { return chained_; }

  const Lists& lists(Pass pass) const {
    return pass == Pass::forward ? forward_ : backward_;
  }

  /// Bytes that this rank sends to others in one pass.
  int64_t sent_bytes(int64_t bytes_per_transition, int64_t bytes_per_state,
                     Pass pass) const;

  std::string to_string() const;

 private:
  int rank_ = 0;
  StateWay way_ = StateWay::direct;
  std::vector<HaloPlan::RowRun> runs_;
  std::vector<int64_t> chained_;
  Lists forward_, backward_;
};

/// "direct" or "scan", and back.
const char* name_of(StateWay way);
StateWay state_way_named(std::string_view name);

}  // namespace longspan
