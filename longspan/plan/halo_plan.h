#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "longspan/core/document_runs.h"
#include "longspan/plan/plan.h"

namespace longspan {

struct AttentionLayout;

/// Rows of a tensor that one rank sends to another: [begin, begin + length) of
/// `from`. A list of them is what exchange_needed takes.
struct RowSend {
  int64_t from = 0;
  int64_t to = 0;
  int64_t begin = 0;
  int64_t length = 0;
  friend bool operator==(const RowSend&, const RowSend&) = default;
};

/// How many rows a rank sends to others in one pass: backward returns what
/// forward received.
int64_t rows_sent(const std::vector<RowSend>& sends, int rank, Pass pass);

/// What each run of a rank needs to see of its document before it: the last
/// `count` tokens that lie elsewhere, on however many ranks. Known from owners
/// and documents alone, so nothing waits for data.
///
/// The rows of the batch lie end to end: local token t of row b is b * L + t,
/// where L is what a rank holds of a row.
///
/// Always true: a rank gets each token at most once, however many of its runs
/// need it, and none that no run needs; `sends` is equal on all ranks.
class HaloPlan {
 public:
  /// `rows` rows, with one mask or one for each; only their packings count.
  static HaloPlan of(const AttentionLayout& layout, int64_t count, int rank,
                     int64_t rows = 1);

  /// A run and the row of the batch that it lies in.
  struct RowRun {
    int64_t row = 0;
    DocumentRun run;
  };

  int64_t count() const { return count_; }
  int rank() const { return rank_; }

  /// Of this rank: row by row, in local order.
  const std::vector<RowRun>& runs() const { return runs_; }

  /// Of all ranks, ordered by receiver and then by sender. A rank sends to
  /// itself what its own runs need of each other.
  const std::vector<RowSend>& sends() const { return sends_; }

  /// Tokens that come to this rank.
  int64_t received() const { return received_; }

  /// runs() x count() entries: where each token before a run lies among those
  /// that came, the nearest one last; received() where the document has not
  /// begun.
  const std::vector<int64_t>& places() const { return places_; }

  /// What a window of count() + 1 tokens shows each local token, itself last:
  /// places in the local tokens followed by those that came. -1 where the
  /// document has not begun, and for pads. [local tokens, count() + 1].
  std::vector<int32_t> seen() const;

  /// Bytes that this rank sends to others in one pass; a token has `bytes`.
  int64_t sent_bytes(int64_t bytes, Pass pass) const;

  std::string to_string() const;

 private:
  int64_t count_ = 0;
  int rank_ = 0;
  int64_t rows_ = 0, local_tokens_ = 0;  // of each row
  std::vector<RowRun> runs_;
  std::vector<RowSend> sends_;
  int64_t received_ = 0;
  std::vector<int64_t> places_;
};

}  // namespace longspan
