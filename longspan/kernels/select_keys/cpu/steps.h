#pragma once

#include <cstdint>

#include "longspan/kernels/select_keys/select_keys.h"

namespace longspan {

/// Keys that are packed and scored together: whole tiles of every product.
inline constexpr int kScoredKeys = 192;

/// Consecutive queries of one row, packed into a scratch.
struct ScoredQueries {
  int64_t row = 0, first = 0;
  int count = 0;
};

/// The arithmetic of scores for one element type. A scratch is aligned to 64
/// bytes and belongs to one thread between `start` and `finish`; it holds
/// packed queries and up to kScoredKeys packed keys, in any order and each
/// inside [0, keys).
struct KeyScoreSteps {
  void (*start)();
  void (*finish)();
  int64_t (*scratch_bytes)(const KeyScoreArgs& args, int queries);
  void (*pack_queries)(const KeyScoreArgs& args, const ScoredQueries& queries,
                       void* scratch);
  void (*pack_keys)(const KeyScoreArgs& args, int64_t row, const int32_t* keys,
                    int count, void* scratch);
  /// scores[i][j] of packed query i of [first, last) and packed key j, in rows
  /// of kScoredKeys; what is left of a row's last vector may be written.
  void (*score)(const KeyScoreArgs& args, const ScoredQueries& queries,
                int first, int last, int keys, void* scratch, void* scores);

  /// The derivatives of one query's scores of some keys, added to dq, dweights
  /// and dk. The query is packed alone.
  int64_t (*backward_bytes)(const KeyScoreArgs& args);
  void (*backward)(const ScoreSelectedBackwardArgs& args,
                   const ScoredQueries& query, const int32_t* keys, int count,
                   const void* dscores, void* scratch, void* backward_scratch);
};

/// The best keys of one query so far, ascending, and those that came since they
/// were last sorted out. An order is a score as an integer: greater ones first,
/// NaN above all, int32_t or int64_t as the score has bits.
struct Candidates {
  void* orders = nullptr;   // both with kCandidateSlack behind their room
  int32_t* keys = nullptr;  // ascending
  int64_t size = 0;
  int64_t floor = 0;  // an order; no key behind the last with one up to this
                      // can be among the best
};

/// Whole vectors are written behind the last candidate.
inline constexpr int64_t kCandidateSlack = 16;

/// The selection, for scores of one type.
struct TopKeySteps {
  /// Appends those of keys [first, first + count) whose order is above the
  /// floor. There is room for all of them.
  void (*append)(const void* scores, int64_t count, int32_t first,
                 Candidates& candidates);
  /// Keeps the `slots` best of more than that, equal ones by the lower key, and
  /// raises the floor.
  void (*keep_best)(Candidates& candidates, int64_t slots);
};

/// One instruction set's arithmetic.
struct KeySelectionSteps {
  KeyScoreSteps score[4];  // by ElementType
  TopKeySteps top[2];      // of float, of double
};

// Each lives in a source of its own, compiled for its instruction set, which
// holds arithmetic only.
extern const KeySelectionSteps kPortableSelection;
#ifdef LONGSPAN_X86_KERNELS
extern const KeySelectionSteps kAvx2Selection;
extern const KeySelectionSteps kAvx512Selection;
extern const KeyScoreSteps kAvx512Bf16Scores;
extern const KeyScoreSteps kAmxScores;
#endif

/// Cut the work into jobs; answers do not depend on how.
void run_select(const KeyScoreSteps& score, const TopKeySteps& top,
                const SelectKeysArgs& args, const ParallelFor& parallel_for);
void run_score(const KeyScoreSteps& steps, const ScoreSelectedArgs& args,
               const ParallelFor& parallel_for);
void run_score_backward(const KeyScoreSteps& steps,
                        const ScoreSelectedBackwardArgs& args,
                        const ParallelFor& parallel_for);
void run_top_keys(const TopKeySteps& steps, const TopKeysArgs& args,
                  const ParallelFor& parallel_for);

/// The kernels of a level: its own steps, and for bfloat16 others where there
/// are.
template <const KeySelectionSteps& steps, const KeyScoreSteps* bf16 = nullptr>
KeySelectionKernels selection_kernels() {
  static constexpr auto score_of =
      [](const KeyScoreArgs& args) -> const KeyScoreSteps& {
    return bf16 != nullptr && args.type == ElementType::bfloat16
               ? *bf16
               : steps.score[static_cast<int>(args.type)];
  };
  static constexpr auto top_of = [](ElementType type) -> const TopKeySteps& {
    return steps.top[type == ElementType::float64 ? 1 : 0];
  };
  return {
      .select =
          [](const SelectKeysArgs& args, const ParallelFor& parallel_for) {
            run_select(score_of(args), top_of(args.type), args, parallel_for);
          },
      .score =
          [](const ScoreSelectedArgs& args, const ParallelFor& parallel_for) {
            run_score(score_of(args), args, parallel_for);
          },
      .score_backward =
          [](const ScoreSelectedBackwardArgs& args,
             const ParallelFor& parallel_for) {
            run_score_backward(score_of(args), args, parallel_for);
          },
      .top_keys =
          [](const TopKeysArgs& args, const ParallelFor& parallel_for) {
            run_top_keys(top_of(args.type), args, parallel_for);
          },
  };
}

}  // namespace longspan
