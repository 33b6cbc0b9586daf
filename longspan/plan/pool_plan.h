#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "longspan/core/token_range.h"
#include "longspan/plan/halo_plan.h"

namespace longspan {

/// Whether a pool also looks at the window before its own.
enum class PoolOverlap { none, previous };

/// Pools of `ratio` tokens: which there are, who makes them, and what must
/// travel for that. Known from owners and documents alone.
///
/// Window w of a document is its real tokens [w * ratio, (w + 1) * ratio);
/// every whole window makes one pool, and what is left over makes none. A pool
/// has a slot for each token of its window, and with PoolOverlap::previous one
/// for each token of the window before in front of them; those of a document's
/// first window are empty. It belongs to the rank that holds the last token of
/// its window. Where its slots lie on several ranks, each of them pools what it
/// has and sends that part to the owner, which merges them: so no ownership
/// need be aligned.
///
/// Tensors have a row for each local token and half: with overlap a token has
/// two halves of channels, the first for the window after its own and the
/// second for its own; row 2 * t + half is half a token. The rows of the batch
/// lie end to end, as in HaloPlan.
///
/// Always true: each half of a token lies in one pool at most; the pools of all
/// ranks are all pools; `sends` is equal on all ranks, and empty where no pool
/// lies on several.
class PoolPlan {
 public:
  static PoolPlan of(const AttentionLayout& layout, int64_t ratio,
                     PoolOverlap overlap, int rank, int64_t rows = 1);

  int64_t ratio() const { return ratio_; }
  PoolOverlap overlap() const { return overlap_; }
  int rank() const { return rank_; }

  /// Halves of a token, and slots of a pool: ratio times halves.
  int64_t halves() const { return overlap_ == PoolOverlap::none ? 1 : 2; }
  int64_t slots() const { return ratio_ * halves(); }

  /// Pools of each rank, and of all.
  const std::vector<int64_t>& sizes() const { return sizes_; }
  int64_t here() const { return sizes_[static_cast<std::size_t>(rank_)]; }
  int64_t total() const { return std::ssize(in_stream_); }

  /// What is pooled here: slots() rows for each, -1 for those that are empty or
  /// elsewhere. First the `whole` pools of this rank that lie here with all
  /// their slots, then parts of pools, by owner.
  const std::vector<int32_t>& lists() const { return lists_; }
  int64_t whole() const { return whole_; }

  /// Parts that travel to the owners of their pools: rows behind the whole
  /// pools. Of all ranks, by receiver and then by sender.
  const std::vector<RowSend>& sends() const { return sends_; }
  int64_t received() const { return received_; }

  /// For each pool of this rank that lies on several, `most_parts` places among
  /// the parts that came; -1 for none.
  const std::vector<int32_t>& merges() const { return merges_; }
  int64_t most_parts() const { return most_parts_; }

  /// Where each pool of this rank lies in the whole ones followed by the merged
  /// ones, in the order of the stream (row by row).
  const std::vector<int64_t>& order() const { return order_; }

  /// Of each pool of this rank: the position of its first token.
  const std::vector<int64_t>& positions() const { return positions_; }

  /// Where each pool of the stream lies when the ranks' pools follow one
  /// another.
  const std::vector<int64_t>& in_stream() const { return in_stream_; }

  /// For each local token the pools of its document that ended, itself
  /// included, as [begin, end) of all pools; nothing for pads.
  const std::vector<TokenRange>& windows() const { return windows_; }

  /// Bytes that this rank sends to others in one pass: for the parts of its
  /// pools, whose halves have `channels`, in the type of sums; and to gather
  /// pools of `bytes` each on every rank.
  int64_t sent_bytes(int64_t channels, int64_t bytes_per_sum, Pass pass) const;
  int64_t gathered_bytes(int64_t bytes, Pass pass) const;

  std::string to_string() const;

 private:
  class Maker;

  int64_t ratio_ = 1;
  PoolOverlap overlap_ = PoolOverlap::none;
  int rank_ = 0;
  std::vector<int64_t> sizes_;
  std::vector<int32_t> lists_;
  int64_t whole_ = 0;
  std::vector<RowSend> sends_;
  int64_t received_ = 0;
  std::vector<int32_t> merges_;
  int64_t most_parts_ = 1;
  std::vector<int64_t> order_, positions_, in_stream_;
  std::vector<TokenRange> windows_;
};

}  // namespace longspan
