#include "longspan/core/tile.h"

#include <gtest/gtest.h>

#include "longspan/core/work.h"
#include "tests/support/masks.h"
#include "tests/support/property.h"

namespace longspan {

/// So that failures show tiles.
inline std::ostream& operator<<(std::ostream& out, const Tile& tile) {
  return out << tile.queries << " x " << tile.keys
             << (tile.coverage == Coverage::all ? " all" : " some");
}
inline std::ostream& operator<<(std::ostream& out, const OwnedTile& owned) {
  return out << "from " << owned.owner << ": " << owned.tile;
}

namespace {

using test::message_of;
using test::OwnershipCase;
using test::PackingCase;
using test::Random;
using test::SharedMaskCase;

/// Coverage pair by pair.
Coverage coverage_of(const Mask& mask, TokenRange queries, TokenRange keys) {
  int64_t pairs = 0;
  for (int64_t q = queries.begin; q < queries.end; ++q) {
    for (int64_t k = keys.begin; k < keys.end; ++k) pairs += mask.allows(q, k);
  }
  if (pairs == 0) return Coverage::none;
  return pairs == queries.size() * keys.size() ? Coverage::all : Coverage::some;
}

/// Every query range with every key range, the latter ascending.
std::vector<Tile> visible_tiles(const Mask& mask,
                                const std::vector<TokenRange>& queries,
                                std::vector<TokenRange> keys) {
  std::ranges::sort(keys, {}, &TokenRange::begin);
  std::vector<Tile> tiles;
  for (TokenRange query : queries) {
    for (TokenRange key : keys) {
      const Coverage coverage = coverage_of(mask, query, key);
      if (coverage != Coverage::none) tiles.push_back({query, key, coverage});
    }
  }
  return tiles;
}

/// Short streams over few ranks, every kind of ownership and mask.
std::vector<SharedMaskCase> small_cases() {
  const std::vector<PackingCase> packings{
      {{}, 0},
      {{}, 4},
      {{{7, 7}}, 0},
      {{{4, 6}, {0, 0}, {3, 3}}, 2},
      {{{0, 2}, {1, 1}, {8, 8}}, 0},
  };
  std::vector<SharedMaskCase> cases;
  for (const PackingCase& packing : packings) {
    std::vector<test::MaskCase> masks;
    for (test::MaskKind kind : test::token_masks()) {
      masks.push_back({packing, kind, 2, 1});
      masks.push_back(masks.back());
      masks.back().pads = PadQueries::see_document;
      masks.push_back({packing, kind, 1, 0});
      masks.back().hidden = {{0, 1}, {4, 6}};
      masks.push_back({packing, kind, 0, 3});
      masks.back().groups = {{5, 9}, {1, 3}};
      masks.push_back(masks.back());
      masks.back().reach = GroupReach::within_window;
    }
    for (const test::MaskCase& mask : masks) {
      for (OwnershipKind kind : test::all_kinds()) {
        for (int ranks = 1; ranks <= 4; ++ranks) {
          OwnershipCase owners{kind, ranks, packing};
          owners.pieces = {{2, 1, 3}, {3, 0, 2}, {1, 1, 1}, {9, 3, 0}};
          cases.push_back(SharedMaskCase{mask.fitted(), owners}.fitted());
        }
      }
    }
  }
  return cases;
}

SharedMaskCase draw(Random& random) {
  return test::draw_shared_mask(random);
}

void tiles_are_what_is_visible(const SharedMaskCase& c) {
  const Mask mask = c.mask.mask();
  const Ownership ownership = c.owners.ownership();
  for (int rank = 0; rank < ownership.ranks(); ++rank) {
    std::vector<OwnedTile> owned;
    for (int owner = 0; owner < ownership.ranks(); ++owner) {
      const std::vector<Tile> expected = visible_tiles(
          mask, ownership.ranges_of(rank), ownership.ranges_of(owner));
      ASSERT_EQ(tiles(mask, ownership, rank, owner), expected)
          << "rank " << rank << " with the keys of " << owner;
      for (const Tile& tile : expected) owned.push_back({owner, tile});
    }
    ASSERT_EQ(tiles_of(mask, ownership, rank), owned) << "rank " << rank;
  }
}

TEST(Tiles, AreWhatIsVisibleOnSmallStreams) {
  test::for_each(small_cases(), tiles_are_what_is_visible);
}

TEST(Tiles, AreWhatIsVisibleOnRandomStreams) {
  test::for_all(500, draw, tiles_are_what_is_visible);
}

void tiles_hold_every_pair_once(const SharedMaskCase& c) {
  const Mask mask = c.mask.mask();
  const Ownership ownership = c.owners.ownership();
  const TokenRange stream{0, ownership.tokens()};
  int64_t all = 0;
  for (int rank = 0; rank < ownership.ranks(); ++rank) {
    int64_t pairs = 0;
    for (const OwnedTile& owned : tiles_of(mask, ownership, rank)) {
      pairs += mask.pairs(owned.tile.queries, owned.tile.keys);
    }
    ASSERT_EQ(pairs, work_of(mask, ownership, rank).pairs) << "rank " << rank;
    all += pairs;
  }
  ASSERT_EQ(all, mask.pairs(stream, stream));
}

TEST(Tiles, HoldEveryPairOnce) {
  test::for_each(small_cases(), tiles_hold_every_pair_once);
  test::for_all(500, draw, tiles_hold_every_pair_once);
}

/// Ranges in any order, some of them empty; key ranges do not overlap.
struct LooseCase {
  test::MaskCase mask;
  std::vector<TokenRange> queries;
  std::vector<TokenRange> keys;

