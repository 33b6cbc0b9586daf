#pragma once

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "longspan/kernels/common/threads.h"
#include "longspan/kernels/levels/levels.h"
#include "tests/kernels/attention/attention_cases.h"
#include "tests/oracle/key_selection.h"
#include "tests/support/attention_arrays.h"

namespace longspan::test {

/// Windows [start, end) of each query, the same in every row.
struct SelectionCase {
  std::string name;
  int64_t rows = 1, queries = 1, keys = 1, heads = 1, channels = 16, slots = 1;
  std::vector<int32_t> start = {}, end = {};  // empty: all keys
  Strides strides = Strides::contiguous;
};

inline void PrintTo(const SelectionCase& c, std::ostream* out) {
  *out << c.name;
}

inline SelectionCase causal_selection(std::string name, int64_t queries,
                                      int64_t heads, int64_t channels,
                                      int64_t slots) {
  SelectionCase c{.name = std::move(name),
                  .queries = queries,
                  .keys = queries,
                  .heads = heads,
                  .channels = channels,
                  .slots = slots};
  for (int64_t i = 0; i < queries; ++i) {
    c.start.push_back(0);
    c.end.push_back(static_cast<int32_t>(i) + 1);
  }
  return c;
}

inline const std::vector<SelectionCase>& selection_cases() {
  constexpr int32_t kLow = std::numeric_limits<int32_t>::min();
  constexpr int32_t kHigh = std::numeric_limits<int32_t>::max();
  static const std::vector<SelectionCase> cases{
      // Usual.
      causal_selection("causal", 90, 8, 64, 16),
      {.name = "all_keys_of_32_heads",
       .queries = 5,
       .keys = 500,
       .heads = 32,
       .channels = 128,
       .slots = 32},
      {.name = "all_keys_of_64_heads",
       .queries = 3,
       .keys = 300,
       .heads = 64,
       .channels = 128,
       .slots = 100},
      // Ragged.
      {.name = "three_heads_of_7_channels",
       .rows = 2,
       .queries = 40,
       .keys = 197,
       .heads = 3,
       .channels = 7,
       .slots = 13},
      {.name = "one_channel",
       .queries = 20,
       .keys = 400,
       .heads = 1,
       .channels = 1,
       .slots = 40},
      {.name = "gaps_between_everything",
       .rows = 2,
       .queries = 21,
       .keys = 210,
       .heads = 3,
       .channels = 40,
       .slots = 9,
       .strides = Strides::gapped},
      {.name = "documents_far_apart",
       .queries = 6,
       .keys = 3000,
       .heads = 2,
       .channels = 7,
       .slots = 4,
       .start = {0, 2900, 100, 1500, 2999, 0},
       .end = {9, 3000, 103, 1504, 3000, 3000}},
      // Corner.
      {.name = "windows_around_the_slots",
       .queries = 8,
       .keys = 60,
       .heads = 2,
       .channels = 7,
       .slots = 5,
       .start = {0, 7, 7, 7, 7, 55, 55, 0},
       .end = {0, 8, 11, 12, 13, 59, 60, 60}},
      {.name = "empty_inverted_and_wild_windows",
       .queries = 8,
       .keys = 30,
       .heads = 2,
       .channels = 7,
       .slots = 4,
       .start = {3, 20, kLow, -5, 25, 30, kHigh, kLow},
       .end = {3, 10, 3, 400, kHigh, 31, kLow, kHigh}},
      {.name = "more_slots_than_keys",
       .queries = 4,
       .keys = 6,
       .heads = 3,
       .channels = 7,
       .slots = 50},
      {.name = "one_of_one",
       .queries = 1,
       .keys = 1,
       .heads = 1,
       .channels = 1,
       .slots = 1},
      {.name = "no_keys", .queries = 3, .keys = 0, .slots = 2},
      {.name = "no_slots", .queries = 3, .keys = 5, .slots = 0},
  };
  return cases;
}

inline std::vector<int32_t> starts_of(const SelectionCase& c) {
  return c.start.empty() ? std::vector<int32_t>(oracle::at(c.queries), 0)
                         : c.start;
}
inline std::vector<int32_t> ends_of(const SelectionCase& c) {
  return c.end.empty() ? std::vector<int32_t>(oracle::at(c.queries),
                                              static_cast<int32_t>(c.keys))
                       : c.end;
}

inline oracle::ScoreProblem problem_of(const SelectionCase& c, ElementType type,
                                       uint64_t seed = 7) {
  std::mt19937_64 bits(seed);
  oracle::ScoreProblem p{.rows = c.rows,
                         .queries = c.queries,
                         .keys = c.keys,
                         .heads = c.heads,
                         .channels = c.channels};
  const int64_t heads = c.rows * c.queries * c.heads;
  p.q = normals(bits, type, heads * c.channels);
  p.k = normals(bits, type, c.rows * c.keys * c.channels);
  p.weights = normals(bits, accumulation(type), heads);
  return p;
}

/// What kernels read of a problem, in one element type.
struct SelectionArrays {
  ElementType type;
  oracle::ScoreProblem problem;
  Array q, k, weights;
  std::vector<int32_t> start, end;

