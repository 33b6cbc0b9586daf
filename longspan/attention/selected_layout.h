#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "longspan/comm/group.h"
#include "longspan/core/moves.h"
#include "longspan/plan/attention_layout.h"

namespace longspan {

/// Windows [start, end) of queries, in tokens of the stream: int32.
struct KeyWindows {
  at::Tensor start;
  at::Tensor end;
};

/// What attention to selected keys asks of a layout, for one rank.
class SelectedLayout {
 public:
  /// From what attention_layout made; recent ones are kept. `who` speaks.
  static std::shared_ptr<const SelectedLayout> of(const char* who,
                                                  const at::Tensor& code,
                                                  const Group& group);

  SelectedLayout(AttentionLayout layout, int rank, uint64_t fingerprint);

  const Ownership& ownership() const { return layout_.ownership; }
  int64_t tokens() const { return ownership().tokens(); }
  int64_t local_tokens() const { return ownership().local_tokens(rank_); }

  /// Equal on ranks with equal layouts.
  uint64_t fingerprint() const { return fingerprint_; }

  /// Shares in rank order -> the stream, and back.
  const Moves& to_stream() const { return to_stream_; }
  const Moves& to_shares() const { return to_shares_; }

  /// keys_of of this rank's queries in local order, [rows, tokens]. Refuses
  /// masks whose keys are not one range.
  KeyWindows windows(const char* who, int64_t rows, at::Device device) const;

  /// The same for any tokens of the stream; not kept.
  KeyWindows windows(const char* who, const std::vector<TokenRange>& queries,
                     int64_t rows, at::Device device) const;

  /// One run of queries for each rank with even work under the masks.
  std::vector<TokenRange> even_pieces(int64_t rows) const;

 private:
  void check_rows(const char* who, int64_t rows) const;

  AttentionLayout layout_;
  int rank_;
  uint64_t fingerprint_;
  Moves to_stream_, to_shares_;
  mutable std::mutex mutex_;
  mutable std::map<std::string, KeyWindows> windows_;  // [masks, tokens]
  mutable std::vector<TokenRange> even_;
};

}  // namespace longspan
