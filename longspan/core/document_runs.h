#pragma once

#include <cstdint>
#include <vector>

#include "longspan/core/ownership.h"
#include "longspan/core/packing.h"

namespace longspan {

/// A contiguous piece of one document that a rank holds: real tokens that
/// follow one another in the stream and in the rank's share.
///
/// Always true: `tokens` is not empty and holds no pads; its token t is local
/// index local + (t - tokens.begin) of the rank, at position + (t -
/// tokens.begin) of its document.
struct DocumentRun {
  static constexpr int kNobody = -1;

  int64_t document = 0;
  TokenRange tokens;
  int64_t local = 0;     ///< of the first token
  int64_t position = 0;  ///< of the first token
  /// The run of the same document that ends where this one begins, and who
  /// holds it; kNobody and nothing where the document begins here.
  int before_rank = kNobody;
  TokenRange before = {};

  int64_t size() const { return tokens.size(); }
  friend bool operator==(const DocumentRun&, const DocumentRun&) = default;
};

/// The runs of a rank in local order. The runs of all ranks hold every real
/// token exactly once, and no two of one rank could be joined.
/// Cost: O(log) for each run.
std::vector<DocumentRun> runs_of(const Packing& packing,
                                 const Ownership& ownership, int rank);

}  // namespace longspan
