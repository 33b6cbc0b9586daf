#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "longspan/kernels/common/cpu/jobs.h"
#include "longspan/kernels/select_keys/cpu/candidates.h"
#include "longspan/kernels/select_keys/cpu/rows.h"
#include "longspan/kernels/select_keys/cpu/steps.h"

namespace longspan {

namespace {

/// Queries of a block share the packing of keys. Their candidates and packed
/// rows stay in the second cache, and there are jobs for several threads.
constexpr int64_t kBlockBytes = 1280 << 10;
constexpr int64_t kMostQueries = 64;
constexpr int64_t kWantedBlocks = 32, kNeededBlocks = 8;

int queries_of_block(const SelectKeysArgs& args, const KeyScoreSteps& steps) {
  const int64_t each =
      steps.scratch_bytes(args, 2) - steps.scratch_bytes(args, 1) +
      CandidateRoom::bytes_of(args.slots, accumulator_bytes(args.type));
  int64_t queries = std::clamp<int64_t>(kBlockBytes / each, 1, kMostQueries);
  const int64_t all = args.rows * args.queries;
  while ((queries > 4 && all / queries < kWantedBlocks) ||
         (queries > 1 && all / queries < kNeededBlocks)) {
    queries /= 2;
  }
  return static_cast<int>(queries);
}

/// One thread's walk over blocks of queries.
class Selector {
 public:
  Selector(const KeyScoreSteps& score, const TopKeySteps& top,
           const SelectKeysArgs& args, int queries)
      : score_(score),
        top_(top),
        args_(args),
        bytes_(accumulator_bytes(args.type)),
        room_(args.slots, bytes_, queries),
        scratch_(score.scratch_bytes(args, queries)),
        scores_(queries * kScoredKeys * bytes_),
        windows_(static_cast<std::size_t>(queries)),
        candidates_(static_cast<std::size_t>(queries)) {}

  void select(const ScoredQueries& queries) {
    look(queries);
    bool packed = false;
    for (int64_t key = 0; find_next(key);) {
      if (!packed) score_.pack_queries(args_, queries, scratch_.data());
      packed = true;
      add_keys(queries, key, std::min(key + kScoredKeys, last_));
      key += kScoredKeys;
    }
    for (int i = 0; i < queries.count; ++i) write(queries, i);
  }

 private:
  /// What each query sees. Those whose every key fits a slot need no scores,
  /// unless somebody wants them.
  void look(const ScoredQueries& queries) {
    windows_.resize(static_cast<std::size_t>(queries.count));
    for (int i = 0; i < queries.count; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const int64_t token = queries.first + i;
      windows_[at] =
          window_of(*place_of(args_.start, queries.row, token),
                    *place_of(args_.end, queries.row, token), args_.keys);
      candidates_[at] = room_.of(i);
      const bool all = windows_[at].size() <= args_.slots;
      if (!all || args_.scores.data != nullptr) continue;
      for (int64_t key = windows_[at].begin; key < windows_[at].end; ++key) {
        candidates_[at].keys[candidates_[at].size++] =
            static_cast<int32_t>(key);
      }
      windows_[at] = {0, 0};
    }
  }

  /// The first key at or behind `key` that somebody needs a score of, and the
  /// end of all such keys.
  bool find_next(int64_t& key) {
    int64_t next = std::numeric_limits<int64_t>::max();
    last_ = 0;
    for (const TokenRange window : windows_) {
      if (window.end <= key) continue;
      next = std::min(next, std::max(window.begin, key));
      last_ = std::max(last_, window.end);
    }
    key = next;
    return last_ > 0;
  }

  void add_keys(const ScoredQueries& queries, int64_t begin, int64_t end) {
    const TokenRange keys{begin, end};
    int first = queries.count, last = 0;
    for (int i = 0; i < queries.count; ++i) {
      if (seen(i, keys).empty()) continue;
      first = std::min(first, i);
      last = i + 1;
    }
    int32_t list[kScoredKeys];
    std::iota(list, list + kScoredKeys, static_cast<int32_t>(begin));
    score_.pack_keys(args_, queries.row, list, static_cast<int>(end - begin),
                     scratch_.data());
    score_.score(args_, queries, first, last, static_cast<int>(end - begin),
                 scratch_.data(), scores_.data());
    for (int i = first; i < last; ++i) {
      const TokenRange range = seen(i, keys);
      if (range.empty()) continue;
      room_.offer(
          top_,
          scores_.data() + (i * kScoredKeys + range.begin - begin) * bytes_,
          range.size(), range.begin, candidates_[static_cast<std::size_t>(i)]);
    }
  }

