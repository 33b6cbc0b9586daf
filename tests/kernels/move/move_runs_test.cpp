#include "longspan/kernels/move/cpu/move_runs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/property.h"

namespace longspan {
namespace {

using Bytes = std::vector<std::byte>;
using TokenRun = Run;  // inside a test, Run is one of its members

/// What `Bytes` ought to be, token by token and byte by byte.
Bytes moved_slowly(const MoveRunsArgs& args) {
  Bytes target(static_cast<std::size_t>(args.slices * args.target_tokens *
                                        args.token_bytes));
  for (int64_t slice = 0; slice < args.slices; ++slice) {
    for (int64_t token = 0; token < args.target_tokens; ++token) {
      int64_t source = -1;
      for (const Run& run : args.runs) {
        if (run.target <= token && token < run.target + run.length) {
          source = run.source + token - run.target;
        }
      }
      for (int64_t byte = 0; byte < args.token_bytes; ++byte) {
        const int64_t to =
            (slice * args.target_tokens + token) * args.token_bytes + byte;
        const int64_t from =
            (slice * args.source_tokens + source) * args.token_bytes + byte;
        const auto element = byte % std::ssize(args.fill);
        target[static_cast<std::size_t>(to)] =
            source < 0 ? args.fill[static_cast<std::size_t>(element)]
                       : args.source[from];
      }
    }
  }
  return target;
}

/// Bytes that differ from their neighbours at every distance below 251.
Bytes numbered(int64_t count) {
  Bytes bytes(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<std::byte>(i * 37 % 251 + 1);
  }
  return bytes;
}

/// Parts that end in odd places, last part first.
void odd_parts(int64_t items, int64_t /*grain*/,
               const std::function<void(int64_t, int64_t)>& body) {
  std::vector<int64_t> ends{0};
  for (int64_t step = 1; ends.back() < items; step = step * 2 + 1) {
    ends.push_back(std::min(items, ends.back() + step % 7 + 1));
  }
  for (std::size_t i = ends.size() - 1; i > 0; --i) body(ends[i - 1], ends[i]);
}

/// One item at a time.
void single_items(int64_t items, int64_t /*grain*/,
                  const std::function<void(int64_t, int64_t)>& body) {
  for (int64_t i = 0; i < items; ++i) body(i, i + 1);
}

/// Three real threads.
void three_threads(int64_t items, int64_t /*grain*/,
                   const std::function<void(int64_t, int64_t)>& body) {
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < 3; ++t) {
    threads.emplace_back(
        [=, &body] { body(items * t / 3, items * (t + 1) / 3); });
  }
  for (std::thread& thread : threads) thread.join();
}

struct MoveCase {
  std::string name;
  int64_t source_tokens;
  int64_t target_tokens;
  std::vector<Run> runs;  // ascending by target
};

const std::vector<MoveCase>& move_cases() {
  static const std::vector<MoveCase> cases{
      // Usual.
      {.name = "head_tail_of_two",
       .source_tokens = 8,
       .target_tokens = 4,
       .runs = {{0, 0, 2}, {6, 2, 2}}},
      {.name = "documents_moved_apart",
       .source_tokens = 9,
       .target_tokens = 16,
       .runs = {{0, 0, 3}, {3, 4, 1}, {4, 8, 5}}},
      // Ragged.
      {.name = "backwards",
       .source_tokens = 7,
       .target_tokens = 7,
       .runs = {{5, 0, 2}, {2, 2, 3}, {0, 5, 2}}},
      {.name = "gaps_everywhere",
       .source_tokens = 6,
       .target_tokens = 13,
       .runs = {{4, 1, 2}, {0, 5, 3}, {3, 11, 1}}},
      // Corner.
      {.name = "one_token",
       .source_tokens = 1,
       .target_tokens = 1,
       .runs = {{0, 0, 1}}},
      {.name = "nothing_moves",
       .source_tokens = 5,
       .target_tokens = 3,
       .runs = {}},
      {.name = "no_source", .source_tokens = 0, .target_tokens = 4, .runs = {}},
      {.name = "no_target", .source_tokens = 4, .target_tokens = 0, .runs = {}},
  };
  return cases;
}

class MoveRuns : public ::testing::TestWithParam<MoveCase> {};

INSTANTIATE_TEST_SUITE_P(Cases, MoveRuns, ::testing::ValuesIn(move_cases()),
                         [](const auto& info) { return info.param.name; });

/// Moves and compares; bytes before and behind the target must stay.
void expect_moved(const MoveRunsArgs& given, const ParallelFor& parallel_for,
                  const char* split) {
  const Bytes expected = moved_slowly(given);
  constexpr auto kGuard = std::byte{0xa5};
  constexpr std::ptrdiff_t kGuards = 64;
  Bytes memory(expected.size() + 2 * kGuards, kGuard);
  MoveRunsArgs args = given;
  args.target = memory.data() + kGuards;
  move_runs(args, parallel_for);
  const Bytes written(memory.begin() + kGuards, memory.end() - kGuards);
  EXPECT_EQ(written, expected) << split;
  const auto kept = [&](auto begin, auto end) {
    return std::all_of(begin, end, [&](std::byte b) { return b == kGuard; });
  };
  EXPECT_TRUE(kept(memory.begin(), memory.begin() + kGuards)) << split;
  EXPECT_TRUE(kept(memory.end() - kGuards, memory.end())) << split;
}

TEST_P(MoveRuns, GivesTheSameBytesForEveryElementFillPartAndThread) {
  const MoveCase& c = GetParam();
  const Bytes odd_fill = numbered(16);
  const Bytes zero_fill(16, std::byte{0});
  for (int64_t element : {1, 2, 4, 8, 16}) {
    for (int64_t elements : {1, 3, 40}) {
      for (int64_t slices : {0, 1, 3}) {
        const int64_t token_bytes = element * elements;
        const Bytes source = numbered(slices * c.source_tokens * token_bytes);
        for (const Bytes* fill : {&odd_fill, &zero_fill}) {
          const MoveRunsArgs args{
              .source = source.data(),
              .target = nullptr,
              .slices = slices,
              .source_tokens = c.source_tokens,
              .target_tokens = c.target_tokens,
              .token_bytes = token_bytes,
              .runs = c.runs,
              .fill = std::span(*fill).first(static_cast<std::size_t>(element)),
          };
          SCOPED_TRACE(::testing::Message()
                       << element << " byte elements, " << elements
                       << " in a token, " << slices << " slices");
          expect_moved(args, serial_for, "one part");
          expect_moved(args, single_items, "single items");
          expect_moved(args, odd_parts, "odd parts");
          expect_moved(args, three_threads, "threads");
        }
      }
    }
  }
}

TEST(MoveRunsAlone, LeavesEverythingAloneWhereTokensHaveNoBytes) {
  const std::vector<TokenRun> runs{{0, 0, 2}};
  move_runs({.source = nullptr,
             .target = nullptr,
             .slices = 2,
             .source_tokens = 2,
             .target_tokens = 4,
             .token_bytes = 0,
             .runs = runs,
             .fill = {}},
            [](auto...) { FAIL() << "there is nothing to do"; });
}

TEST(MoveRunsAlone, AsksForPartsThatAreWorthAThread) {
  const Bytes source = numbered(8 * 1024);
  Bytes target(8 * 1024);
  const std::vector<TokenRun> runs{{0, 0, 8}};
  move_runs({.source = source.data(),
             .target = target.data(),
             .slices = 1,
             .source_tokens = 8,
             .target_tokens = 8,
             .token_bytes = 1024,
             .runs = runs,
             .fill = std::span(source).first(1)},
            [](int64_t items, int64_t grain, const auto& body) {
              EXPECT_EQ(items, 8);
              EXPECT_EQ(grain * 1024, 1 << 20);
              body(0, items);
            });
  EXPECT_EQ(source, target);
}

/// Random moves: runs of random lengths, a shuffled source order, gaps.
TEST(MoveRunsAlone, MovesRandomRunsInRandomParts) {
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE(seed);
    test::Random random(seed);
    std::vector<TokenRun> runs;
    std::vector<TokenRun*> order;
    int64_t target = 0, source = 0;
    for (int64_t n = random.between(0, 12); n > 0; --n) {
      target += random.one_in(2) ? 0 : random.between(1, 5);
      const int64_t length = random.between(1, 9);
      runs.push_back({0, target, length});
      target += length;
    }
    for (TokenRun& run : runs) order.push_back(&run);
    random.shuffle(order);
    for (TokenRun* run : order) {
      source += random.one_in(3) ? random.between(1, 4) : 0;
      run->source = source;
      source += run->length;
    }
    const int64_t element = random.pick<int64_t>({1, 2, 4, 8, 16});
    const int64_t token_bytes = element * random.between(1, 20);
    const int64_t source_tokens = source + random.between(0, 3);
    const int64_t slices = random.between(1, 4);
    const Bytes bytes = numbered(slices * source_tokens * token_bytes);
    const Bytes fill = numbered(element);
    const MoveRunsArgs args{.source = bytes.data(),
                            .target = nullptr,
                            .slices = slices,
                            .source_tokens = source_tokens,
                            .target_tokens = target + random.between(0, 3),
                            .token_bytes = token_bytes,
                            .runs = runs,
                            .fill = fill};
    expect_moved(
        args,
        [&](int64_t items, int64_t, const auto& body) {
          for (int64_t begin = 0; begin < items;) {
            const int64_t end = std::min(items, begin + random.between(1, 9));
            body(begin, end);
            begin = end;
          }
        },
        "random parts");
  }
}

}  // namespace
}  // namespace longspan