  SelectionArrays(const SelectionCase& c, ElementType element,
                  const oracle::ScoreProblem& p)
      : type(element),
        problem(p),
        q(type, c.strides, p.rows, p.queries, p.heads, p.channels),
        k(type, c.strides, p.rows, p.keys, 1, p.channels),
        weights(accumulation(type), c.strides, p.rows, p.queries, p.heads, 1),
        start(starts_of(c)),
        end(ends_of(c)) {
    q.fill(p.q);
    k.fill(p.k);
    weights.fill(p.weights);
  }
  SelectionArrays(const SelectionCase& c, ElementType element)
      : SelectionArrays(c, element, problem_of(c, element)) {}

  void shape(KeyScoreArgs& args, int64_t slots) const {
    args.type = type;
    args.rows = problem.rows;
    args.queries = problem.queries;
    args.keys = problem.keys;
    args.heads = problem.heads;
    args.head_dim = static_cast<int>(problem.channels);
    args.q = q;
    args.k = k;
    args.k.head_stride = 0;
    args.weights = weights;
    args.slots = slots;
  }
};

/// A value that kernels must overwrite.
inline constexpr int32_t kUnwritten = -77;

struct Selected {
  std::vector<int32_t> indices;
  std::vector<double> scores;  // [rows, queries, slots]
  std::vector<std::byte> bytes;
  friend bool operator==(const Selected& a, const Selected& b) {
    return a.indices == b.indices && a.bytes == b.bytes;
  }
};

inline Selected select(const KeySelectionKernels& kernels,
                       const SelectionArrays& arrays, int64_t slots,
                       const ParallelFor& parallel_for = serial_for,
                       bool with_scores = true) {
  const oracle::ScoreProblem& p = arrays.problem;
  Selected result;
  result.indices.assign(oracle::at(p.rows * p.queries * slots), kUnwritten);
  Array scores(accumulation(arrays.type), Strides::contiguous, p.rows,
               p.queries, 1, slots);
  SelectKeysArgs args;
  arrays.shape(args, slots);
  args.start = {arrays.start.data(), 0, 1, 0};
  args.end = {arrays.end.data(), 0, 1, 0};
  args.indices = {result.indices.data(), p.queries * slots, slots, 0};
  if (with_scores) args.scores = scores;
  kernels.select(args, parallel_for);
  result.scores = scores.values();
  result.bytes = scores.bytes();
  return result;
}

inline Selected score(const KeySelectionKernels& kernels,
                      const SelectionArrays& arrays, int64_t slots,
                      const std::vector<int32_t>& indices,
                      const ParallelFor& parallel_for = serial_for) {
  const oracle::ScoreProblem& p = arrays.problem;
  Array scores(accumulation(arrays.type), Strides::contiguous, p.rows,
               p.queries, 1, slots);
  ScoreSelectedArgs args;
  arrays.shape(args, slots);
  args.indices = {indices.data(), p.queries * slots, slots, 0};
  args.scores = scores;
  kernels.score(args, parallel_for);
  return {indices, scores.values(), scores.bytes()};
}

/// Scores of all keys for each query, by the kernel itself.
inline Selected score_all(const KeySelectionKernels& kernels,
                          const SelectionArrays& arrays) {
  const oracle::ScoreProblem& p = arrays.problem;
  std::vector<int32_t> all;
  for (int64_t i = 0; i < p.rows * p.queries; ++i) {
    for (int64_t key = 0; key < p.keys; ++key) {
      all.push_back(static_cast<int32_t>(key));
    }
  }
  return score(kernels, arrays, p.keys, all);
}

struct ScoreDerivatives {
  Array dq, dk, dweights;
  ScoreDerivatives(const SelectionArrays& arrays, Strides strides)
      : dq(accumulation(arrays.type), strides, arrays.problem.rows,
           arrays.problem.queries, arrays.problem.heads,
           arrays.problem.channels),
        dk(accumulation(arrays.type), strides, arrays.problem.rows,
           arrays.problem.keys, 1, arrays.problem.channels),
        dweights(accumulation(arrays.type), strides, arrays.problem.rows,
                 arrays.problem.queries, arrays.problem.heads, 1) {}
};

inline ScoreDerivatives score_backward(
    const KeySelectionKernels& kernels, const SelectionArrays& arrays,
    int64_t slots, const std::vector<int32_t>& indices,
    const std::vector<double>& dscores, Strides strides = Strides::contiguous,
    const ParallelFor& parallel_for = serial_for, double dk_before = 0) {
  const oracle::ScoreProblem& p = arrays.problem;
  ScoreDerivatives result(arrays, strides);
  result.dk.fill(dk_before);
  Array changes(accumulation(arrays.type), Strides::contiguous, p.rows,
                p.queries, 1, slots);
  changes.fill(dscores);
  ScoreSelectedBackwardArgs args;
  arrays.shape(args, slots);
  args.indices = {indices.data(), p.queries * slots, slots, 0};
  args.dscores = changes;
  args.dq = result.dq;
  args.dk = result.dk;
  args.dk.head_stride = 0;
  args.dweights = result.dweights;
  kernels.score_backward(args, parallel_for);
  return result;
}

}  // namespace longspan::test
