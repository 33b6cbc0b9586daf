#pragma once

#include <span>
#include <string>
#include <string_view>

#include "longspan/core/token_range.h"
#include "longspan/core/work.h"

namespace longspan {

/// How keys and values reach the queries that need them.
enum class KeyTransport {
  ring,      ///< from neighbour to neighbour (Ring Attention, P2P)
  gathered,  ///< every share to every rank, at once (all-gather)
  needed,    ///< to each rank, at once, only tokens that a query there sees
};

/// How attention runs over the ranks.
///
/// Ranks come in teams of `head_ranks` neighbours: inside a team tokens are
/// traded for heads, so that each member has all tokens of the team for its
/// share of the heads; between the teams keys travel. Teams of one are plain
/// key transport, one team of all ranks is head-parallel (DeepSpeed-Ulysses).
struct Strategy {
  /// What `head_ranks` may be before over() makes it a number of ranks.
  static constexpr int kFitting = 0;    ///< what divides ranks and key heads
  static constexpr int kAllRanks = -1;  ///< one team

  KeyTransport transport = KeyTransport::ring;
  int head_ranks = 1;

  /// "ring", "gathered", "needed", "head_parallel" and "head_parallel_ring".
  static std::span<const std::string_view> names();

  /// The strategy of a name. "head_parallel_ring" (USP) has teams of
  /// `head_ranks` ranks, or of as many as divide the ranks and the key heads;
  /// the other names fix their teams.
  static Strategy named(std::string_view name, int head_ranks = kFitting);

  /// This strategy for a group of `ranks` ranks, which its teams divide.
  Strategy over(int ranks, int64_t key_heads) const;

  std::string to_string() const;

  /// The name that named() takes, with head_ranks beside it for teams.
  std::string_view name() const;

  /// The name in a group of `ranks` ranks, where one team is "head_parallel".
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
