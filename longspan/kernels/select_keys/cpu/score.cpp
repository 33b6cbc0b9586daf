#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "longspan/kernels/common/cpu/jobs.h"
#include "longspan/kernels/select_keys/cpu/rows.h"
#include "longspan/kernels/select_keys/cpu/steps.h"

namespace longspan {

namespace {

/// Listed keys that exist, and their slots: up to kScoredKeys.
struct ListedKeys {
  int32_t keys[kScoredKeys];
  int64_t slots[kScoredKeys];
  int count = 0;
};

/// Parts of the queries, and as many groups of keys: independent of the number
/// of threads. A power of two.
constexpr int64_t kMostParts = 16;
/// Keys of a group lie side by side in slices of 64.
constexpr int kSliceBits = 6;

int64_t parts_of(const ScoreSelectedBackwardArgs& args) {
  const int64_t useful =
      std::min({args.queries, args.keys >> kSliceBits, args.slots / 4});
  int64_t parts = 1;
  while (parts < kMostParts && 2 * parts <= useful) parts *= 2;
  return parts;
}

/// Visits the slots of a list whose key exists and is wanted, as many at a time
/// as are scored together.
template <class Wanted, class Visit>
void each_part_of_list(const int32_t* list, int64_t slots, int64_t keys,
                       const Wanted& wanted, const Visit& visit) {
  ListedKeys found;
  for (int64_t slot = 0; slot < slots; ++slot) {
    const int32_t key = list[slot];
    if (key < 0 || key >= keys || !wanted(key)) continue;
    found.keys[found.count] = key;
    found.slots[found.count++] = slot;
    if (found.count < kScoredKeys) continue;
    visit(found);
    found.count = 0;
  }
  if (found.count > 0) visit(found);
}

void clear_gradients(const ScoreSelectedBackwardArgs& args, int64_t row,
                     int64_t query, int64_t bytes) {
  for (int64_t head = 0; head < args.heads; ++head) {
    std::memset(place_of(args.dq, row, query, bytes, head), 0,
                static_cast<std::size_t>(args.head_dim * bytes));
    std::memset(place_of(args.dweights, row, query, bytes, head), 0,
                static_cast<std::size_t>(bytes));
  }
}

/// What part `part` of the queries has to do with one group of keys.
void run_round(const KeyScoreSteps& steps,
               const ScoreSelectedBackwardArgs& args, int64_t row, int64_t part,
               int64_t round, int64_t parts) {
  const int64_t bytes = accumulator_bytes(args.type);
  const int64_t group = (part + round) % parts;
  const AlignedBytes scratch(steps.scratch_bytes(args, 1));
  const AlignedBytes backward_scratch(steps.backward_bytes(args));
  const AlignedBytes dscores(kScoredKeys * bytes);
  for (int64_t query = part; query < args.queries; query += parts) {
    if (round == 0) clear_gradients(args, row, query, bytes);
    const ScoredQueries packed{.row = row, .first = query, .count = 1};
    const char* const changes = place_of(args.dscores, row, query, bytes);
    bool started = false;
    each_part_of_list(
        place_of(args.indices, row, query), args.slots, args.keys,
        [&](int32_t key) { return (key >> kSliceBits & (parts - 1)) == group; },
        [&](const ListedKeys& found) {
          if (!started) steps.pack_queries(args, packed, scratch.data());
          started = true;
          for (int i = 0; i < found.count; ++i) {
            std::memcpy(dscores.data() + i * bytes,
                        changes + found.slots[i] * bytes,
                        static_cast<std::size_t>(bytes));
          }
          steps.backward(args, packed, found.keys, found.count, dscores.data(),
                         scratch.data(), backward_scratch.data());
        });
  }
}

template <class T>
void fill_empty(char* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    constexpr T kEmpty = -std::numeric_limits<T>::infinity();
    std::memcpy(to + i * static_cast<int64_t>(sizeof(T)), &kEmpty, sizeof(T));
  }
}

}  // namespace

void run_score(const KeyScoreSteps& steps, const ScoreSelectedArgs& args,
               const ParallelFor& parallel_for) {
  if (args.slots == 0) return;
  const int64_t bytes = accumulator_bytes(args.type);
  parallel_for(args.rows * args.queries, 1, [&](int64_t begin, int64_t end) {
    const AlignedBytes scratch(steps.scratch_bytes(args, 1));
    const AlignedBytes scores(kScoredKeys * bytes);
    steps.start();
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / args.queries;
      const int64_t token = from_both_ends(i % args.queries, args.queries);
      const ScoredQueries query{.row = row, .first = token, .count = 1};
      char* const to = place_of(args.scores, row, token, bytes);
      if (bytes == 8) {
        fill_empty<double>(to, args.slots);
      } else {
        fill_empty<float>(to, args.slots);
      }
      bool started = false;
      each_part_of_list(
          place_of(args.indices, row, token), args.slots, args.keys,
          [](int32_t) { return true; },
          [&](const ListedKeys& found) {
            if (!started) steps.pack_queries(args, query, scratch.data());
            started = true;
            steps.pack_keys(args, row, found.keys, found.count, scratch.data());
            steps.score(args, query, 0, 1, found.count, scratch.data(),
                        scores.data());
            for (int j = 0; j < found.count; ++j) {
              std::memcpy(to + found.slots[j] * bytes,
                          scores.data() + j * bytes,
                          static_cast<std::size_t>(bytes));
            }
          });
    }
    steps.finish();
  });
}

/// In round r part p of the queries meets group (p + r) mod P of the keys: no
/// two parts of a round add to the same key, and every sum has one order.
void run_score_backward(const KeyScoreSteps& steps,
                        const ScoreSelectedBackwardArgs& args,
                        const ParallelFor& parallel_for) {
  if (args.queries == 0) return;
  const int64_t parts = parts_of(args);
  for (int64_t round = 0; round < parts; ++round) {
    parallel_for(args.rows * parts, 1, [&](int64_t begin, int64_t end) {
      steps.start();
      for (int64_t i = begin; i < end; ++i) {
        run_round(steps, args, i / parts, i % parts, round, parts);
      }
      steps.finish();
    });
  }
}

}  // namespace longspan
