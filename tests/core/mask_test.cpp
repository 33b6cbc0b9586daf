#include "longspan/core/mask.h"

#include <gtest/gtest.h>

#include <limits>

#include "tests/support/masks.h"
#include "tests/support/property.h"

namespace longspan {
namespace {

using test::at;
using test::MaskCase;
using test::MaskKind;
using test::message_of;
using test::PackingCase;
using test::Random;
using test::Refusal;

constexpr int64_t kNone = -1;

/// The definition in mask.h, token by token and pair by pair.
struct NaiveMask {
  struct Token {
    int64_t document = kNone;
    int64_t group = kNone;
    bool pad = true;
  };
  /// The token whose turn makes a key visible: itself, or the last of those a
  /// compressed key stands for.
  std::vector<Token> tokens;
  std::vector<int64_t> last_token;  // of each key
  std::vector<std::vector<bool>> visible;

  explicit NaiveMask(const MaskCase& c) {
    for (std::size_t d = 0; d < c.packing.documents.size(); ++d) {
      const auto document = static_cast<int64_t>(d);
      const auto [length, slot] = c.packing.documents[d];
      const int64_t begin = std::ssize(tokens);
      for (int64_t position = 0; position < slot; ++position) {
        Token token{document, kNone, position >= length};
        if (!c.prefix.empty() && position < c.prefix[d]) {
          token.group = 1000 + document;
        }
        tokens.push_back(token);
      }
      if (c.kind != MaskKind::compressed) continue;
      for (int64_t key = 0; (key + 1) * c.ratio <= slot; ++key) {
        last_token.push_back(begin + (key + 1) * c.ratio - 1);
      }
    }
    for (int64_t t = 0; t < c.packing.tail; ++t) tokens.push_back({});
    for (TokenRange range : c.hidden) {
      for (int64_t t = range.begin; t < range.end; ++t) {
        at(tokens, t).pad = true;
      }
    }
    for (std::size_t g = 0; g < c.groups.size(); ++g) {
      for (int64_t t = c.groups[g].begin; t < c.groups[g].end; ++t) {
        at(tokens, t).group = static_cast<int64_t>(g);
      }
    }
    if (c.kind != MaskKind::compressed) {
      for (int64_t t = 0; t < std::ssize(tokens); ++t) last_token.push_back(t);
    }
    for (int64_t q = 0; q < std::ssize(tokens); ++q) {
      visible.emplace_back();
      for (int64_t key : last_token) visible.back().push_back(sees(c, q, key));
    }
  }

  bool sees(const MaskCase& c, int64_t q, int64_t k) const {
    const Token query = at(tokens, q), key = at(tokens, k);
    if (query.document == kNone || query.document != key.document) return false;
    if (key.pad) return false;
    if (query.pad && c.pads == PadQueries::see_nothing) return false;
    const bool one_group = query.group != kNone && query.group == key.group;
    if (one_group && c.reach == GroupReach::whole_group) return true;
    const bool has_window =
        c.kind == MaskKind::sliding || c.kind == MaskKind::banded;
    if (one_group && (!has_window || q - k <= c.before)) return true;
    switch (c.kind) {
      case MaskKind::causal:
      case MaskKind::compressed:
        return k <= q;
      case MaskKind::full:
        return true;
      case MaskKind::sliding:
        return k <= q && q - k <= c.before;
      case MaskKind::banded:
        return q - c.before <= k && k <= q + c.after;
    }
    return false;
  }

  int64_t keys() const { return std::ssize(last_token); }

  std::vector<TokenRange> keys_of(int64_t query) const {
    std::vector<int64_t> seen;
    for (int64_t k = 0; k < keys(); ++k) {
      if (at(at(visible, query), k)) seen.push_back(k);
    }
    return test::runs_in(seen);
  }

