#include "longspan/comm/detail/call_history.h"

#include <gtest/gtest.h>

#include "longspan/comm/detail/watch.h"
#include "tests/support/property.h"

namespace longspan {
namespace {

using test::Random;
using Histories = std::vector<std::optional<CallHistory>>;

CallHistory history_of(const std::vector<std::string>& texts) {
  CallHistory history;
  for (const std::string& text : texts) history.begin(text);
  return history;
}

TEST(CallHistory, HashesAreEqualExactlyWhereAllCallsBeforeAre) {
  Random random(7);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<std::string> here, there;
    for (int64_t call = random.between(1, 50); call > 0; --call) {
      here.push_back(
          std::string(1, static_cast<char>('a' + random.between(0, 2))));
      there.push_back(here.back());
    }
    const auto odd =
        static_cast<std::size_t>(random.between(0, std::ssize(here)));
    if (odd < there.size()) there[odd] += "'";
    const CallHistory a = history_of(here), b = history_of(there);
    for (int64_t call = a.first_kept(); call <= a.calls(); ++call) {
      EXPECT_EQ(a.call(call)->after == b.call(call)->after,
                call <= static_cast<int64_t>(odd));
    }
  }
}

TEST(CallHistory, KeepsTheLastCallsAndTheirNumbers) {
  CallHistory history;
  for (int call = 1; call <= 100; ++call) history.begin(std::to_string(call));
  EXPECT_EQ(history.calls(), 100);
  EXPECT_EQ(history.call(100)->text, "100");
  EXPECT_EQ(history.call(history.first_kept())->text,
            std::to_string(history.first_kept()));
  EXPECT_EQ(history.call(history.first_kept() - 1), nullptr);
  EXPECT_EQ(history.call(101), nullptr);
}

TEST(CallHistory, ARaiseCountsWhateverItsErrorSays) {
  CallHistory a = history_of({"x", "y"}), b = history_of({"x", "z"});
  a.raise("one error", true);
  b.raise("another", true);
  EXPECT_EQ(a.hash(), b.hash());
  EXPECT_EQ(a.calls(), 2);
  a.raise("outside of calls", false);
  EXPECT_EQ(a.calls(), 3);
  EXPECT_NE(a.hash(), b.hash());
  // Also where the call before is no longer kept.
  CallHistory c, d;
  for (int call = 0; call < 40; ++call) {
    c.begin("same");
    d.begin(call == 39 ? "other" : "same");
  }
  c.raise("", true);
  d.raise("", true);
  EXPECT_EQ(c.hash(), d.hash());
}

TEST(CallHistory, IsReadAsItWasWritten) {
  CallHistory history = history_of({"", "a:b", "3:x\n", "; "});
  history.raise("5:", true);
  history.lose(3, "why: 7:");
  const auto read = CallHistory::decode(history.encode());
  ASSERT_TRUE(read);
  EXPECT_EQ(read->encode(), history.encode());
  EXPECT_EQ(read->hash(), history.hash());
  EXPECT_EQ(read->lost(), 3);
  EXPECT_EQ(read->call(4)->text, "5:");
  EXPECT_TRUE(read->call(4)->raised);
}

TEST(CallHistory, TakesNoOtherText) {
  const std::string whole = history_of({"a", "b"}).encode();
  for (std::size_t size = 0; size < whole.size(); ++size) {
    const auto read = CallHistory::decode(whole.substr(0, size));
    if (read) {
      EXPECT_LT(read->encode().size(), whole.size());
    }
  }
  Random random(3);
  for (int trial = 0; trial < 2000; ++trial) {
    std::string text = whole;
    text[static_cast<std::size_t>(random.between(0, std::ssize(text) - 1))] =
        static_cast<char>(random.between(0, 255));
    CallHistory::decode(text);  // whatever it says, it ends
  }
}

TEST(SeenTexts, AreNewOnceAndDoNotGrowWithoutEnd) {
  SeenTexts seen;
  EXPECT_TRUE(seen.add("a; 1"));
  EXPECT_TRUE(seen.add("b; 1"));
  EXPECT_FALSE(seen.add("a; 1"));
  std::size_t largest = 0;
  for (std::size_t length = 0; length < 3 * SeenTexts::kMost; ++length) {
    EXPECT_TRUE(seen.add(std::to_string(length)));
    EXPECT_FALSE(seen.add(std::to_string(length)));
    largest = std::max(largest, seen.size());
  }
  EXPECT_LE(largest, SeenTexts::kMost);
}

TEST(Compare, SaysNothingWhereOneIsOnlyAhead) {
  EXPECT_FALSE(compare(0, history_of({"a", "b"}), true,
                       {std::nullopt, history_of({"a"})}));
  EXPECT_FALSE(compare(0, history_of({"a"}), true,
                       {std::nullopt, history_of({"a", "b", "c"})}));
  EXPECT_FALSE(
      compare(0, history_of({"a"}), true, {std::nullopt, std::nullopt}));
}

TEST(Compare, NamesTheFirstDifferenceAndOnlyTheFactsThatDiffer) {
  const auto found = compare(
      2, history_of({"a", "attend; ring; q 1; scale 2", "c"}), true,
      {history_of({"a", "attend; ring; q 1; scale 2"}),
       history_of({"a", "attend; ring; q 5; scale 2", "c"}), std::nullopt});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->call, 2);
  EXPECT_FALSE(found->is_common_end);
  EXPECT_EQ(found->text,
            "the ranks of the group do different things in call 2: ranks 0 and "
            "2: attend, q 1; rank 1: attend, q 5");
}

