#include "longspan/core/per_token.h"

#include <gtest/gtest.h>

#include <limits>
#include <memory>

#include "tests/support/masks.h"
#include "tests/support/property.h"

namespace longspan {
namespace {

using test::MaskCase;
using test::MaskKind;
using test::message_of;
using test::PackingCase;
using test::Refusal;

constexpr int64_t kUnwritten = -7777;

/// One entry for each token, and one more behind them that must stay.
template <class Entry, class Write>
std::vector<Entry> written(const std::vector<TokenRange>& ranges, Entry guard,
                           const Write& write) {
  const auto count = static_cast<std::size_t>(count_tokens(ranges));
  const auto memory = std::make_unique<Entry[]>(count + 1);
  std::fill_n(memory.get(), count + 1, guard);
  write(memory.get());
  EXPECT_EQ(memory[count], guard) << "wrote behind the array";
  return std::vector<Entry>(memory.get(), memory.get() + count);
}

/// Compares all facts about some tokens with the packing, token by token.
void expect_facts(const Packing& packing,
                  const std::vector<TokenRange>& ranges) {
  std::vector<int64_t> positions, ids;
  std::vector<char> pads;
  for (int64_t token : test::tokens_of(ranges)) {
    const auto [document, position] = packing.locate(token);
    int64_t id = 0;
    for (int64_t d = 0; d <= document; ++d) id += packing.length(d) > 0;
    positions.push_back(position);
    pads.push_back(packing.is_pad(token));
    ids.push_back(packing.is_pad(token) ? 0 : id);
  }
  ASSERT_EQ(written<int64_t>(
                ranges, kUnwritten,
                [&](int64_t* out) { write_positions(packing, ranges, out); }),
            positions)
      << test::listed(ranges);
  ASSERT_EQ(written<int64_t>(ranges, kUnwritten,
                             [&](int64_t* out) {
                               write_document_ids(packing, ranges, out);
                             }),
            ids)
      << test::listed(ranges);
  for (bool guard : {false, true}) {
    const auto bools = written<bool>(
        ranges, guard, [&](bool* out) { write_pads(packing, ranges, out); });
    ASSERT_EQ(std::vector<char>(bools.begin(), bools.end()), pads)
        << test::listed(ranges);
  }
}

TEST(PerToken, AgreesWithThePackingForEveryRangeOfSmallPackings) {
  test::for_each(test::all_packings(3, 3, {0, 2}), [](const PackingCase& c) {
    const Packing packing = c.packing();
    for (TokenRange range : test::all_ranges(packing.tokens())) {
      ASSERT_NO_FATAL_FAILURE(expect_facts(packing, {range}));
    }
  });
}

/// Ranges in any order, some empty, some twice.
std::vector<TokenRange> draw_ranges(test::Random& random, int64_t tokens) {
  std::vector<TokenRange> ranges;
  for (int64_t n = random.between(0, 9); n > 0; --n) {
    ranges.push_back(test::draw_range(random, tokens));
  }
  if (random.one_in(2)) {
    std::ranges::sort(ranges, {}, &TokenRange::begin);
  }
  return ranges;
}

TEST(PerToken, AgreesWithThePackingForAnyListOfRanges) {
  test::for_all(
      400,
      [](test::Random& random) { return test::draw_packing(random, 24, 12); },
      [](const PackingCase& c) {
        test::Random random(static_cast<uint64_t>(c.tokens()) + 1);
        for (int i = 0; i < 8; ++i) {
          ASSERT_NO_FATAL_FAILURE(
              expect_facts(c.packing(), draw_ranges(random, c.tokens())));
        }
      });
}

TEST(PerToken, AgreesWithThePackingForSharesOfEveryOwnership) {
  test::for_all(
      300,
      [](test::Random& random) {
        return test::draw_ownership(random, test::draw_packing(random, 32, 9));
      },
      [](const test::OwnershipCase& c) {
        const Ownership ownership = c.ownership();
        for (int rank = 0; rank < ownership.ranks(); ++rank) {
          ASSERT_NO_FATAL_FAILURE(
              expect_facts(c.packing.packing(), ownership.ranges_of(rank)));
        }
      });
}

/// Compares the windows of every query of a range with allows(q, k).
template <class Index>
void expect_windows(const Mask& mask, TokenRange range) {
  std::vector<Index> begin, end;
  begin = written<Index>({range}, Index{-7}, [&](Index* begin_out) {
    end = written<Index>({range}, Index{-8}, [&](Index* end_out) {
      write_key_windows(mask, range, begin_out, end_out);
    });
  });
  for (int64_t q = range.begin; q < range.end; ++q) {
    int64_t first = 0, last = 0, count = 0;
    for (int64_t k = 0; k < mask.keys(); ++k) {
      if (!mask.allows(q, k)) continue;
      if (count++ == 0) first = k;
      last = k + 1;
    }
    const auto i = q - range.begin;
    ASSERT_EQ(count, last - first) << "query " << q << " has holes";
    ASSERT_EQ(test::at(begin, i), first) << "query " << q << " of " << range;
    ASSERT_EQ(test::at(end, i), last) << "query " << q << " of " << range;
  }
}

/// Every mask of one range over a packing: causal, full, windows, bands,
/// prefixes, groups, left padding, compressed, and pad queries of both kinds.
std::vector<MaskCase> masks_over(const PackingCase& packing) {
  const int64_t tokens = packing.tokens();
  std::vector<MaskCase> masks{
      {.packing = packing, .kind = MaskKind::causal},
      {.packing = packing, .kind = MaskKind::full},
      {.packing = packing, .kind = MaskKind::sliding, .before = 1},
      {.packing = packing, .kind = MaskKind::banded, .before = 2, .after = 1},
      {.packing = packing, .kind = MaskKind::banded, .before = 0, .after = 2},
      {.packing = packing, .kind = MaskKind::compressed, .ratio = 2},
  };
  MaskCase left = masks[0];
  left.hidden = {{0, tokens / 3}};
  masks.push_back(left);
  MaskCase groups = masks[2];
  groups.groups = {{tokens / 4, tokens / 2}};
  masks.push_back(groups);
  groups.groups = {{tokens / 4, tokens}};
  groups.reach = GroupReach::within_window;
  masks.push_back(groups);
  MaskCase prefix = masks[0];
  for (const auto& document : packing.documents) {
    prefix.prefix.push_back((document.length + 1) / 2);
  }
  masks.push_back(prefix);
  for (std::size_t i = masks.size(); i-- > 0;) {
    masks[i] = masks[i].fitted();
    MaskCase seeing = masks[i];
    seeing.pads = PadQueries::see_document;
    masks.push_back(seeing);
  }
  return masks;
}

TEST(KeyWindows, AgreeWithTheMaskForEveryRangeOfSmallPackings) {
  for (const PackingCase& packing : test::all_packings(2, 3, {0, 2})) {
    test::for_each(masks_over(packing), [](const MaskCase& c) {
      const Mask mask = c.mask();
      if (!mask.is_one_range()) return test::pass_over();
      for (TokenRange range : test::all_ranges(mask.queries())) {
        ASSERT_NO_FATAL_FAILURE(expect_windows<int32_t>(mask, range));
      }
    });
  }
}

TEST(KeyWindows, AgreeWithTheMaskForRandomMasks) {
  std::vector<MaskKind> kinds = test::token_masks();
  kinds.push_back(MaskKind::compressed);
  int windows = 0;
  test::for_all(
      600,
      [&](test::Random& random) {
        return test::draw_mask(random, test::draw_packing(random, 16, 4),
                               kinds);
      },
      [&](const MaskCase& c) {
        const Mask mask = c.mask();
        if (!mask.is_one_range()) return test::pass_over();
        ++windows;
        test::Random random(static_cast<uint64_t>(mask.queries()));
        for (int i = 0; i < 4; ++i) {
          const TokenRange range = test::draw_range(random, mask.queries());
          ASSERT_NO_FATAL_FAILURE(expect_windows<int32_t>(mask, range));
          ASSERT_NO_FATAL_FAILURE(expect_windows<int64_t>(mask, range));
        }
      });
  EXPECT_GT(windows, 300) << "most random masks should be one range";
}

TEST(KeyWindows, ReachBeyondThirtyTwoBits) {
  const int64_t far = int64_t{1} << 31;
  const Mask mask = Mask::causal(Packing::of({far, 3}));
  int64_t begin[3], end[3];
  write_key_windows(mask, {far, far + 3}, begin, end);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(begin[i], far);
    EXPECT_EQ(end[i], far + i + 1);
  }
}

class PerTokenRefusal : public ::testing::TestWithParam<Refusal> {};

TEST_P(PerTokenRefusal, SaysWhatCame) {
  EXPECT_EQ(message_of(GetParam().call), GetParam().message);
}

std::vector<Refusal> refusals() {
  static const Packing packing = Packing::of({3, 2});
  static const Mask torn = Mask::causal(packing).with_hidden({{1, 2}});
  static const Mask wide = Mask::causal(Packing::single(int64_t{1} << 31));
  static int64_t out[8];
  static int32_t narrow[8];
  static bool flags[8];
  return {
      {"RangeBehindTheStream", [] { write_positions(packing, {{2, 6}}, out); },
       "write_positions: tokens [2, 6) of 5"},
      {"RangeBeforeTheStream",
       [] { write_document_ids(packing, {{0, 1}, {-1, 2}}, out); },
       "write_document_ids: tokens [-1, 2) of 5"},
      {"RangeThatEndsBeforeItBegins",
       [] { write_pads(packing, {{3, 2}}, flags); },
       "write_pads: tokens [3, 2) of 5"},
      {"QueriesBehindTheStream",
       [] { write_key_windows(Mask::causal(packing), {0, 6}, out, out); },
       "write_key_windows: tokens [0, 6) of 5"},
      {"TornMask", [] { write_key_windows(torn, {0, 1}, out, out); },
       "write_key_windows: " + torn.why_not_one_range()},
      {"TooManyKeysForTheNarrowForm",
       [] { write_key_windows(wide, {0, 1}, narrow, narrow); },
       "write_key_windows: 2147483648 keys do not fit 32-bit windows; use the "
       "64-bit form"},
  };
}

INSTANTIATE_TEST_SUITE_P(Refused, PerTokenRefusal,
                         ::testing::ValuesIn(refusals()), test::refusal_name);

TEST(PerToken, WritesNothingForARefusedList) {
  int64_t out[3] = {kUnwritten, kUnwritten, kUnwritten};
  EXPECT_NE(message_of([&] {
              write_positions(Packing::single(2), {{0, 2}, {2, 3}}, out);
            }),
            "accepted");
  for (int64_t entry : out) EXPECT_EQ(entry, kUnwritten);
}

}  // namespace
}  // namespace longspan