  std::vector<LooseCase> smaller() const {
    std::vector<LooseCase> cases;
    for (const auto& fewer : test::without_one(queries)) {
      cases.push_back({mask, fewer, keys});
    }
    for (const auto& fewer : test::without_one(keys)) {
      cases.push_back({mask, queries, fewer});
    }
    for (const test::MaskCase& less : mask.smaller()) {
      const Mask made = less.mask();
      const auto cut = [](std::vector<TokenRange> ranges, int64_t end) {
        for (TokenRange& range : ranges) {
          range = {std::min(range.begin, end), std::min(range.end, end)};
        }
        return ranges;
      };
      cases.push_back(
          {less, cut(queries, made.queries()), cut(keys, made.keys())});
    }
    return cases;
  }
  std::string to_string() const {
    return join(mask.to_string(), "; queries ", test::listed(queries),
                ", keys ", test::listed(keys));
  }
};

LooseCase draw_loose(Random& random) {
  std::vector<test::MaskKind> kinds = test::token_masks();
  kinds.push_back(test::MaskKind::compressed);
  const PackingCase packing = test::draw_packing(random, 24, 4);
  LooseCase drawn{test::draw_mask(random, packing, kinds), {}, {}};
  const Mask mask = drawn.mask.mask();
  for (int64_t i = random.between(0, 5); i > 0; --i) {
    drawn.queries.push_back(test::draw_range(random, mask.queries()));
  }
  for (int64_t begin = 0; begin < mask.keys();) {
    const int64_t end = std::min(mask.keys(), begin + random.between(0, 9));
    if (!random.one_in(4)) drawn.keys.push_back({begin, end});
    if (random.one_in(4)) {
      const int64_t inside = random.between(begin, end);
      drawn.keys.push_back({inside, inside});
    }
    begin = end;
  }
  if (random.one_in(2)) random.shuffle(drawn.keys);
  return drawn;
}

TEST(Tiles, TakeRangesInAnyOrder) {
  test::for_all(1000, draw_loose, [](const LooseCase& c) {
    const Mask mask = c.mask.mask();
    ASSERT_EQ(tiles(mask, c.queries, c.keys),
              visible_tiles(mask, c.queries, c.keys));
  });
}

TEST(Tiles, TakeEmptyRangesBesideOthers) {
  const Mask mask = Mask::sliding(Packing::single(12), 3);
  const std::vector<Tile> expected{{{9, 10}, {5, 10}, Coverage::some}};
  for (const std::vector<TokenRange>& keys :
       {std::vector<TokenRange>{{0, 5}, {5, 10}, {5, 5}, {10, 12}},
        std::vector<TokenRange>{{0, 5}, {5, 10}, {6, 6}, {10, 12}},
        std::vector<TokenRange>{{10, 12}, {5, 10}, {5, 5}, {0, 5}}}) {
    EXPECT_EQ(tiles(mask, {{9, 10}}, keys), expected) << test::listed(keys);
  }
}

/// Every visible key that some query sees, and no other but pads.
void needed_keys_are_seen(const SharedMaskCase& c) {
  const Mask mask = c.mask.mask();
  const Ownership ownership = c.owners.ownership();
  const auto sees = [&](const std::vector<TokenRange>& queries, int64_t key) {
    for (int64_t q : test::tokens_of(queries)) {
      if (mask.allows(q, key)) return true;
    }
    return false;
  };
  for (int rank = 0; rank < ownership.ranks(); ++rank) {
    const auto queries = ownership.ranges_of(rank);
    const auto needed = needed_keys(mask, queries);
    ASSERT_EQ(needed, normalized(needed));
    std::vector<bool> in(static_cast<std::size_t>(mask.keys()));
    for (int64_t key : test::tokens_of(needed)) test::at(in, key) = true;
    for (int64_t key = 0; key < mask.keys(); ++key) {
      if (sees(queries, key)) {
        ASSERT_TRUE(test::at(in, key)) << "rank " << rank << " key " << key;
      } else if (test::at(in, key) && c.mask.pads == PadQueries::see_nothing) {
        ASSERT_FALSE(sees({{0, mask.queries()}}, key))
            << "rank " << rank << " needs no key " << key;
      }
    }
  }
}

TEST(Tiles, NeededKeysAreThoseSeenAndPadsBetween) {
  test::for_each(small_cases(), needed_keys_are_seen);
  test::for_all(500, draw, needed_keys_are_seen);
}

TEST(Tiles, AreSkippedFullOrMaskedAsTheMaskSays) {
  const Mask mask = Mask::causal(Packing::single(8));
  const Ownership ownership = Ownership::head_tail(8, 2);
  const std::vector<OwnedTile> first{
      {0, {{0, 2}, {0, 2}, Coverage::some}},
      {0, {{6, 8}, {0, 2}, Coverage::all}},
      {0, {{6, 8}, {6, 8}, Coverage::some}},
      {1, {{6, 8}, {2, 6}, Coverage::all}},
  };
  const std::vector<OwnedTile> second{
      {0, {{2, 6}, {0, 2}, Coverage::all}},
      {1, {{2, 6}, {2, 6}, Coverage::some}},
  };
  EXPECT_EQ(tiles_of(mask, ownership, 0), first);
  EXPECT_EQ(tiles_of(mask, ownership, 1), second);
}

TEST(Tiles, AreNoneBetweenDocuments) {
  const Mask mask = Mask::full(Packing::of({4, 4}));
  const Ownership ownership = Ownership::contiguous(8, 2);
  EXPECT_TRUE(tiles(mask, ownership, 0, 1).empty());
  EXPECT_EQ(tiles(mask, ownership, 1, 1),
            (std::vector<Tile>{{{4, 8}, {4, 8}, Coverage::all}}));
}

TEST(Tiles, AreNoneForRanksWithoutTokens) {
  const Mask mask = Mask::causal(Packing::single(4));
  const Ownership ownership = Ownership::of_sizes({4, 0});
  EXPECT_TRUE(tiles_of(mask, ownership, 1).empty());
  EXPECT_TRUE(tiles(mask, ownership, 0, 1).empty());
}

TEST(Tiles, RefuseAnOwnershipOfAnotherStream) {
  const Mask mask = Mask::causal(Packing::single(8));
  EXPECT_EQ(
      message_of([&] { tiles_of(mask, Ownership::contiguous(6, 2), 0); }),
      "tiles_of: a mask of 8 queries and 8 keys over an ownership of 6 tokens");
  const Mask compressed = Mask::compressed(Packing::single(8), 4);
  EXPECT_EQ(
      message_of([&] { tiles_of(compressed, Ownership::contiguous(8, 2), 0); }),
      "tiles_of: a mask of 8 queries and 2 keys over an ownership of 8 tokens");
}

}  // namespace
}  // namespace longspan
