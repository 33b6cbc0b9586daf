#include "longspan/core/moves.h"

#include <gtest/gtest.h>

#include <limits>

#include "tests/support/property.h"
#include "tests/support/values.h"

namespace longspan {
namespace {

using test::at;
using test::message_of;
using test::Random;
using test::Refusal;

constexpr int64_t kNone = -1;

/// A move token by token: target token t comes from source_of[t], or from
/// nowhere.
struct MovesCase {
  int64_t source_tokens = 0;
  std::vector<int64_t> source_of;

  int64_t target_tokens() const { return std::ssize(source_of); }

  /// From single tokens, last one first: order and joins are up to Moves.
  Moves moves() const {
    std::vector<Run> runs;
    for (int64_t t = target_tokens(); t-- > 0;) {
      if (at(source_of, t) != kNone) runs.push_back({at(source_of, t), t, 1});
    }
    return Moves::of(runs, source_tokens, target_tokens());
  }

  std::vector<MovesCase> smaller() const {
    std::vector<MovesCase> cases;
    for (std::size_t t = 0; t < source_of.size(); ++t) {
      if (source_of[t] == kNone) continue;
      cases.push_back(*this);
      cases.back().source_of[t] = kNone;
    }
    return cases;
  }
  std::string to_string() const {
    return join(source_tokens, " tokens to ", test::listed(source_of));
  }
};

struct TwoMovesCase {
  MovesCase first, second;

