#pragma once

#include <vector>

#include "longspan/core/coverage.h"
#include "longspan/core/ownership.h"
#include "longspan/core/token_range.h"

namespace longspan {

class Mask;

/// A block of work: one range of queries against one range of keys, both in
/// stream indices. `coverage` is exact: all needs no mask, some does.
struct Tile {
  TokenRange queries;
  TokenRange keys;
  Coverage coverage = Coverage::none;
  friend bool operator==(const Tile&, const Tile&) = default;
};

/// Pairs of ranges within reach of each other that are looked at; more are
/// refused before they cost gigabytes.
inline constexpr int64_t kMostTiles = int64_t{1} << 22;

/// The visible tiles (never Coverage::none) of query ranges x key ranges, in
/// the order of the queries and then by key. Ranges may come in any order; key
/// ranges do not overlap.
/// Cost: O(log) for each query range, plus the tiles it can reach.
std::vector<Tile> tiles(const Mask& mask,
                        const std::vector<TokenRange>& queries,
                        const std::vector<TokenRange>& keys);

/// The tiles that `rank` computes while it holds the keys of `owner`.
std::vector<Tile> tiles(const Mask& mask, const Ownership& ownership, int rank,
                        int owner);

/// The tiles of one rank for every owner, ordered by owner and then as above.
/// Cost: the owned ranges within reach of each query range, so asking for all
/// ranks costs far less than ranks x ranks calls of tiles().
struct OwnedTile {
  int owner = 0;
  Tile tile;
  friend bool operator==(const OwnedTile&, const OwnedTile&) = default;
};
std::vector<OwnedTile> tiles_of(const Mask& mask, const Ownership& ownership,
                                int rank);

/// The keys that some query in `queries` sees, as ascending ranges; pads that
/// lie between them are included.
std::vector<TokenRange> needed_keys(const Mask& mask,
                                    const std::vector<TokenRange>& queries);

}  // namespace longspan
