#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

/// Attention as its definition says it: unsharded, one pair at a time, nothing
/// cached. The answer in double is what implementations are held to. The same
/// steps in float are the plain computation that tolerances are taken from.
namespace longspan::oracle {

/// Arrays are contiguous, [rows, tokens, heads, channels].
struct AttentionProblem {
  int64_t rows = 1, queries = 0, keys = 0;
  int64_t heads = 1;
  /// Query head h uses key head (h + head_offset) / heads_per_key_head.
  int64_t heads_per_key_head = 1, head_offset = 0;
  int64_t head_dim = 1, value_dim = 1;
  double scale = 1;
  double softcap = 0;     ///< s becomes softcap * tanh(s / softcap); 0 is none
  std::vector<double> q;  ///< [rows, queries, heads, head_dim]
  std::vector<double> k;  ///< [rows, keys, key_heads(), head_dim]
  std::vector<double> v;  ///< [rows, keys, key_heads(), value_dim]

  /// A logit of each head that takes weight and has no value; empty is none.
  std::vector<double> sink;

  /// Whether a query sees a key. Pairs that it denies are never looked at: what
  /// they hold, NaN included, reaches nobody.
  std::function<bool(int64_t row, int64_t query, int64_t key)> allows;

  /// What weights, and derivatives of scores, are rounded to before values,
  /// queries and keys are multiplied with them; empty is not at all.
  std::function<double(double)> rounding;