  /// The first document with a pad between two tokens that are none.
  int64_t torn_document() const {
    for (int64_t t = 0; t + 2 < std::ssize(tokens); ++t) {
      if (at(tokens, t).pad || !at(tokens, t + 1).pad) continue;
      for (int64_t u = t + 2; u < std::ssize(tokens); ++u) {
        if (at(tokens, u).document != at(tokens, t).document) break;
        if (!at(tokens, u).pad) return at(tokens, t).document;
      }
    }
    return kNone;
  }
};

// ---- Cases.

/// Every kind of mask over one packing.
void append_masks(const PackingCase& packing, std::vector<MaskCase>& cases) {
  constexpr int64_t kWide = 100;
  for (PadQueries pads : {PadQueries::see_nothing, PadQueries::see_document}) {
    const auto add = [&](MaskCase c) {
      c.pads = pads;
      cases.push_back(c);
    };
    add({packing, MaskKind::causal});
    add({packing, MaskKind::full});
    for (int64_t before : {0, 1, 2}) {
      add({packing, MaskKind::sliding, before});
    }
    for (auto [before, after] : std::vector<std::pair<int64_t, int64_t>>{
             {1, 1}, {0, 2}, {2, 1}, {kWide, 1}, {0, kWide}}) {
      add({packing, MaskKind::banded, before, after});
    }
    for (int64_t ratio = 1; ratio <= 4; ++ratio) {
      add({packing, MaskKind::compressed, 0, 0, ratio});
    }
    MaskCase prefixed{packing, MaskKind::causal};
    for (const auto& document : packing.documents) {
      prefixed.prefix.push_back(document.length - document.length / 3);
    }
    if (!prefixed.prefix.empty()) add(prefixed);
  }
}

std::vector<MaskCase> small_masks(int documents) {
  std::vector<MaskCase> cases;
  for (const PackingCase& packing : test::all_packings(documents, 3, {0, 1})) {
    append_masks(packing, cases);
  }
  return cases;
}

/// Every kind of mask over one document of every length from 0 to 64.
std::vector<MaskCase> masks_of_every_length() {
  std::vector<MaskCase> cases;
  for (int64_t length = 0; length <= 64; ++length) {
    append_masks({{{length, length + length % 3}}}, cases);
  }
  return cases;
}

/// One document of 4 tokens and a pad, then one of 2: every set of hidden
/// tokens in the first with every group of the stream.
std::vector<MaskCase> small_holes_and_groups() {
  const PackingCase packing{{{4, 5}, {2, 2}}};
  std::vector<MaskCase> plain;
  for (PadQueries pads : {PadQueries::see_nothing, PadQueries::see_document}) {
    plain.push_back({packing, MaskKind::causal});
    plain.back().pads = pads;
    plain.push_back({packing, MaskKind::full});
    plain.back().pads = pads;
    plain.push_back({packing, MaskKind::banded, 1, 0});
    plain.back().pads = pads;
    plain.push_back({packing, MaskKind::banded, 0, 2});
    plain.back().pads = pads;
    for (auto [before, after] :
         std::vector<std::pair<int64_t, int64_t>>{{0, 0}, {1, 0}, {2, 1}}) {
      plain.push_back({packing, MaskKind::banded, before, after});
      plain.back().pads = pads;
      plain.back().reach = GroupReach::within_window;
    }
  }
  std::vector<MaskCase> cases;
  for (const MaskCase& mask : plain) {
    for (int64_t set = 0; set < 16; ++set) {
      MaskCase holes = mask;
      for (int64_t t = 0; t < 4; ++t) {
        if ((set >> t) % 2 == 1) holes.hidden.push_back({t, t + 1});
      }
      for (TokenRange group : test::all_ranges(7)) {
        MaskCase grouped = holes;
        grouped.groups = {group};
        if (group.empty()) grouped.groups = {};
        if (group.empty() && group.begin > 0) continue;
        cases.push_back(grouped);
      }
    }
  }
  return cases;
}

MaskCase draw(Random& random) {
  static const std::vector<MaskKind> kinds{MaskKind::causal, MaskKind::full,
                                           MaskKind::sliding, MaskKind::banded,
                                           MaskKind::compressed};
  const int64_t longest = random.one_in(2) ? 24 : 64;
  return test::draw_mask(random, test::draw_packing(random, longest, 4), kinds);
}

// ---- Laws.

void allows_is_the_definition(const MaskCase& c) {
  const Mask mask = c.mask();
  const NaiveMask naive(c);
  ASSERT_EQ(mask.queries(), std::ssize(naive.tokens));
  ASSERT_EQ(mask.keys(), naive.keys());
  for (int64_t q = 0; q < mask.queries(); ++q) {
    for (int64_t k = 0; k < mask.keys(); ++k) {
      ASSERT_EQ(mask.allows(q, k), at(at(naive.visible, q), k))
          << "query " << q << " key " << k;
    }
  }
}

TEST(Mask, AllowsIsTheDefinitionOnSmallPackings) {
  test::for_each(small_masks(3), allows_is_the_definition);
}

TEST(Mask, AllowsIsTheDefinitionForEveryLength) {
  test::for_each(masks_of_every_length(), allows_is_the_definition);
}

TEST(Mask, AllowsIsTheDefinitionWithHolesAndGroups) {
  test::for_each(small_holes_and_groups(), allows_is_the_definition);
}

TEST(Mask, AllowsIsTheDefinitionOnRandomMasks) {
  test::for_all(1000, draw, allows_is_the_definition);
}

void key_ranges_are_what_allows_says(const MaskCase& c) {
  const Mask mask = c.mask();
  const NaiveMask naive(c);
  for (int64_t q = 0; q < mask.queries(); ++q) {
    ASSERT_EQ(mask.key_ranges_of(q), naive.keys_of(q)) << "query " << q;
  }
}

TEST(Mask, KeyRangesAreWhatAllowsSays) {
  test::for_each(small_masks(2), key_ranges_are_what_allows_says);
  test::for_each(masks_of_every_length(), key_ranges_are_what_allows_says);
  test::for_each(small_holes_and_groups(), key_ranges_are_what_allows_says);
  test::for_all(1000, draw, key_ranges_are_what_allows_says);
}

/// Masks say no exactly when a document is torn; then some query's keys are
/// torn too, unless a band is too narrow to notice.
void keys_are_one_range_unless_torn(const MaskCase& c) {
  const Mask mask = c.mask();
  const NaiveMask naive(c);
  const int64_t torn = naive.torn_document();
  ASSERT_EQ(mask.is_one_range(), torn == kNone);
  bool seen_torn = false;
  for (int64_t q = 0; q < mask.queries(); ++q) {
    const auto expected = naive.keys_of(q);
    seen_torn = seen_torn || expected.size() > 1;
    if (mask.is_one_range()) {
      ASSERT_LE(expected.size(), 1) << "query " << q;
      ASSERT_EQ(mask.keys_of(q), expected.empty() ? TokenRange{} : expected[0])
          << "query " << q;
    } else {
      ASSERT_EQ(message_of([&] { mask.keys_of(q); }),
                "Mask::keys_of: " + mask.why_not_one_range());
    }
  }
  if (torn == kNone) {
    ASSERT_EQ(mask.why_not_one_range(), "");
    ASSERT_FALSE(seen_torn);
    return;
  }
  ASSERT_EQ(mask.why_not_one_range(),
            join("document ", torn,
                 " has pads between its real tokens, so the keys of a query "
                 "are not one range; use key_ranges_of, or move the pads to "
                 "the ends"));
  if (c.kind == MaskKind::causal || c.kind == MaskKind::full) {
    ASSERT_TRUE(seen_torn);
  }
}

TEST(Mask, KeysAreOneRangeUnlessADocumentIsTorn) {
  test::for_each(small_masks(2), keys_are_one_range_unless_torn);
  test::for_each(masks_of_every_length(), keys_are_one_range_unless_torn);
  test::for_each(small_holes_and_groups(), keys_are_one_range_unless_torn);
  test::for_all(1000, draw, keys_are_one_range_unless_torn);
}

/// Visible pairs by counting, with sums[q][k] over [0, q) x [0, k).
struct Counted {
  std::vector<std::vector<int64_t>> sums;