  TokenRange seen(int query, TokenRange keys) const {
    return intersect(windows_[static_cast<std::size_t>(query)], keys);
  }

  void write(const ScoredQueries& queries, int i) {
    Candidates& best = candidates_[static_cast<std::size_t>(i)];
    room_.finish(top_, best);
    const int64_t token = queries.first + i;
    int32_t* const indices = place_of(args_.indices, queries.row, token);
    std::fill(std::copy_n(best.keys, best.size, indices), indices + args_.slots,
              -1);
    if (args_.scores.data == nullptr) return;
    char* const scores = place_of(args_.scores, queries.row, token, bytes_);
    if (bytes_ == 8) {
      write_scores<double, int64_t>(best, scores);
    } else {
      write_scores<float, int32_t>(best, scores);
    }
  }

  /// Scores are made of their orders again.
  template <class T, class Order>
  void write_scores(const Candidates& best, char* to) const {
    constexpr int kSign = 8 * sizeof(T) - 1;
    const auto* const orders = static_cast<const Order*>(best.orders);
    for (int64_t i = 0; i < args_.slots; ++i) {
      T score = -std::numeric_limits<T>::infinity();
      if (i < best.size) {
        const Order bits = orders[i] ^ ((orders[i] >> kSign) &
                                        std::numeric_limits<Order>::max());
        std::memcpy(&score, &bits, sizeof score);
      }
      std::memcpy(to + i * bytes_, &score, sizeof score);
    }
  }

  const KeyScoreSteps& score_;
  const TopKeySteps& top_;
  const SelectKeysArgs& args_;
  int64_t bytes_;
  CandidateRoom room_;
  AlignedBytes scratch_, scores_;
  std::vector<TokenRange> windows_;
  std::vector<Candidates> candidates_;
  int64_t last_ = 0;
};

}  // namespace

void run_select(const KeyScoreSteps& score, const TopKeySteps& top,
                const SelectKeysArgs& args, const ParallelFor& parallel_for) {
  if (args.slots == 0 || args.queries == 0) return;
  const int queries = queries_of_block(args, score);
  const int64_t blocks = (args.queries + queries - 1) / queries;
  parallel_for(args.rows * blocks, 1, [&](int64_t begin, int64_t end) {
    score.start();
    Selector selector(score, top, args, queries);
    for (int64_t i = begin; i < end; ++i) {
      ScoredQueries part;
      part.row = i / blocks;
      part.first = from_both_ends(i % blocks, blocks) * queries;
      part.count = static_cast<int>(
          std::min<int64_t>(queries, args.queries - part.first));
      selector.select(part);
    }
    score.finish();
  });
}

void run_top_keys(const TopKeySteps& steps, const TopKeysArgs& args,
                  const ParallelFor& parallel_for) {
  if (args.slots == 0) return;
  const int64_t bytes = accumulator_bytes(args.type);
  parallel_for(args.queries, 1, [&](int64_t begin, int64_t end) {
    const CandidateRoom room(args.slots, bytes, 1);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t query = from_both_ends(i, args.queries);
      const TokenRange window =
          args.start == nullptr
              ? TokenRange{0, args.keys}
              : window_of(args.start[query], args.end[query], args.keys);
      int32_t* const indices = args.indices + query * args.slots;
      if (window.size() <= args.slots) {
        std::iota(indices, indices + window.size(),
                  static_cast<int32_t>(window.begin));
        std::fill(indices + window.size(), indices + args.slots, -1);
        continue;
      }
      Candidates best = room.of(0);
      room.offer(steps,
                 static_cast<const char*>(args.scores) +
                     (query * args.stride + window.begin) * bytes,
                 window.size(), window.begin, best);
      room.finish(steps, best);
      std::copy_n(best.keys, best.size, indices);
    }
  });
}

}  // namespace longspan