  int64_t key_heads() const {
    return (heads - 1 + head_offset) / heads_per_key_head + 1;
  }
  int64_t key_head_of(int64_t head) const {
    return (head + head_offset) / heads_per_key_head;
  }
};

/// A query that sees no key, or only keys with a score of -inf, has out 0 and
/// lse -inf.
template <class T>
struct AttentionAnswer {
  std::vector<T> out;  ///< [rows, queries, heads, value_dim]
  std::vector<T> lse;  ///< [rows, queries, heads], natural, without the sink
};

/// A query that sees no key moves nothing, not even the sink.
template <class T>
struct AttentionGradients {
  std::vector<T> dq, dk, dv;  ///< like q, k, v
  std::vector<T> dsink;       ///< [heads], empty without a sink
};

/// One query of one head: its scores, and what follows from them.
template <class T>
struct ScoredQuery {
  std::vector<int64_t> keys;  ///< the visible ones
  std::vector<T> scores;      ///< of those keys, soft-capped
  T lse;                      ///< without the sink
  T lse_with_sink;            ///< what weights are taken from
};

inline std::size_t place(int64_t row, int64_t token, int64_t tokens,
                         int64_t head, int64_t heads, int64_t channels) {
  return static_cast<std::size_t>(((row * tokens + token) * heads + head) *
                                  channels);
}

inline std::size_t place_of_query(const AttentionProblem& p, int64_t row,
                                  int64_t query, int64_t head,
                                  int64_t channels) {
  return place(row, query, p.queries, head, p.heads, channels);
}

/// Of the key head that a query head uses.
inline std::size_t place_of_key(const AttentionProblem& p, int64_t row,
                                int64_t key, int64_t head, int64_t channels) {
  return place(row, key, p.keys, p.key_head_of(head), p.key_heads(), channels);
}

template <class T>
T rounded_weight(const AttentionProblem& p, T weight) {
  return p.rounding ? static_cast<T>(p.rounding(weight)) : weight;
}

/// log(exp(a) + exp(b)), where -inf stands for nothing.
template <class T>
T log_add(T a, T b) {
  if (a == -std::numeric_limits<T>::infinity()) return b;
  if (b == -std::numeric_limits<T>::infinity()) return a;
  const T top = a > b ? a : b;
  return top + std::log(std::exp(a - top) + std::exp(b - top));
}

template <class T>
ScoredQuery<T> scored(const AttentionProblem& p, int64_t row, int64_t query,
                      int64_t head) {
  constexpr T kInfinity = std::numeric_limits<T>::infinity();
  ScoredQuery<T> result;
  T top = -kInfinity;
  for (int64_t key = 0; key < p.keys; ++key) {
    if (!p.allows(row, query, key)) continue;
    const double* q = &p.q[place_of_query(p, row, query, head, p.head_dim)];
    const double* k = &p.k[place_of_key(p, row, key, head, p.head_dim)];
    T score = 0;
    for (int64_t i = 0; i < p.head_dim; ++i) {
      score += static_cast<T>(q[i]) * static_cast<T>(k[i]);
    }
    score *= static_cast<T>(p.scale);
    const T cap = static_cast<T>(p.softcap);
    if (cap != 0) score = cap * std::tanh(score / cap);
    result.keys.push_back(key);
    result.scores.push_back(score);
    if (score > top) top = score;
  }
  T sum = 0;
  const T shift = top == -kInfinity ? 0 : top;
  for (T score : result.scores) sum += std::exp(score - shift);
  result.lse = shift + std::log(sum);  // log(0) is -inf
  result.lse_with_sink = result.lse;
  if (!p.sink.empty() && result.lse != -kInfinity) {
    const T sink = static_cast<T>(p.sink[static_cast<std::size_t>(head)]);
    result.lse_with_sink = log_add(result.lse, sink);
  }
  return result;
}

template <class T = double>
AttentionAnswer<T> attention(const AttentionProblem& p) {
  AttentionAnswer<T> answer;
  answer.out.resize(place_of_query(p, p.rows, 0, 0, p.value_dim));
  answer.lse.resize(place_of_query(p, p.rows, 0, 0, 1));
  for (int64_t row = 0; row < p.rows; ++row) {
    for (int64_t query = 0; query < p.queries; ++query) {
      for (int64_t head = 0; head < p.heads; ++head) {
        const ScoredQuery<T> seen = scored<T>(p, row, query, head);
        answer.lse[place_of_query(p, row, query, head, 1)] = seen.lse;
        if (seen.lse == -std::numeric_limits<T>::infinity()) continue;
        T* out = &answer.out[place_of_query(p, row, query, head, p.value_dim)];
        for (std::size_t i = 0; i < seen.keys.size(); ++i) {
          const T weight =
              rounded_weight(p, std::exp(seen.scores[i] - seen.lse_with_sink));
          const double* v =
              &p.v[place_of_key(p, row, seen.keys[i], head, p.value_dim)];
          for (int64_t c = 0; c < p.value_dim; ++c) {
            out[c] += weight * static_cast<T>(v[c]);
          }
        }
      }
    }
  }
  return answer;
}

/// Adds the derivatives through one query of one head.
template <class T>
void differentiate(const AttentionProblem& p, const std::vector<double>& dout,
                   const AttentionAnswer<T>& answer, int64_t row, int64_t query,
                   int64_t head, AttentionGradients<T>& gradients) {
  const ScoredQuery<T> seen = scored<T>(p, row, query, head);
  if (seen.lse == -std::numeric_limits<T>::infinity()) return;
  const std::size_t at_q = place_of_query(p, row, query, head, p.head_dim);
  const std::size_t at_out = place_of_query(p, row, query, head, p.value_dim);
  const auto value_dim = static_cast<std::size_t>(p.value_dim);
  const auto head_dim = static_cast<std::size_t>(p.head_dim);
  T delta = 0;
  for (std::size_t c = 0; c < value_dim; ++c) {
    delta += answer.out[at_out + c] * static_cast<T>(dout[at_out + c]);
  }
  if (!p.sink.empty()) {
    const auto h = static_cast<std::size_t>(head);
    const T sink = static_cast<T>(p.sink[h]);
    gradients.dsink[h] -= std::exp(sink - seen.lse_with_sink) * delta;
  }
  for (std::size_t i = 0; i < seen.keys.size(); ++i) {
    const std::size_t at_k =
        place_of_key(p, row, seen.keys[i], head, p.head_dim);
    const std::size_t at_v =
        place_of_key(p, row, seen.keys[i], head, p.value_dim);
    const T weight = std::exp(seen.scores[i] - seen.lse_with_sink);
    const T dv_weight = rounded_weight(p, weight);
    T dweight = 0;
    for (std::size_t c = 0; c < value_dim; ++c) {
      const T d = static_cast<T>(dout[at_out + c]);
      dweight += d * static_cast<T>(p.v[at_v + c]);
      gradients.dv[at_v + c] += dv_weight * d;
    }
    T dscore = weight * (dweight - delta) * static_cast<T>(p.scale);
    if (p.softcap != 0) {
      const T slope = seen.scores[i] / static_cast<T>(p.softcap);
      dscore *= 1 - slope * slope;
    }
    dscore = rounded_weight(p, dscore);
    for (std::size_t c = 0; c < head_dim; ++c) {
      gradients.dq[at_q + c] += dscore * static_cast<T>(p.k[at_k + c]);
      gradients.dk[at_k + c] += dscore * static_cast<T>(p.q[at_q + c]);
    }
  }
}

/// `dout` is like out.
template <class T = double>
AttentionGradients<T> attention_backward(const AttentionProblem& p,
                                         const std::vector<double>& dout) {
  AttentionGradients<T> gradients;
  gradients.dq.resize(p.q.size());
  gradients.dk.resize(p.k.size());
  gradients.dv.resize(p.v.size());
  gradients.dsink.resize(p.sink.size());
  const AttentionAnswer<T> answer = attention<T>(p);
  for (int64_t row = 0; row < p.rows; ++row) {
    for (int64_t query = 0; query < p.queries; ++query) {
      for (int64_t head = 0; head < p.heads; ++head) {
        differentiate(p, dout, answer, row, query, head, gradients);
      }
    }
  }
  return gradients;
}

}  // namespace longspan::oracle
