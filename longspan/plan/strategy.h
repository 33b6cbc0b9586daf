#pragma once

#include <string>
#include <string_view>

#include "longspan/core/token_range.h"
#include "longspan/core/work.h"

namespace longspan {

/// How keys and values reach the queries that need them.
enum class KeyTransport {
  ring,      ///< from neighbour to neighbour, one share at a time
  gathered,  ///< every share to every rank, at once
  needed,    ///< the same, but only tokens that some query there sees
};

/// How attention runs over the ranks.
///
/// Ranks come in teams of `head_ranks` neighbours: inside a team tokens are
/// traded for heads, so that each member has all tokens of the team for its
/// share of the heads; between the teams keys travel. With teams of one this is
/// plain key transport, and one team of all ranks is head-parallel.
struct Strategy {
  KeyTransport transport = KeyTransport::ring;
  int head_ranks = 1;

  /// "ring", "gathered", "needed", "head_parallel", or "head_parallel_ring",
  /// for which `head_ranks` says how large teams are (0: as many of the ranks
  /// as divide them and the key heads). The other names fix it.
  static Strategy named(std::string_view name, int ranks, int64_t key_heads,
                        int head_ranks = 0);

  std::string to_string() const;

  /// The name that named() takes for a group of so many ranks.
  std::string_view name(int ranks) const;
  friend bool operator==(const Strategy&, const Strategy&) = default;
};

/// Which heads a member of a team computes: runs that differ by one head at
/// most, and the key heads they use. Query head h uses key head h / group.
/// Key heads on a border belong to both neighbours.
struct HeadShare {
  TokenRange heads;      ///< as [begin, end); empty when there are too few
  TokenRange key_heads;  ///< likewise
  static HeadShare of(int64_t heads, int64_t key_heads, int member,
                      int members);
};

}  // namespace longspan
