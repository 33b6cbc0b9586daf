#pragma once

#include <ATen/core/Tensor.h>

#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "longspan/comm/group.h"
#include "longspan/core/moves.h"
#include "longspan/ops/key_windows.h"
#include "longspan/plan/attention_layout.h"
#include "longspan/plan/plan.h"

namespace longspan {

/// A layout as one rank of a group sees it, and what is made from it: plans,
/// moves and windows. The layers of a model ask for the same few again and
/// again, so recent layouts are kept with all that was made from them. All of
/// it is a pure function of layout and rank, so callers cannot notice that
/// they share it.
class RankLayout {
 public:
  /// From the tensor of an AttentionLayout. `who` names the caller in messages.
  static std::shared_ptr<const RankLayout> of(const char* who,
                                              const at::Tensor& code,
                                              const Group& group);

  RankLayout(AttentionLayout layout, int rank, uint64_t fingerprint);

  const Ownership& ownership() const { return layout_.ownership; }
  int64_t tokens() const { return ownership().tokens(); }
  int64_t local_tokens() const { return ownership().local_tokens(rank_); }

  /// Owners and masks for people, and the fingerprint.
  const std::string& words() const { return words_; }

  /// Equal on ranks with equal layouts.
  uint64_t fingerprint() const { return fingerprint_; }

  /// What attend follows; recent ones are kept.
  std::shared_ptr<const Plan> plan(const Strategy& strategy,
                                   int64_t rows) const;

  /// Shares in rank order -> the stream, and back.
  const Moves& to_stream() const;
  const Moves& to_shares() const;

  /// keys_of of this rank's queries in local order, int32 [rows, tokens].
  /// Refuses masks whose keys are not one range.
  KeyWindows windows(const char* who, int64_t rows, at::Device device) const;

  /// Windows of any tokens of the stream; not kept.
  KeyWindows windows(const char* who, const std::vector<TokenRange>& queries,
                     int64_t rows, at::Device device) const;

  /// One run of queries for each rank with even work under the masks.
  std::vector<TokenRange> even_pieces(int64_t rows) const;

 private:
  void check_rows(const char* who, int64_t rows) const;

  AttentionLayout layout_;
  int rank_;
  uint64_t fingerprint_;
  std::string words_;
  // Made when first asked for.
  struct KeptMoves {
    Moves to_shares, to_stream;
  };
  struct KeptPlan {
    Strategy strategy;
    int64_t rows;
    std::shared_ptr<const Plan> plan;
  };
  const KeptMoves& moves() const;
  mutable std::once_flag moves_made_;
  mutable std::unique_ptr<const KeptMoves> moves_;
  mutable std::mutex mutex_;
  mutable std::list<KeptPlan> plans_;
  mutable std::map<std::string, KeyWindows> windows_;  // [masks, tokens]
  mutable std::vector<TokenRange> even_;
};

}  // namespace longspan
