#include "longspan/core/work.h"

#include "longspan/core/detail/check.h"
#include "longspan/core/detail/checked.h"
#include "longspan/core/mask.h"
#include "longspan/core/tile.h"

namespace longspan {

RankWork work_of(const Mask& mask, const Ownership& ownership, int rank) {
  check(
      mask.queries() == ownership.tokens() && mask.keys() == ownership.tokens(),
      "work_of: a mask of ", mask.queries(), " queries and ", mask.keys(),
      " keys over an ownership of ", ownership.tokens(), " tokens");
  RankWork work;
  const std::vector<TokenRange> held = ownership.ranges_of(rank);
  for (TokenRange range : held) {
    work.tokens += range.size();
    const TokenRange reach = mask.reach(range);
    if (!reach.empty()) work.pairs += mask.pairs(range, reach);
  }
  const std::vector<TokenRange> needed = needed_keys(mask, held);
  const std::vector<TokenRange> own = normalized(held);
  work.foreign_keys = count_tokens(needed);
  auto mine = own.begin();
  for (TokenRange range : needed) {
    while (mine != own.end() && mine->end <= range.begin) ++mine;
    for (auto at = mine; at != own.end() && at->begin < range.end; ++at) {
      work.foreign_keys -= intersect(*at, range).size();
    }
  }
  return work;
}

std::vector<RankWork> work_per_rank(const Mask& mask,
                                    const Ownership& ownership) {
  check_listable("work_per_rank", ownership);
  std::vector<RankWork> work;
  for (int rank = 0; rank < ownership.ranks(); ++rank) {
    work.push_back(work_of(mask, ownership, rank));
  }
  return work;
}

int64_t forward_flops(int64_t pairs, const AttentionShape& shape) {
  const auto counted = [](int64_t value) {
    return Checked("forward_flops", value);
  };
  return (counted(2) * pairs * shape.heads *
          (counted(shape.head_dim) + shape.value_dim))
      .value();
}

int64_t key_value_bytes(int64_t tokens, const AttentionShape& shape) {
  const auto counted = [](int64_t value) {
    return Checked("key_value_bytes", value);
  };
  return (counted(tokens) * shape.key_heads *
          (counted(shape.head_dim) + shape.value_dim) * shape.bytes_per_element)
      .value();
}

int64_t received_bytes_all(const Ownership& ownership, int rank,
                           const AttentionShape& shape) {
  return key_value_bytes(ownership.tokens() - ownership.local_tokens(rank),
                         shape);
}

int64_t received_bytes_needed(const RankWork& work,
                              const AttentionShape& shape) {
  return key_value_bytes(work.foreign_keys, shape);
}

}  // namespace longspan