  explicit Counted(const NaiveMask& naive) {
    const std::size_t width = naive.last_token.size() + 1;
    sums.assign(naive.tokens.size() + 1, std::vector<int64_t>(width));
    for (std::size_t q = 0; q < naive.tokens.size(); ++q) {
      for (std::size_t k = 0; k + 1 < width; ++k) {
        sums[q + 1][k + 1] =
            sums[q][k + 1] + sums[q + 1][k] - sums[q][k] + naive.visible[q][k];
      }
    }
  }

  int64_t pairs(TokenRange queries, TokenRange keys) const {
    const auto sum = [&](int64_t q, int64_t k) { return at(at(sums, q), k); };
    return sum(queries.end, keys.end) - sum(queries.begin, keys.end) -
           sum(queries.end, keys.begin) + sum(queries.begin, keys.begin);
  }
};

/// Every range of a short stream, or some of a long one.
std::vector<TokenRange> ranges_within(int64_t tokens, Random& random) {
  if (tokens <= 9) return test::all_ranges(tokens);
  std::vector<TokenRange> ranges{{0, tokens}};
  for (int i = 0; i < 30; ++i) {
    const TokenRange wide = test::draw_range(random, tokens);
    ranges.push_back(wide);
    ranges.push_back(
        {wide.begin, std::min(wide.end, wide.begin + random.between(0, 5))});
  }
  return ranges;
}

void pairs_and_coverage_count(const MaskCase& c) {
  const Mask mask = c.mask();
  const Counted counted{NaiveMask(c)};
  Random random(static_cast<uint64_t>(mask.queries()));
  const auto key_ranges = ranges_within(mask.keys(), random);
  for (TokenRange queries : ranges_within(mask.queries(), random)) {
    for (TokenRange keys : key_ranges) {
      const int64_t pairs = counted.pairs(queries, keys);
      ASSERT_EQ(mask.pairs(queries, keys), pairs)
          << "queries " << queries << " keys " << keys;
      const Coverage coverage = pairs == 0 ? Coverage::none
                                : pairs == queries.size() * keys.size()
                                    ? Coverage::all
                                    : Coverage::some;
      ASSERT_EQ(mask.coverage(queries, keys), coverage)
          << "queries " << queries << " keys " << keys;
    }
  }
}

TEST(Mask, PairsAndCoverageCountWhatIsAllowed) {
  std::vector<MaskCase> cases;
  for (const PackingCase& packing : test::all_packings(2, 2, {0, 1})) {
    append_masks(packing, cases);
  }
  append_masks({{{3, 4}, {5, 5}}}, cases);
  append_masks({{{0, 1}, {2, 2}, {0, 0}, {4, 6}}}, cases);
  test::for_each(cases, pairs_and_coverage_count);
}

TEST(Mask, PairsAndCoverageCountForEveryLength) {
  test::for_each(masks_of_every_length(), pairs_and_coverage_count);
}

TEST(Mask, PairsAndCoverageCountWithHolesAndGroups) {
  test::for_each(small_holes_and_groups(), pairs_and_coverage_count);
}

TEST(Mask, PairsAndCoverageCountOnRandomMasks) {
  test::for_all(1000, draw, pairs_and_coverage_count);
}

void reach_holds_what_is_seen(const MaskCase& c) {
  const Mask mask = c.mask();
  const NaiveMask naive(c);
  std::vector<TokenRange> hull;  // of the keys of each query
  for (int64_t q = 0; q < mask.queries(); ++q) {
    const auto keys = naive.keys_of(q);
    hull.push_back(keys.empty() ? TokenRange{}
                                : TokenRange{keys[0].begin, keys.back().end});
  }
  Random random(static_cast<uint64_t>(mask.queries()));
  for (TokenRange queries : ranges_within(mask.queries(), random)) {
    TokenRange seen;
    for (int64_t q = queries.begin; q < queries.end; ++q) {
      const TokenRange keys = at(hull, q);
      if (keys.empty()) continue;
      seen = seen.empty() ? keys
                          : TokenRange{std::min(seen.begin, keys.begin),
                                       std::max(seen.end, keys.end)};
    }
    const TokenRange reach = mask.reach(queries);
    ASSERT_TRUE(reach.contains(seen)) << queries << " reaches " << reach;
    if (c.pads == PadQueries::see_nothing && c.kind != MaskKind::compressed) {
      ASSERT_EQ(reach, seen) << "queries " << queries;
    }
  }
}

TEST(Mask, ReachHoldsWhatIsSeen) {
  test::for_each(small_masks(2), reach_holds_what_is_seen);
  test::for_each(masks_of_every_length(), reach_holds_what_is_seen);
  test::for_each(small_holes_and_groups(), reach_holds_what_is_seen);
  test::for_all(1000, draw, reach_holds_what_is_seen);
}

void stretches_say_the_keys(const MaskCase& c) {
  const Mask mask = c.mask();
  const NaiveMask naive(c);
  if (c.kind == MaskKind::compressed || naive.torn_document() != kNone) {
    return test::pass_over();
  }
  Random random(static_cast<uint64_t>(mask.queries()));
  const Band band = mask.band();
  for (TokenRange queries : ranges_within(mask.queries(), random)) {
    std::vector<TokenRange> keys(static_cast<std::size_t>(mask.queries()));
    int64_t next = queries.begin;
    mask.for_each_stretch(queries, [&](const Mask::Stretch& stretch) {
      ASSERT_GE(stretch.queries.begin, next);
      ASSERT_LE(stretch.queries.end, queries.end);
      next = stretch.queries.end;
      for (int64_t q = stretch.queries.begin; q < next; ++q) {
        at(keys, q) = {std::clamp(q - band.before, stretch.keys.begin,
                                  stretch.begin_at_most),
                       std::clamp(q + band.after + 1, stretch.end_at_least,
                                  stretch.keys.end)};
      }
    });
    for (int64_t q = queries.begin; q < queries.end; ++q) {
      const auto expected = naive.keys_of(q);
      if (expected.empty()) {
        ASSERT_TRUE(at(keys, q).empty()) << "query " << q;
      } else {
        ASSERT_EQ(at(keys, q), expected[0]) << "query " << q;
      }
    }
  }
}

TEST(Mask, StretchesSayTheKeysOfTheirQueries) {
  test::for_each(small_masks(2), stretches_say_the_keys);
  test::for_each(masks_of_every_length(), stretches_say_the_keys);
  test::for_each(small_holes_and_groups(), stretches_say_the_keys);
  test::for_all(1000, draw, stretches_say_the_keys);
}

// ---- Examples.

/// keys_of every query.
std::vector<TokenRange> windows(const Mask& mask) {
  std::vector<TokenRange> keys;
  for (int64_t q = 0; q < mask.queries(); ++q) keys.push_back(mask.keys_of(q));
  return keys;
}

TEST(Mask, RealQueriesSeeRealKeysOfTheirDocument) {
  const Mask mask = Mask::causal(Packing::of({2, 3}, {4, 4}));
  EXPECT_EQ(windows(mask),
            (std::vector<TokenRange>{
                {0, 1}, {0, 2}, {}, {}, {4, 5}, {4, 6}, {4, 7}, {}}));
}

TEST(Mask, PadQueriesCanSeeTheirDocument) {
  const Mask mask = Mask::causal(Packing::of({2, 3}, {4, 4}))
                        .with_pad_queries(PadQueries::see_document);
  EXPECT_EQ(
      windows(mask),
      (std::vector<TokenRange>{
          {0, 1}, {0, 2}, {0, 2}, {0, 2}, {4, 5}, {4, 6}, {4, 7}, {4, 7}}));
}

TEST(Mask, PadsOfAnEmptyDocumentSeeNothing) {
  const Mask mask = Mask::causal(Packing::of({0, 3}, {2, 4}))
                        .with_pad_queries(PadQueries::see_document);
  EXPECT_EQ(windows(mask),
            (std::vector<TokenRange>{{}, {}, {2, 3}, {2, 4}, {2, 5}, {2, 5}}));
}

TEST(Mask, SlidingWindowCountsTheQuery) {
  const Mask mask = Mask::sliding(Packing::single(5), 2);
  EXPECT_EQ(windows(mask),
            (std::vector<TokenRange>{{0, 1}, {0, 2}, {1, 3}, {2, 4}, {3, 5}}));
}

TEST(Mask, LeftPaddingKeepsOneRange) {
  const Mask mask = Mask::causal(Packing::single(4)).with_hidden({{0, 2}});
  EXPECT_TRUE(mask.is_one_range());
  EXPECT_EQ(windows(mask), (std::vector<TokenRange>{{}, {}, {2, 3}, {2, 4}}));
}

TEST(Mask, AHoleTearsOnlyItsDocument) {
  const Mask mask = Mask::causal(Packing::of({3, 4})).with_hidden({{4, 5}});
  EXPECT_FALSE(mask.is_one_range());
  EXPECT_EQ(mask.why_not_one_range().substr(0, 11), "document 1 ");
  EXPECT_EQ(mask.key_ranges_of(6), (std::vector<TokenRange>{{3, 4}, {5, 7}}));
  EXPECT_EQ(mask.key_ranges_of(2), (std::vector<TokenRange>{{0, 3}}));
}

TEST(Mask, GroupsStopAtTheBordersOfDocuments) {
  const Mask mask = Mask::causal(Packing::of({3, 3})).with_groups({{1, 5}});
  EXPECT_EQ(windows(mask),
            (std::vector<TokenRange>{
                {0, 1}, {0, 3}, {0, 3}, {3, 5}, {3, 5}, {3, 6}}));
}

/// An image of 5 tokens under a window of 3, as Hugging Face masks Gemma 4:
/// the window ends what lies behind, not what lies ahead.
TEST(Mask, GroupsWithinTheWindowLookAheadToTheirEnd) {
  const Mask whole = Mask::sliding(Packing::single(8), 3).with_groups({{1, 6}});
  EXPECT_EQ(
      windows(whole),
      (std::vector<TokenRange>{
          {0, 1}, {0, 6}, {0, 6}, {1, 6}, {1, 6}, {1, 6}, {4, 7}, {5, 8}}));
  const Mask within = whole.with_group_reach(GroupReach::within_window);
  EXPECT_EQ(
      windows(within),
      (std::vector<TokenRange>{
          {0, 1}, {0, 6}, {0, 6}, {1, 6}, {2, 6}, {3, 6}, {4, 7}, {5, 8}}));
}

TEST(Mask, GroupsNoLongerThanTheWindowSeeTheSameEitherWay) {
  const Mask whole = Mask::sliding(Packing::single(9), 4).with_groups({{2, 6}});
  EXPECT_EQ(windows(whole),
            windows(whole.with_group_reach(GroupReach::within_window)));
}

TEST(Mask, PrefixSeesBothWays) {
  const Mask mask = Mask::causal(Packing::of({4, 2})).with_prefix({3, 0});
  EXPECT_EQ(windows(mask),
            (std::vector<TokenRange>{
                {0, 3}, {0, 3}, {0, 3}, {0, 4}, {4, 5}, {4, 6}}));
}

TEST(Mask, CompressedKeysAreSeenOnceComplete) {
  const Mask mask = Mask::compressed(Packing::of({5, 2}, {6, 2}), 2);
  EXPECT_EQ(mask.keys(), 4);
  EXPECT_EQ(windows(mask),
            (std::vector<TokenRange>{
                {}, {0, 1}, {0, 1}, {0, 2}, {0, 2}, {}, {}, {3, 4}}));
}

TEST(Mask, HidingTwiceHidesBoth) {
  const Mask plain = Mask::full(Packing::single(6));
  const Mask once = plain.with_hidden({{0, 1}, {5, 6}});
  const Mask twice = plain.with_hidden({{5, 6}}).with_hidden({{0, 1}});
  EXPECT_EQ(windows(once), windows(twice));
  EXPECT_EQ(windows(plain)[2], (TokenRange{0, 6})) << "the first is unchanged";
}

TEST(Mask, AnEmptyStreamHasNoPairs) {
  const Mask mask = Mask::full(Packing());
  EXPECT_EQ(mask.pairs({}, {}), 0);
  EXPECT_EQ(mask.coverage({}, {}), Coverage::none);
  EXPECT_EQ(mask.reach({}), (TokenRange{}));
  EXPECT_EQ(Mask::compressed(Packing(), 4).keys(), 0);
}

TEST(Mask, WideBandsAreCutToAll) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const Packing packing = Packing::of({3, 4});
  EXPECT_EQ(Mask::sliding(packing, kMost).band(), Mask::causal(packing).band());
  EXPECT_EQ(Mask::banded(packing, {kMost, kMost}).band(),
            Mask::full(packing).band());
  EXPECT_EQ(windows(Mask::banded(packing, {kMost, kMost})),
            windows(Mask::full(packing)));
}

TEST(Mask, PrintsItself) {
  const Packing packing = Packing::of({3, 5});
  EXPECT_EQ(Mask::causal(packing).to_string(),
            "Mask(causal, 8 tokens, 2 documents)");
  EXPECT_EQ(Mask::sliding(packing, 3).to_string(),
            "Mask(sliding 3, 8 tokens, 2 documents)");
  EXPECT_EQ(Mask::banded(packing, {Band::kAll, 2}).to_string(),
            "Mask(band all+2, 8 tokens, 2 documents)");
  EXPECT_EQ(Mask::compressed(packing, 4).to_string(),
            "Mask(compressed 4:1, 8 tokens, 2 documents)");
  EXPECT_EQ(Mask::full(Packing::single(8))
                .with_hidden({{0, 2}})
                .with_groups({{3, 4}, {5, 6}})
                .with_pad_queries(PadQueries::see_document)
                .to_string(),
            "Mask(full, 8 tokens, 1 document, 2 hidden, 2 groups, pads see)");
  EXPECT_EQ(Mask::sliding(packing, 3)
                .with_groups({{1, 3}, {3, 8}})
                .with_group_reach(GroupReach::within_window)
                .to_string(),
            "Mask(sliding 3, 8 tokens, 2 documents, 2 groups within the "
            "window)");
}

// ---- Refusals.

const Packing kEight = Packing::of({3, 5});
const Mask kCausal = Mask::causal(kEight);
const Mask kCompressed = Mask::compressed(kEight, 4);

const std::vector<Refusal> kRefused{
    {"MoreTokensThanPairsCanCount",
     [] { Mask::causal(Packing::single(Mask::kMostTokens + 1)); },
     "Mask: 3000000001 tokens; pairs are counted in 64 bits, so at "
     "most 3000000000"},
    {"EmptyWindow", [] { Mask::sliding(kEight, 0); },
     "Mask: a sliding window of 0 keys; expected at least 1 (the query "
     "itself)"},
    {"NegativeBand", [] { Mask::banded(kEight, {2, -1}); },
     "Mask: a band of 2 keys before and -1 after the query; neither may be "
     "negative"},
    {"RatioOfNothing", [] { Mask::compressed(kEight, 0); },
     "Mask: keys that stand for 0 tokens; expected at least 1"},
    {"HiddenOutside", [] { kCausal.with_hidden({{6, 9}}); },
     "Mask: hidden tokens [6, 9) of 8"},
    {"HiddenBackward", [] { kCausal.with_hidden({{6, 5}}); },
     "Mask: hidden tokens [6, 5) of 8"},
    {"HiddenInCompressed", [] { kCompressed.with_hidden({}); },
     "Mask: a compressed mask cannot hide single tokens; shorten the documents "
     "in the packing instead"},
    {"EmptyGroup", [] { kCausal.with_groups({{2, 2}}); },
     "Mask: group [2, 2) of 8 tokens; groups are not empty and lie inside the "
     "stream"},
    {"GroupOutside", [] { kCausal.with_groups({{-1, 2}}); },
     "Mask: group [-1, 2) of 8 tokens; groups are not empty and lie inside the "
     "stream"},
    {"GroupsOverlap", [] { kCausal.with_groups({{4, 6}, {1, 5}}); },
     "Mask: groups [1, 5) and [4, 6) overlap"},
    {"GroupsOverlapEarlierOnes",
     [] { kCausal.with_groups({{4, 6}}).with_groups({{5, 7}}); },
     "Mask: groups [4, 6) and [5, 7) overlap"},
    {"GroupsInCompressed", [] { kCompressed.with_groups({}); },
     "Mask: a compressed mask has no bidirectional groups"},
    {"PrefixForEachDocument", [] { kCausal.with_prefix({1}); },
     "Mask: 1 prefix lengths for 2 documents"},
    {"PrefixAboveDocument", [] { kCausal.with_prefix({1, 6}); },
     "Mask: a prefix of 6 tokens in document 1 of 5"},
    {"NegativePrefix", [] { kCausal.with_prefix({-1, 0}); },
     "Mask: a prefix of -1 tokens in document 0 of 3"},
    {"QueryAbove", [] { kCausal.allows(8, 0); }, "Mask::allows: query 8 of 8"},
    {"KeyBelow", [] { kCausal.allows(0, -1); }, "Mask::allows: key -1 of 8"},
    {"CompressedKeyAbove", [] { kCompressed.allows(0, 1); },
     "Mask::allows: key 1 of 1"},
    {"KeysOfNoQuery", [] { kCausal.keys_of(-1); },
     "Mask::keys_of: query -1 of 8"},
    {"KeyRangesOfNoQuery", [] { kCausal.key_ranges_of(8); },
     "Mask::key_ranges_of: query 8 of 8"},
    {"KeysOfATornDocument", [] { kCausal.with_hidden({{4, 5}}).keys_of(0); },
     "Mask::keys_of: document 1 has pads between its real tokens, so the keys "
     "of a query are not one range; use key_ranges_of, or move the pads to the "
     "ends"},
    {"PairsOutside", [] { kCausal.pairs({0, 9}, {0, 8}); },
     "Mask::pairs: queries [0, 9) of 8"},
    {"PairsBackward", [] { kCausal.pairs({0, 8}, {4, 3}); },
     "Mask::pairs: keys [4, 3) of 8"},
    {"ReachOutside", [] { kCausal.reach({-1, 3}); },
     "Mask::reach: queries [-1, 3) of 8"},
    {"StretchesOfCompressedKeys",
     [] { kCompressed.for_each_stretch({0, 1}, [](const auto&) {}); },
     "Mask::for_each_stretch: keys are compressed"},
};

class MaskRefuses : public ::testing::TestWithParam<Refusal> {};

TEST_P(MaskRefuses, ByMessage) {
  EXPECT_EQ(message_of(GetParam().call), GetParam().message);
}

INSTANTIATE_TEST_SUITE_P(, MaskRefuses, ::testing::ValuesIn(kRefused),
                         test::refusal_name);

}  // namespace
}  // namespace longspan