  std::vector<TwoMovesCase> smaller() const {
    std::vector<TwoMovesCase> cases;
    for (const auto& less : first.smaller()) cases.push_back({less, second});
    for (const auto& less : second.smaller()) cases.push_back({first, less});
    return cases;
  }
  std::string to_string() const {
    return first.to_string() + ", then " + second.to_string();
  }
};

std::vector<int64_t> source_of(const Moves& moves) {
  std::vector<int64_t> from(static_cast<std::size_t>(moves.target_tokens()),
                            kNone);
  for (const Run& run : moves.runs()) {
    for (int64_t i = 0; i < run.length; ++i) {
      at(from, run.target + i) = run.source + i;
    }
  }
  return from;
}

/// Every way to move `sources` tokens to `targets` places.
std::vector<MovesCase> all_moves(int64_t sources, int64_t targets) {
  std::vector<MovesCase> cases{{sources, {}}};
  for (int64_t t = 0; t < targets; ++t) {
    std::vector<MovesCase> longer;
    for (const MovesCase& c : cases) {
      for (int64_t s = kNone; s < sources; ++s) {
        if (s != kNone &&
            std::ranges::find(c.source_of, s) != c.source_of.end())
          continue;
        longer.push_back(c);
        longer.back().source_of.push_back(s);
      }
    }
    cases = std::move(longer);
  }
  return cases;
}

/// Blocks of tokens in any order, some dropped, with gaps between.
MovesCase draw_moves(Random& random, int64_t sources) {
  std::vector<TokenRange> blocks;
  for (int64_t begin = 0; begin < sources;) {
    const int64_t end = std::min(sources, begin + random.between(1, 9));
    if (!random.one_in(4)) blocks.push_back({begin, end});
    begin = end;
  }
  if (!random.one_in(3)) random.shuffle(blocks);
  MovesCase drawn{sources, {}};
  for (TokenRange block : blocks) {
    if (random.one_in(4)) {
      drawn.source_of.resize(drawn.source_of.size() + 2, kNone);
    }
    for (int64_t s = block.begin; s < block.end; ++s) {
      drawn.source_of.push_back(s);
    }
  }
  if (random.one_in(3)) drawn.source_of.push_back(kNone);
  return drawn;
}

MovesCase draw(Random& random) {
  return draw_moves(random, random.between(0, 64));
}

TwoMovesCase draw_two(Random& random) {
  const MovesCase first = draw(random);
  return {first, draw_moves(random, first.target_tokens())};
}

void moves_keep_their_promises(const MovesCase& c) {
  const Moves moves = c.moves();
  ASSERT_EQ(moves.source_tokens(), c.source_tokens);
  ASSERT_EQ(moves.target_tokens(), c.target_tokens());
  ASSERT_EQ(source_of(moves), c.source_of);
  std::vector<int64_t> gaps;
  for (int64_t t = 0; t < c.target_tokens(); ++t) {
    if (at(c.source_of, t) == kNone) gaps.push_back(t);
  }
  ASSERT_EQ(moves.gaps(), test::runs_in(gaps));
  ASSERT_EQ(moves.moved_tokens(), c.target_tokens() - std::ssize(gaps));
  for (std::size_t i = 0; i < moves.runs().size(); ++i) {
    const Run& run = moves.runs()[i];
    ASSERT_GT(run.length, 0);
    if (i == 0) continue;
    const Run& last = moves.runs()[i - 1];
    ASSERT_LE(last.target + last.length, run.target);
    ASSERT_FALSE(last.target + last.length == run.target &&
                 last.source + last.length == run.source)
        << "runs that continue each other are joined";
  }
  bool stays = c.source_tokens == c.target_tokens();
  for (int64_t t = 0; t < c.target_tokens(); ++t) {
    stays = stays && at(c.source_of, t) == t;
  }
  ASSERT_EQ(moves.is_identity(), stays);
  ASSERT_EQ(moves == Moves::identity(c.source_tokens), stays);
}

TEST(Moves, KeepTheirPromisesOnEverySmallMap) {
  for (int64_t sources = 0; sources <= 4; ++sources) {
    for (int64_t targets = 0; targets <= 4; ++targets) {
      test::for_each(all_moves(sources, targets), moves_keep_their_promises);
    }
  }
}

TEST(Moves, KeepTheirPromisesOnRandomMaps) {
  test::for_all(500, draw, moves_keep_their_promises);
}

void inverse_goes_back(const MovesCase& c) {
  const Moves moves = c.moves();
  const Moves back = moves.inverse();
  std::vector<int64_t> expected(static_cast<std::size_t>(c.source_tokens),
                                kNone);
  for (int64_t t = 0; t < c.target_tokens(); ++t) {
    if (at(c.source_of, t) != kNone) at(expected, at(c.source_of, t)) = t;
  }
  ASSERT_EQ(back.source_tokens(), c.target_tokens());
  ASSERT_EQ(back.target_tokens(), c.source_tokens);
  ASSERT_EQ(source_of(back), expected);
  ASSERT_EQ(back.inverse(), moves);
  // There and back, every token that moved is where it was.
  const Moves there_and_back = moves.then(back);
  for (const Run& run : there_and_back.runs()) {
    ASSERT_EQ(run.source, run.target);
  }
  ASSERT_EQ(there_and_back.moved_tokens(), moves.moved_tokens());
}

TEST(Moves, InverseGoesBack) {
  for (int64_t sources = 0; sources <= 4; ++sources) {
    for (int64_t targets = 0; targets <= 4; ++targets) {
      test::for_each(all_moves(sources, targets), inverse_goes_back);
    }
  }
  test::for_all(500, draw, inverse_goes_back);
}

void then_is_composition(const TwoMovesCase& c) {
  const Moves both = c.first.moves().then(c.second.moves());
  MovesCase expected{c.first.source_tokens, {}};
  for (int64_t middle : c.second.source_of) {
    expected.source_of.push_back(
        middle == kNone ? kNone : at(c.first.source_of, middle));
  }
  ASSERT_EQ(source_of(both), expected.source_of);
  ASSERT_EQ(both, expected.moves());
}

TEST(Moves, ThenIsCompositionOfEverySmallMap) {
  for (int64_t a = 0; a <= 3; ++a) {
    for (int64_t b = 0; b <= 3; ++b) {
      std::vector<TwoMovesCase> cases;
      for (const MovesCase& first : all_moves(a, b)) {
        for (const MovesCase& second : all_moves(b, 3)) {
          cases.push_back({first, second});
        }
      }
      test::for_each(cases, then_is_composition);
    }
  }
}

TEST(Moves, ThenIsCompositionOfRandomMaps) {
  test::for_all(500, draw_two, then_is_composition);
}

TEST(Moves, IdentityMovesNothing) {
  for (int64_t tokens = 0; tokens <= 64; ++tokens) {
    const Moves moves = Moves::identity(tokens);
    EXPECT_TRUE(moves.is_identity());
    EXPECT_EQ(moves.moved_tokens(), tokens);
    EXPECT_EQ(moves.inverse(), moves);
    EXPECT_EQ(moves.then(moves), moves);
  }
  EXPECT_EQ(Moves(), Moves::identity(0));
}

TEST(Moves, GatherLaysRangesOneAfterAnother) {
  const Moves moves = Moves::gather({{5, 7}, {3, 3}, {0, 2}, {2, 3}}, 8);
  EXPECT_EQ(moves.runs(), (std::vector<longspan::Run>{{5, 0, 2}, {0, 2, 3}}));
  EXPECT_EQ(moves.source_tokens(), 8);
  EXPECT_EQ(moves.target_tokens(), 5);
  EXPECT_TRUE(moves.gaps().empty());
}

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

const std::vector<Refusal> kRefused{
    {"SourceTwice", [] { Moves::of({{0, 0, 3}, {2, 5, 2}}, 8, 8); },
     "Moves: source token 2 moves twice"},
    {"TargetTwice", [] { Moves::of({{0, 4, 3}, {4, 2, 3}}, 8, 8); },
     "Moves: target token 4 is written twice"},
    {"SourceTooShort", [] { Moves::of({{6, 0, 3}}, 8, 8); },
     "Moves: 3 tokens from 6 to 0 do not fit 8 source and 8 target tokens"},
    {"TargetTooShort", [] { Moves::of({{0, 6, 3}}, 8, 8); },
     "Moves: 3 tokens from 0 to 6 do not fit 8 source and 8 target tokens"},
    {"NegativeLength", [] { Moves::of({{4, 4, -1}}, 8, 8); },
     "Moves: -1 tokens from 4 to 4 do not fit 8 source and 8 target tokens"},
    {"NegativeSource", [] { Moves::of({{-1, 0, 1}}, 8, 8); },
     "Moves: 1 tokens from -1 to 0 do not fit 8 source and 8 target tokens"},
    {"NegativeTarget", [] { Moves::of({{0, -1, 1}}, 8, 8); },
     "Moves: 1 tokens from 0 to -1 do not fit 8 source and 8 target tokens"},
    {"HugeLength", [] { Moves::of({{1, 1, kMost}}, 8, 8); },
     "Moves: 9223372036854775807 tokens from 1 to 1 do not fit 8 source and 8 "
     "target tokens"},
    {"NegativeStream", [] { Moves::of({}, -1, 4); },
     "Moves: streams of -1 and 4 tokens; neither may be negative"},
    {"NegativeIdentity", [] { Moves::identity(-2); },
     "Moves: streams of -2 and -2 tokens; neither may be negative"},
    {"GatherTwice", [] { Moves::gather({{0, 3}, {2, 4}}, 8); },
     "Moves: source token 2 moves twice"},
    {"ThenOfAnotherStream", [] { Moves::identity(4).then(Moves::identity(5)); },
     "Moves: 4 tokens arrive but the next move takes 5"},
};

class MovesRefuses : public ::testing::TestWithParam<Refusal> {};

TEST_P(MovesRefuses, ByMessage) {
  EXPECT_EQ(message_of(GetParam().call), GetParam().message);
}

INSTANTIATE_TEST_SUITE_P(, MovesRefuses, ::testing::ValuesIn(kRefused),
                         test::refusal_name);

}  // namespace
}  // namespace longspan
