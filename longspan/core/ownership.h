#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "longspan/core/moves.h"
#include "longspan/core/packing.h"
#include "longspan/core/token_range.h"

namespace longspan {

/// The ways to cut a stream: three with a closed form, and free ranges.
enum class OwnershipKind {
  contiguous,              ///< one run for each rank
  head_tail,               ///< chunks r and 2N-1-r of 2N (zigzag): even work
  per_document_head_tail,  ///< head_tail inside every document (zigzag THD)
  ranges,                  ///< any ranges, uneven shares, empty ranks
};

std::string_view to_string(OwnershipKind kind);

/// "head-tail" and so on; nothing for an unknown name.
std::optional<OwnershipKind> ownership_kind(std::string_view name);

/// A stream (for per_document_head_tail: each document) must have a multiple of
/// this many tokens to be cut over `ranks` ranks: N, 2N, 2N, 1.
int64_t tokens_multiple(OwnershipKind kind, int ranks);

/// Which rank holds which tokens of a stream, and in what order.
///
/// Always true: every token has exactly one owner, and
/// global_of(owner_of(t), local_of(t)) == t. Local indices of a rank run from
/// 0 to local_tokens(rank) without gaps.
///
/// Only `ranges` stores what each rank holds; the other kinds answer in closed
/// form, so one value costs O(documents) memory however many ranks there are.
/// Copies share storage and are cheap.
class Ownership {
 public:
  /// Rank r holds one run of tokens / ranks tokens.
  static Ownership contiguous(int64_t tokens, int ranks);

  /// Rank r holds chunk r of 2N, near the head, and chunk 2N-1-r, near the
  /// tail (zigzag), which evens out causal work.
  static Ownership head_tail(int64_t tokens, int ranks);

  /// Cuts every slot of a packing, and its tail, as head_tail cuts a stream
  /// (zigzag varlen, THD); a rank's share keeps the documents in order.
  static Ownership per_document_head_tail(const Packing& packing, int ranks);

  /// One run for each rank, of the given sizes, which may be 0.
  static Ownership of_sizes(const std::vector<int64_t>& sizes);

  /// Element r lists what rank r holds, in local order. Together they must
  /// cover [0, tokens) exactly once.
  static Ownership of_ranges(std::vector<std::vector<TokenRange>> ranges);

  /// A closed-form kind by name; `packing` gives the tokens and the documents.
  static Ownership of(OwnershipKind kind, const Packing& packing, int ranks);

  OwnershipKind kind() const { return kind_; }
  int64_t tokens() const { return tokens_; }
  int ranks() const { return ranks_; }

  /// The documents that per_document_head_tail cuts; one document of all tokens
  /// for head_tail, none for the other kinds.
  const Packing& packing() const { return packing_; }

  int64_t local_tokens(int rank) const;

  /// Number of tokens on lower ranks: where this rank's share starts when all
  /// shares are concatenated in rank order.
  int64_t first_of(int rank) const;

  int owner_of(int64_t token) const;
  int64_t local_of(int64_t token) const;
  int64_t global_of(int rank, int64_t local) const;

  /// Ranges of a rank in local order; neighbours that touch are joined.
  std::vector<TokenRange> ranges_of(int rank) const;

  /// At least as many as all ranks have ranges, known without listing them;
  /// every rank counts.
  int64_t most_ranges() const;

  /// The range of ranges_of() that holds a token, and the rank it belongs to.
  struct Holding {
    int rank;
    TokenRange range;
  };
  Holding holding(int64_t token) const;

  /// From the stream to one rank's share, and to all shares in rank order.
  Moves to_rank(int rank) const;
  Moves to_all_ranks() const;

  std::string to_string() const;
  friend bool operator==(const Ownership& a, const Ownership& b);

 private:
  struct Place {
    int rank;
    int64_t local;
  };
  struct Ranges;

  Ownership(OwnershipKind kind, int64_t tokens, int ranks)
      : kind_(kind), tokens_(tokens), ranks_(ranks) {}
  struct Chunk {
    int rank;
    TokenRange range;
    TokenRange cut;  // the slot or tail that the chunk is part of
  };
  Place locate(int64_t token) const;
  Chunk chunk_at(int64_t token) const;
  TokenRange unit(int64_t document) const;
  void check_rank(const char* who, int rank) const;
  void check_token(int64_t token) const;

  OwnershipKind kind_;
  int64_t tokens_;
  int ranks_;
  Packing packing_;                            // the two head-tail kinds
  std::shared_ptr<const Ranges> ranges_data_;  // `ranges` only
};

/// What functions that look at the ranges of every rank agree to: some hundred
/// megabytes and a second.
inline constexpr int64_t kMostListedRanges = int64_t{1} << 22;

/// Throws where an ownership has more; `who` is named in the error.
void check_listable(const char* who, const Ownership& ownership);

}  // namespace longspan
