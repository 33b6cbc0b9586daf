#include "longspan/core/tile.h"

#include <algorithm>

#include "longspan/core/detail/check.h"
#include "longspan/core/mask.h"

namespace longspan {

namespace {

/// Of one more pair of ranges.
void count(int64_t& pairs, const char* who) {
  check(++pairs <= kMostTiles, who, ": more than ", kMostTiles,
        " pairs of a range of queries and one of keys within its reach; deal "
        "tokens out in longer ranges");
}

}  // namespace

std::vector<Tile> tiles(const Mask& mask,
                        const std::vector<TokenRange>& queries,
                        const std::vector<TokenRange>& keys) {
  std::vector<TokenRange> sorted;
  const std::vector<TokenRange>* ascending = &keys;
  const auto is_empty = [](TokenRange range) { return range.empty(); };
  if (!std::ranges::is_sorted(keys, {}, &TokenRange::begin) ||
      std::ranges::any_of(keys, is_empty)) {
    sorted = keys;
    std::erase_if(sorted, is_empty);
    std::ranges::sort(sorted, {}, &TokenRange::begin);
    ascending = &sorted;
  }
  std::vector<Tile> visible;
  int64_t pairs = 0;
  for (TokenRange query : queries) {
    const TokenRange reach = mask.reach(query);
    if (reach.empty()) continue;
    auto key = std::ranges::partition_point(
        *ascending, [&](TokenRange range) { return range.end <= reach.begin; });
    for (; key != ascending->end() && key->begin < reach.end; ++key) {
      count(pairs, "tiles");
      const Coverage coverage = mask.coverage(query, *key);
      if (coverage != Coverage::none)
        visible.push_back({query, *key, coverage});
    }
  }
  return visible;
}

std::vector<Tile> tiles(const Mask& mask, const Ownership& ownership, int rank,
                        int owner) {
  return tiles(mask, ownership.ranges_of(rank), ownership.ranges_of(owner));
}

std::vector<OwnedTile> tiles_of(const Mask& mask, const Ownership& ownership,
                                int rank) {
  check(
      mask.keys() == ownership.tokens() && mask.queries() == ownership.tokens(),
      "tiles_of: a mask of ", mask.queries(), " queries and ", mask.keys(),
      " keys over an ownership of ", ownership.tokens(), " tokens");
  check_listable("tiles_of", ownership);
  std::vector<OwnedTile> visible;
  int64_t pairs = 0;
  for (TokenRange query : ownership.ranges_of(rank)) {
    const TokenRange reach = mask.reach(query);
    for (int64_t token = reach.begin; token < reach.end;) {
      count(pairs, "tiles_of");
      const Ownership::Holding held = ownership.holding(token);
      const Coverage coverage = mask.coverage(query, held.range);
      if (coverage != Coverage::none) {
        visible.push_back({held.rank, {query, held.range, coverage}});
      }
      token = held.range.end;
    }
  }
  std::ranges::stable_sort(visible, {}, &OwnedTile::owner);
  return visible;
}

std::vector<TokenRange> needed_keys(const Mask& mask,
                                    const std::vector<TokenRange>& queries) {
  std::vector<TokenRange> needed;
  for (TokenRange query : queries) needed.push_back(mask.reach(query));
  return normalized(std::move(needed));
}

}  // namespace longspan