TEST(Compare, AllMayGoOnWhereAnotherRaisedInTheCallUnderWay) {
  CallHistory raised = history_of({"a", "b"});
  raised.raise("bad batch", true);
  const CallHistory mine = history_of({"a", "b; x"});
  const auto found = compare(0, mine, true, {std::nullopt, raised});
  ASSERT_TRUE(found);
  EXPECT_TRUE(found->is_common_end);
  EXPECT_EQ(found->text,
            "in call 2 (b) another rank raised: rank 1: bad batch");
  // Not where this rank has finished that call.
  EXPECT_FALSE(compare(0, mine, false, {std::nullopt, raised})->is_common_end);
  EXPECT_FALSE(
      compare(0, history_of({"a", "b; x", "c"}), true, {std::nullopt, raised})
          ->is_common_end);
}

TEST(Compare, WaitsForRanksThatMayYetRaiseToo) {
  CallHistory mine = history_of({"a", "b"});
  mine.raise("bad batch", true);
  EXPECT_FALSE(compare(0, mine, false, {std::nullopt, history_of({"a", "b"})}));
  EXPECT_TRUE(
      compare(0, mine, false, {std::nullopt, history_of({"a", "b", "c"})}));
  CallHistory theirs = history_of({"a", "c"});
  theirs.raise("as well", true);
  EXPECT_FALSE(compare(0, mine, false, {std::nullopt, theirs}));
}

TEST(ProcessMark, ThisProcessIsNotGoneAndAnEndedOneIs) {
  const ProcessMark mine = ProcessMark::mine();
  EXPECT_FALSE(mine.is_gone());
  const auto read = ProcessMark::decode(mine.encode());
  ASSERT_TRUE(read);
  EXPECT_EQ(read->encode(), mine.encode());
  ProcessMark other = mine;
  other.started += 1;  // its number was used again
  EXPECT_TRUE(other.is_gone());
  other = mine;
  other.pid = int64_t{1} << 30;
  EXPECT_TRUE(other.is_gone());
  other.machine = "elsewhere";
  EXPECT_FALSE(other.is_gone());
  EXPECT_FALSE(ProcessMark::decode("not a mark"));
}

}  // namespace
}  // namespace longspan
