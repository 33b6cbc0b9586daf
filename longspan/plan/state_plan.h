#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "longspan/core/document_runs.h"
#include "longspan/plan/halo_plan.h"

namespace longspan {

struct AttentionLayout;

/// One run of a rank whose pair (transition, state) goes to another rank.
struct StateSend {
  int64_t from = 0;
  int64_t to = 0;
  int64_t run = 0;         ///< among the sender's chained runs
  int64_t transition = 0;  ///< 1 where the transition goes along, else 0
  friend bool operator==(const StateSend&, const StateSend&) = default;
};

/// One step of folding a document: first the state at hand goes to a run, then
/// it becomes transition * state at hand + state. kNone leaves a part out; a
/// state without a transition begins a document.
///
/// Places count the rank's own chained runs first, then what came, by sender
/// and in the order of the sends; transitions that stayed at home are not
/// counted.
struct StateStep {
  static constexpr int64_t kNone = -1;

  int64_t gives = kNone;       ///< a chained run of this rank
  int64_t state = kNone;       ///< a place among states
  int64_t transition = kNone;  ///< a place among transitions
  friend bool operator==(const StateStep&, const StateStep&) = default;
};

/// How the state of a recurrence comes to each run of a rank: every run makes
/// `transition * incoming + state` of what comes in, and the next run of its
/// document gets that. Documents begin with nothing. Known from owners and
/// documents alone.
///
/// Only documents that lie in several runs have anything to carry; their runs
/// are called chained, and tensors of states have a row for each of them. A
/// rank gets the pairs of all runs of a document before its own last one, each
/// once, and folds them in the order of the document. Of a document's first
/// run the transition is never asked for.
///
/// Always true: `sends` is equal on all ranks, nobody sends to itself, and the
/// backward lists are the forward ones of documents read from their ends.
class StatePlan {
 public:
  /// `rows` rows, with one mask or one for each; only their packings count.
  static StatePlan of(const AttentionLayout& layout, int rank,
                      int64_t rows = 1);

  struct Lists {
    std::vector<StateSend> sends;  ///< of all ranks, by receiver, then sender
    std::vector<StateStep> steps;  ///< of this rank
  };

  int rank() const { return rank_; }

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
  std::vector<HaloPlan::RowRun> runs_;
  std::vector<int64_t> chained_;
  Lists forward_, backward_;
};

}  // namespace longspan
