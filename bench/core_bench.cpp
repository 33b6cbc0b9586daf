// Times the index math of long packed streams on one thread and counts the
// memory it holds. Prints one JSON object a line; bench/run.py makes the table.

#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <new>
#include <random>
#include <vector>

#include "longspan/core/mask.h"
#include "longspan/core/ownership.h"
#include "longspan/core/packing.h"
#include "longspan/core/tile.h"

namespace {

std::size_t live_bytes = 0;
std::size_t peak_bytes = 0;

}  // namespace

void* operator new(std::size_t size) {
  void* memory = std::malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  live_bytes += malloc_usable_size(memory);
  peak_bytes = std::max(peak_bytes, live_bytes);
  return memory;
}

void operator delete(void* memory) noexcept {
  live_bytes -= malloc_usable_size(memory);
  std::free(memory);
}

void operator delete(void* memory, std::size_t) noexcept {
  operator delete(memory);
}

namespace {

using namespace longspan;

struct Case {
  const char* name;
  std::function<int64_t()> work;  // returns something to check and to keep
  int64_t expected;               // -1: only has to repeat
};

/// 10,000 lengths that add up to exactly `tokens`.
std::vector<int64_t> document_lengths(int64_t documents, int64_t tokens) {
  std::mt19937_64 random(7);
  std::vector<int64_t> cuts{0, tokens};
  for (int64_t i = 1; i < documents; ++i) {
    cuts.push_back(static_cast<int64_t>(random() % (tokens + 1)));
  }
  std::ranges::sort(cuts);
  std::vector<int64_t> lengths;
  for (std::size_t i = 1; i < cuts.size(); ++i) {
    lengths.push_back(cuts[i] - cuts[i - 1]);
  }
  return lengths;
}

void run(const Case& bench) {
  constexpr int kRounds = 15;
  std::vector<double> times;
  std::size_t memory = 0;
  int64_t answer = bench.work();
  for (int round = 0; round < kRounds; ++round) {
    const std::size_t before = live_bytes;
    peak_bytes = live_bytes;
    const auto start = std::chrono::steady_clock::now();
    const int64_t again = bench.work();
    const std::chrono::duration<double, std::milli> took =
        std::chrono::steady_clock::now() - start;
    if (again != answer) answer = -2;
    times.push_back(took.count());
    memory = std::max(memory, peak_bytes - before);
  }
  std::ranges::sort(times);
  const bool right =
      answer != -2 && (bench.expected < 0 || answer == bench.expected);
  std::printf(
      "{\"name\": \"%s\", \"right\": %s, \"p50_ms\": %.3f, \"p99_ms\": %.3f, "
      "\"peak_mb\": %.2f}\n",
      bench.name, right ? "true" : "false", times[times.size() / 2],
      times.back(), static_cast<double>(memory) / 1e6);
}

}  // namespace

int main() {
  constexpr int64_t kTokens = int64_t{1} << 20;
  constexpr int64_t kDocuments = 10'000;
  constexpr int kRanks = 512;
  const std::vector<int64_t> lengths = document_lengths(kDocuments, kTokens);

  // Every visible pair lies in exactly one tile, so the pairs of all tiles are
  // the pairs of the mask.
  const Mask whole = Mask::causal(Packing::of(lengths));
  const int64_t all_pairs = whole.pairs({0, kTokens}, {0, kTokens});
  int64_t tiled_pairs = 0;
  const Ownership owners = Ownership::head_tail(kTokens, kRanks);
  for (int rank = 0; rank < kRanks; ++rank) {
    for (const OwnedTile& owned : tiles_of(whole, owners, rank)) {
      tiled_pairs += whole.pairs(owned.tile.queries, owned.tile.keys);
    }
  }
  if (tiled_pairs != all_pairs) {
    std::fprintf(stderr, "core_bench: the tiles miss pairs\n");
    return 1;
  }

  run({"head-tail + every ring tile",
       [&] {
         const Mask mask = Mask::causal(Packing::of(lengths));
         const Ownership ring = Ownership::head_tail(kTokens, kRanks);
         int64_t tiles = 0;
         for (int rank = 0; rank < kRanks; ++rank) {
           tiles += std::ssize(tiles_of(mask, ring, rank));
         }
         return tiles;
       },
       -1});
  run({"one rank of per-document head-tail",
       [&] {
         const Packing packing =
             Packing::of(lengths).with_slots_multiple_of(2 * kRanks);
         const Ownership ring =
             Ownership::per_document_head_tail(packing, kRanks);
         int64_t tokens = 0;
         for (TokenRange range : ring.ranges_of(17)) tokens += range.size();
         return tokens == ring.local_tokens(17) ? int64_t{1} : int64_t{0};
       },
       1});
}
