#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

/// Attention to listed keys as its definition says it, one slot at a time. The
/// answer in double is what implementations are held to; the same steps in
/// float are the plain computation that tolerances are taken from.
namespace longspan::oracle {

/// Arrays are contiguous, [rows, tokens, heads, channels].
struct SelectedProblem {
  int64_t rows = 1, queries = 0, keys = 0;
  int64_t heads = 1, key_heads = 1, slots = 0;
  int64_t head_dim = 1, value_dim = 1;
  double scale = 1;
  std::vector<double> q;         ///< [rows, queries, heads, head_dim]
  std::vector<double> kv;        ///< [rows, keys, key_heads, head_dim]
  std::vector<int32_t> indices;  ///< [rows, queries, key_heads, slots]
  std::vector<double> sink;      ///< [heads], or empty

  /// What weights, and derivatives of scores, are rounded to before they are
  /// multiplied with rows; empty is not at all.
  std::function<double(double)> rounding;

  /// What out and dq are rounded to; empty is not at all.
  std::function<double(double)> storing;

  bool is_key(int32_t slot) const { return slot >= 0 && slot < keys; }
};

template <class T>
struct SelectedAnswer {
  std::vector<T> out, lse;  ///< the lse without the sink
  std::vector<T> weights;   ///< [rows, queries, key_heads, slots]
};

template <class T>
struct SelectedGradients {
  std::vector<T> dq, dkv;
};

/// One query of one head: where its arrays lie, its scores, and what follows.
template <class T>
struct ListedQuery {
  const int32_t* slots;
  std::size_t q, out, lse, weights;  // first elements
  std::vector<std::size_t> keys;     // first elements in kv, of all slots
  std::vector<T> scores;             // of all slots; empty ones -inf
  T sum_lse, lse_with_sink;
};

template <class T>
ListedQuery<T> listed(const SelectedProblem& p, int64_t row, int64_t query,
                      int64_t head) {
  constexpr T kInfinity = std::numeric_limits<T>::infinity();
  const int64_t key_head = head / (p.heads / p.key_heads);
  const int64_t token = row * p.queries + query;
  const int64_t at = token * p.heads + head;
  const int64_t list = (token * p.key_heads + key_head) * p.slots;
  ListedQuery<T> result{.slots = p.indices.data() + list,
                        .q = static_cast<std::size_t>(at * p.head_dim),
                        .out = static_cast<std::size_t>(at * p.value_dim),
                        .lse = static_cast<std::size_t>(at),
                        .weights = static_cast<std::size_t>(list),
                        .keys = {},
                        .scores = {},
                        .sum_lse = 0,
                        .lse_with_sink = 0};
  T top = -kInfinity;
  for (int64_t i = 0; i < p.slots; ++i) {
    const int32_t slot = result.slots[i];
    T score = -kInfinity;
    std::size_t key = 0;
    if (p.is_key(slot)) {
      key = static_cast<std::size_t>(
          ((row * p.keys + slot) * p.key_heads + key_head) * p.head_dim);
      score = 0;
      for (std::size_t c = 0; c < static_cast<std::size_t>(p.head_dim); ++c) {
        score +=
            static_cast<T>(p.q[result.q + c]) * static_cast<T>(p.kv[key + c]);
      }
      score *= static_cast<T>(p.scale);
    }
    result.keys.push_back(key);
    result.scores.push_back(score);
    if (score > top) top = score;
  }
  const T shift = top == -kInfinity ? 0 : top;
  T sum = 0;
  for (T score : result.scores) sum += std::exp(score - shift);
  result.sum_lse = shift + std::log(sum);  // log(0) is -inf
  result.lse_with_sink = result.sum_lse;
  if (!p.sink.empty() && result.sum_lse != -kInfinity) {
    const T sink = static_cast<T>(p.sink[static_cast<std::size_t>(head)]);
    result.lse_with_sink = shift + std::log(sum + std::exp(sink - shift));
  }
  return result;
}

template <class T, class Visit>
void each_listed(const SelectedProblem& p, const Visit& visit) {
  for (int64_t row = 0; row < p.rows; ++row) {
    for (int64_t query = 0; query < p.queries; ++query) {
      for (int64_t head = 0; head < p.heads; ++head) {
        visit(listed<T>(p, row, query, head));
      }
    }
  }
}

template <class T>
T rounded_by(const std::function<double(double)>& rounding, T value) {
  return rounding ? static_cast<T>(rounding(value)) : value;
}

template <class T = double>
SelectedAnswer<T> selected_attention(const SelectedProblem& p) {
  const auto queries = static_cast<std::size_t>(p.rows * p.queries);
  const auto heads = static_cast<std::size_t>(p.heads);
  const auto value_dim = static_cast<std::size_t>(p.value_dim);
  SelectedAnswer<T> answer;
  answer.out.resize(queries * heads * value_dim);
  answer.lse.resize(queries * heads);
  answer.weights.resize(p.indices.size());
  each_listed<T>(p, [&](const ListedQuery<T>& seen) {
    answer.lse[seen.lse] = seen.sum_lse;
    if (seen.sum_lse == -std::numeric_limits<T>::infinity()) return;
    T* out = &answer.out[seen.out];
    for (std::size_t i = 0; i < seen.keys.size(); ++i) {
      if (!p.is_key(seen.slots[i])) continue;
      answer.weights[seen.weights + i] +=
          std::exp(seen.scores[i] - seen.lse_with_sink);
      const T weight =
          rounded_by(p.rounding, std::exp(seen.scores[i] - seen.lse_with_sink));
      for (std::size_t c = 0; c < value_dim; ++c) {
        out[c] += weight * static_cast<T>(p.kv[seen.keys[i] + c]);
      }
    }
    for (std::size_t c = 0; c < value_dim; ++c) {
      out[c] = rounded_by(p.storing, out[c]);
    }
  });
  return answer;
}

/// `dout` is like out.
template <class T = double>
SelectedGradients<T> selected_backward(const SelectedProblem& p,
                                       const std::vector<double>& dout) {
  const auto value_dim = static_cast<std::size_t>(p.value_dim);
  const auto head_dim = static_cast<std::size_t>(p.head_dim);
  const SelectedAnswer<T> answer = selected_attention<T>(p);
  SelectedGradients<T> gradients;
  gradients.dq.resize(p.q.size());
  gradients.dkv.resize(p.kv.size());
  each_listed<T>(p, [&](const ListedQuery<T>& seen) {
    if (std::isinf(seen.lse_with_sink)) return;
    T delta = 0;
    for (std::size_t c = 0; c < value_dim; ++c) {
      delta += answer.out[seen.out + c] * static_cast<T>(dout[seen.out + c]);
    }
    for (std::size_t i = 0; i < seen.keys.size(); ++i) {
      if (!p.is_key(seen.slots[i])) continue;
      const std::size_t key = seen.keys[i];
      const T weight = std::exp(seen.scores[i] - seen.lse_with_sink);
      const T value_weight = rounded_by(p.rounding, weight);
      T dweight = 0;
      for (std::size_t c = 0; c < value_dim; ++c) {
        const T d = static_cast<T>(dout[seen.out + c]);
        dweight += d * static_cast<T>(p.kv[key + c]);
        gradients.dkv[key + c] += value_weight * d;
      }
      const T dscore = rounded_by(
          p.rounding, weight * (dweight - delta) * static_cast<T>(p.scale));
      for (std::size_t c = 0; c < head_dim; ++c) {
        gradients.dq[seen.q + c] += dscore * static_cast<T>(p.kv[key + c]);
        gradients.dkv[key + c] += dscore * static_cast<T>(p.q[seen.q + c]);
      }
    }
    for (std::size_t c = 0; c < head_dim; ++c) {
      T& dq = gradients.dq[seen.q + c];
      dq = rounded_by(p.storing, dq);
    }
  });
  return gradients;
}

}  // namespace longspan::oracle
