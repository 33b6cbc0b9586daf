#pragma once

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "tests/support/attention_arrays.h"

namespace longspan::test {

/// One problem for attention kernels. Every row has the same lines.
struct AttentionCase {
  std::string name;
  int64_t rows = 1, queries = 1, keys = 1;
  int64_t heads = 1, heads_per_key_head = 1, head_offset = 0;
  int64_t head_dim = 16, value_dim = 16;
  double softcap = 0;
  double size = 1;  // of q; scores grow with it
  Strides strides = Strides::contiguous;
  std::vector<KeyLines> lines;  // of row 0
};

/// Names a test.
inline void PrintTo(const AttentionCase& c, std::ostream* out) {
  *out << c.name;
}

/// Every query sees every one of some keys.
inline KeyLines all_of(TokenRange queries, TokenRange keys) {
  return {.queries = queries,
          .begin_min = keys.begin,
          .begin_max = keys.begin,
          .end_min = keys.end,
          .end_max = keys.end};
}

/// Query q sees the `width` keys of `keys` that end with q + shift.
inline KeyLines band(TokenRange queries, TokenRange keys, int64_t shift,
                     int64_t width) {
  return {.queries = queries,
          .begin_shift = shift + 1 - width,
          .begin_min = keys.begin,
          .begin_max = keys.end,
          .end_shift = shift + 1,
          .end_min = keys.begin,
          .end_max = keys.end};
}

/// Query q sees the keys of `keys` up to q + shift.
inline KeyLines causal(TokenRange queries, TokenRange keys, int64_t shift = 0) {
  return band(queries, keys, shift, int64_t{1} << 40);
}

/// The same window, but ahead to the last of `queries` (an image).
inline KeyLines image(TokenRange queries, TokenRange keys, int64_t width) {
  KeyLines line = band(queries, keys, 0, width);
  line.end_min = queries.end;
  return line;
}

inline std::vector<KeyLines> documents(const std::vector<int64_t>& lengths) {
  std::vector<KeyLines> lines;
  int64_t begin = 0;
  for (int64_t length : lengths) {
    const TokenRange tokens{begin, begin + length};
    lines.push_back(causal(tokens, tokens));
    begin += length;
  }
  return lines;
}

inline AttentionCase causal_case(std::string name, int64_t tokens,
                                 int64_t channels) {
  return {.name = std::move(name),
          .queries = tokens,
          .keys = tokens,
          .heads = 2,
          .head_dim = channels,
          .value_dim = channels,
          .lines = {causal({0, tokens}, {0, tokens})}};
}

inline const std::vector<AttentionCase>& attention_cases() {
  static const std::vector<AttentionCase> cases{
      // Usual.
      causal_case("causal", 200, 64),
      {.name = "full_of_two_rows",
       .rows = 2,
       .queries = 70,
       .keys = 90,
       .heads = 3,
       .lines = {all_of({0, 70}, {0, 90})}},
      {.name = "eight_heads_for_one_key_head",
       .queries = 129,
       .keys = 129,
       .heads = 16,
       .heads_per_key_head = 8,
       .lines = {causal({0, 129}, {0, 129})}},
      {.name = "all_heads_for_one_key_head",
       .queries = 20,
       .keys = 80,
       .heads = 5,
       .heads_per_key_head = 5,
       .lines = {all_of({0, 20}, {0, 80})}},
      {.name = "sliding_window",
       .queries = 300,
       .keys = 300,
       .lines = {band({0, 300}, {0, 300}, 0, 50)}},
      {.name = "image_longer_than_the_window",
       .queries = 300,
       .keys = 300,
       .lines = {band({0, 40}, {0, 300}, 0, 50), image({40, 250}, {0, 300}, 50),
                 band({250, 300}, {0, 300}, 0, 50)}},
      {.name = "documents_in_one_block",
       .queries = 100,
       .keys = 100,
       .lines = documents({5, 1, 17, 40, 2, 3, 32})},
      {.name = "soft_cap",
       .queries = 70,
       .keys = 70,
       .softcap = 2,
       .size = 4,
       .lines = {causal({0, 70}, {0, 70})}},
      // Ragged.
      causal_case("tokens_63", 63, 16),
      causal_case("tokens_64", 64, 16),
      causal_case("tokens_65", 65, 16),
      causal_case("tokens_127", 127, 16),
      causal_case("tokens_129", 129, 16),
      causal_case("channels_1", 66, 1),
      causal_case("channels_3", 66, 3),
      causal_case("channels_40", 66, 40),
      {.name = "channels_192_and_128",
       .queries = 66,
       .keys = 66,
       .head_dim = 192,
       .value_dim = 128,
       .lines = {causal({0, 66}, {0, 66})}},
      {.name = "channels_576_and_512",
       .queries = 10,
       .keys = 70,
       .heads = 3,
       .heads_per_key_head = 3,
       .head_dim = 576,
       .value_dim = 512,
       .lines = {causal({0, 10}, {0, 70}, 60)}},
      {.name = "share_of_the_heads",
       .queries = 30,
       .keys = 30,
       .heads = 6,
       .heads_per_key_head = 4,
       .head_offset = 3,
       .lines = {causal({0, 30}, {0, 30})}},
      {.name = "many_heads",
       .queries = 300,
       .keys = 300,
       .heads = 29,
       .heads_per_key_head = 5,
       .head_offset = 2,
       .lines = documents({150, 10, 140})},
      {.name = "many_queries",
       .queries = 2100,
       .keys = 150,
       .heads = 8,
       .heads_per_key_head = 2,
       .head_dim = 8,
       .value_dim = 24,
       .lines = {band({0, 1000}, {0, 100}, -450, 80),
                 causal({1030, 2090}, {0, 150}, -1900),
                 all_of({1200, 1300}, {100, 150})}},
      {.name = "gaps_between_everything",
       .rows = 2,
       .queries = 65,
       .keys = 70,
       .heads = 4,
       .heads_per_key_head = 2,
       .head_dim = 20,
       .value_dim = 12,
       .strides = Strides::gapped,
       .lines = {causal({0, 65}, {0, 70}, 5)}},
      {.name = "gaps_between_rows_of_whole_vectors",
       .rows = 2,
       .queries = 65,
       .keys = 70,
       .heads = 4,
       .heads_per_key_head = 2,
       .head_dim = 32,
       .value_dim = 96,
       .strides = Strides::gapped,
       .lines = {causal({0, 65}, {0, 70}, 5)}},
      // Corner.
      {.name = "one_token", .lines = {all_of({0, 1}, {0, 1})}},
      {.name = "one_key",
       .queries = 70,
       .keys = 1,
       .lines = {all_of({0, 70}, {0, 1})}},
      {.name = "lines_share_queries",
       .queries = 80,
       .keys = 300,
       .heads = 2,
       .lines = {all_of({0, 80}, {0, 3}), band({0, 80}, {3, 100}, 10, 9),
                 causal({20, 70}, {200, 300}, 180)}},
      {.name = "some_queries_see_nothing",
       .queries = 140,
       .keys = 140,
       .lines = {causal({3, 60}, {0, 140}, -30), all_of({60, 62}, {5, 5}),
                 all_of({130, 135}, {139, 140})}},
      {.name = "keys_far_apart",
       .queries = 64,
       .keys = 2000,
       .lines = {all_of({0, 10}, {1990, 2000}), all_of({20, 30}, {7, 9})}},
      {.name = "nobody_sees_anything", .queries = 5, .keys = 5, .lines = {}},
      {.name = "no_keys",
       .queries = 5,
       .keys = 0,
       .lines = {all_of({0, 5}, {0, 0})}},
      {.name = "no_queries", .queries = 0, .keys = 5, .lines = {}},
      {.name = "scores_of_ten_thousand",
       .queries = 70,
       .keys = 70,
       .size = 1e4,
       .lines = {causal({0, 70}, {0, 70})}},
  };
  return cases;
}

/// Lines of every row.
inline std::vector<KeyLines> lines_of(const AttentionCase& c) {
  std::vector<KeyLines> lines;
  for (int64_t row = 0; row < c.rows; ++row) {
    for (KeyLines line : c.lines) {
      line.row = row;
      lines.push_back(line);
    }
  }
  return lines;
}

/// `count` normal numbers as an array of `type` holds them.
inline std::vector<double> normals(std::mt19937_64& bits, ElementType type,
                                   int64_t count, double size = 1) {
  std::normal_distribution<double> normal(0, size);
  std::vector<double> values(static_cast<std::size_t>(count));
  for (double& value : values) value = rounded(type, normal(bits));
  return values;
}

struct CaseInputs {
  oracle::AttentionProblem problem;
  std::vector<double> dout;
  std::vector<KeyLines> lines;
};

inline CaseInputs inputs_of(const AttentionCase& c, ElementType type) {
  CaseInputs inputs;
  inputs.lines = lines_of(c);
  oracle::AttentionProblem& p = inputs.problem;
  p.rows = c.rows;
  p.queries = c.queries;
  p.keys = c.keys;
  p.heads = c.heads;
  p.heads_per_key_head = c.heads_per_key_head;
  p.head_offset = c.head_offset;
  p.head_dim = c.head_dim;
  p.value_dim = c.value_dim;
  p.scale = 1 / std::sqrt(static_cast<double>(c.head_dim));
  p.softcap = c.softcap;
  std::mt19937_64 bits(7);
  const int64_t query_heads = c.rows * c.queries * c.heads;
  const int64_t key_heads = c.rows * c.keys * p.key_heads();
  p.q = normals(bits, type, query_heads * c.head_dim, c.size);
  p.k = normals(bits, type, key_heads * c.head_dim);
  p.v = normals(bits, type, key_heads * c.value_dim);
  inputs.dout = normals(bits, type, query_heads * c.value_dim);
  p.allows = [lines = inputs.lines](int64_t row, int64_t query, int64_t key) {
    for (const KeyLines& line : lines) {
      if (line.row == row && line.queries.contains(query) &&
          line.keys_of(query).contains(key)) {
        return true;
      }
    }
    return false;
  };
  return inputs;
}

}  // namespace longspan::test
