#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "longspan/core/mask.h"
#include "longspan/kernels/attention/hopper/work_table.h"
#include "tests/support/masks.h"
#include "tests/support/property.h"

/// Blocks of keys that add to queries they have in common, each in its turn.
namespace longspan::hopper {
namespace {

using test::at;
using test::Random;
using test::SharedMaskCase;

struct TurnCase {
  SharedMaskCase shared;
  int block = 1, tile = 1, processors = 1;
  int64_t seed = 0;

  std::vector<TurnCase> smaller() const {
    std::vector<TurnCase> cases;
    for (const SharedMaskCase& less : shared.smaller()) {
      cases.push_back(*this);
      cases.back().shared = less;
    }
    return cases;
  }
  std::string to_string() const {
    return join(shared.to_string(), "; blocks of ", block, " keys, tiles of ",
                tile, " queries, ", processors, " processors, seed ", seed);
  }
};

std::span<const WorkPart> parts_of(const KeyWorkTable& table,
                                   const WorkBlock& block) {
  return std::span(table.parts)
      .subspan(static_cast<std::size_t>(block.first_part),
               static_cast<std::size_t>(block.parts));
}

/// A block on its way, as the kernel walks it.
class Walk {
 public:
  Walk(const KeyWorkTable& table, int number, int tile)
      : parts_(parts_of(table, at(table.blocks, number))),
        number_(number),
        turn_(at(table.turns, number)),
        size_(tile) {
    begin_part();
  }

  bool done() const { return done_; }

  /// Takes the next tile where that may be; whether it did.
  template <class Add>
  bool step(std::vector<int>& told, const Add& add) {
    const bool hands_on = part_ == parts_.size();
    const int column = hands_on ? turn_.hands_on : tile_;
    if (turn_.before >= 0 && column < turn_.alone_from &&
        at(told, turn_.before) > column) {
      return false;
    }
    if (hands_on) {
      at(told, number_) = column;
      done_ = true;
      return true;
    }
    const WorkPart& part = parts_[part_];
    add(number_, part.row, column, std::min(column + size_, part.last_key));
    const int still =
        part_ + 1 < parts_.size() ? parts_[part_ + 1].last_key : 0;
    at(told, number_) = std::max(column, still);
    tile_ -= size_;
    if (tile_ < part.first_key) {
      ++part_;
      begin_part();
    }
    return true;
  }

 private:
  void begin_part() {
    while (part_ < parts_.size() &&
           parts_[part_].first_key == parts_[part_].last_key) {
      ++part_;
    }
    if (part_ < parts_.size()) {
      const WorkPart& part = parts_[part_];
      const int tiles = (part.last_key - part.first_key + size_ - 1) / size_;
      tile_ = part.first_key + (tiles - 1) * size_;
    } else {
      done_ = turn_.hands_on == WorkTurn::kNever;
    }
  }

  std::span<const WorkPart> parts_;
  int number_;
  WorkTurn turn_;
  int size_;
  std::size_t part_ = 0;
  int tile_ = 0;
  bool done_ = false;
};

/// Whatever the processors do, nobody waits for ever, and each query is added
/// to in the order of the table.
void check_turns(const KeyWorkTable& table, const TurnCase& c) {
  std::mt19937_64 order(static_cast<uint64_t>(c.seed));
  std::vector<int> told(table.blocks.size(), WorkTurn::kNever);
  std::map<std::pair<int, int>, int> last;  // who added to a query
  int next = 0, idle = 0;
  std::vector<std::optional<Walk>> processors(
      static_cast<std::size_t>(c.processors));
  for (;;) {
    bool moved = false, busy = false;
    std::ranges::shuffle(processors, order);
    for (auto& walk : processors) {
      if (walk && walk->done()) walk.reset();
      if (!walk && next < std::ssize(table.blocks)) {
        walk.emplace(table, next++, c.tile);
        moved = true;
      }
      if (!walk || walk->done()) continue;
      busy = true;
      for (auto n = order() % 5; n > 0 && !walk->done(); --n) {
        moved |= walk->step(told, [&](int number, int row, int from, int to) {
          for (int query = from; query < to; ++query) {
            int& before = last.try_emplace({row, query}, -1).first->second;
            ASSERT_LE(before, number) << "query " << query << " of row " << row;
            before = number;
          }
        });
      }
    }
    if (::testing::Test::HasFatalFailure()) return;
    if (!busy && next == std::ssize(table.blocks)) return;
    // In some rounds nobody is asked.
    idle = moved ? 0 : idle + 1;
    ASSERT_LT(idle, 100) << "all wait for one another";
  }
}

void blocks_add_in_turn(const TurnCase& c) {
  const Mask mask = c.shared.mask.mask();
  const Ownership owners = c.shared.owners.ownership();
  for (int rank = 0; rank < owners.ranks(); ++rank) {
    std::vector<KeyLines> lines;
    for (int owner = 0; owner < owners.ranks(); ++owner) {
      for (const KeyLines& line : key_lines(mask, owners.ranges_of(rank),
                                            owners.ranges_of(owner), owner)) {
        lines.push_back(line);
      }
    }
    KeyWorkTable table = key_work_table(lines, {.rows = owners.ranks(),
                                                .queries = owners.tokens(),
                                                .block_queries = c.block,
                                                .tile_keys = c.tile});
    give_turns(table);
    ASSERT_EQ(table.turns.size(), table.blocks.size());
    ASSERT_NO_FATAL_FAILURE(check_turns(table, c)) << "rank " << rank;
  }
}

TEST(WorkTurns, HaveAnOrderAndAnEnd) {
  test::for_all(
      3000,
      [](Random& random) {
        const std::vector sizes{1, 2, 3, 5, 8, 16};
        return TurnCase{test::draw_shared_mask(random, 40), random.pick(sizes),
                        random.pick(sizes),
                        static_cast<int>(random.between(1, 6)),
                        random.between(0, 1 << 20)};
      },
      blocks_add_in_turn);
}

std::vector<KeyLines> causal_documents(const std::vector<int64_t>& lengths) {
  return key_lines(Mask::causal(Packing::of(lengths)),
                   std::vector<TokenRange>{{0, 16}},
                   std::vector<TokenRange>{{0, 16}}, 0);
}

TEST(WorkTurns, OfTwoDocumentsAreWorkedOutByHand) {
  KeyWorkTable table = key_work_table(
      causal_documents({10, 6}),
      {.rows = 1, .queries = 16, .block_queries = 4, .tile_keys = 2});
  give_turns(table);
  // Blocks by tiles: keys [0, 4), [4, 8) and [8, 10) of the first document,
  // which 5, 3 and 1 tiles of queries see; [10, 14), [14, 16) of the other.
  struct Expected {
    int first_key, before, alone_from;
  };
  const std::vector<Expected> expected{
      {0, -1, 0}, {4, 0, 10}, {10, -1, 0}, {8, 1, 10}, {14, 2, 16}};
  ASSERT_EQ(table.blocks.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const WorkPart& part = parts_of(table, table.blocks[i]).front();
    EXPECT_EQ(part.first_query, expected[i].first_key) << i;
    EXPECT_EQ(table.turns[i].before, expected[i].before) << i;
    EXPECT_EQ(table.turns[i].alone_from, expected[i].alone_from) << i;
    EXPECT_EQ(table.turns[i].hands_on, WorkTurn::kNever) << i;
  }
}

}  // namespace
}  // namespace longspan::hopper
