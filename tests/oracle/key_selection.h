#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

/// The obvious answers about choosing keys, over plain arrays.
namespace longspan::oracle {

/// Everything lies contiguous: q [rows, queries, heads, channels],
/// k [rows, keys, channels], weights [rows, queries, heads].
struct ScoreProblem {
  int64_t rows = 1, queries = 1, keys = 1, heads = 1, channels = 1;
  std::vector<double> q = {}, k = {}, weights = {};

  int64_t head(int64_t row, int64_t query, int64_t h) const {
    return (row * queries + query) * heads + h;
  }
};

inline std::size_t at(int64_t index) {
  return static_cast<std::size_t>(index);
}

/// q . k, summed in T.
template <class T>
T product(const ScoreProblem& p, int64_t row, int64_t query, int64_t head,
          int64_t key) {
  T sum = 0;
  for (int64_t c = 0; c < p.channels; ++c) {
    sum += static_cast<T>(p.q[at(p.head(row, query, head) * p.channels + c)]) *
           static_cast<T>(p.k[at((row * p.keys + key) * p.channels + c)]);
  }
  return sum;
}

/// max(0, x), NaN where x is.
template <class T>
T rectified(T x) {
  return x < 0 ? 0 : x;
}

template <class T>
T key_score(const ScoreProblem& p, int64_t row, int64_t query, int64_t key) {
  T sum = 0;
  for (int64_t h = 0; h < p.heads; ++h) {
    sum += static_cast<T>(p.weights[at(p.head(row, query, h))]) *
           rectified(product<T>(p, row, query, h, key));
  }
  return sum;
}

/// Whether a comes before b: greater first, NaN above everything.
inline bool better(double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && !std::isnan(b);
  return a > b;
}

/// The best of keys [start, end), at most `slots` of them, ascending; -1 fills
/// the tail. scores[i] belongs to key i.
template <class Scores>
std::vector<int32_t> best_keys(const Scores& scores, int64_t start, int64_t end,
                               int64_t slots) {
  const int64_t keys = std::ssize(scores);
  start = std::clamp<int64_t>(start, 0, keys);
  end = std::clamp<int64_t>(end, 0, keys);
  std::vector<int32_t> list(at(std::max<int64_t>(end - start, 0)));
  std::iota(list.begin(), list.end(), static_cast<int32_t>(start));
  std::ranges::stable_sort(list, [&](int32_t a, int32_t b) {
    return better(static_cast<double>(scores[at(a)]),
                  static_cast<double>(scores[at(b)]));
  });
  if (std::ssize(list) > slots) list.resize(at(slots));
  std::ranges::sort(list);
  list.resize(at(slots), -1);
  return list;
}

template <class T>
struct ScoreGradients {
  std::vector<T> dq, dk, dweights;
};

/// For listed keys [rows, queries, slots] and the gradients of their scores.
template <class T>
ScoreGradients<T> key_score_gradients(const ScoreProblem& p, int64_t slots,
                                      const std::vector<int32_t>& lists,
                                      const std::vector<double>& dscores) {
  ScoreGradients<T> d{std::vector<T>(p.q.size()), std::vector<T>(p.k.size()),
                      std::vector<T>(p.weights.size())};
  for (int64_t row = 0; row < p.rows; ++row) {
    for (int64_t query = 0; query < p.queries; ++query) {
      for (int64_t slot = 0; slot < slots; ++slot) {
        const std::size_t place = at((row * p.queries + query) * slots + slot);
        const int64_t key = lists[place];
        if (key < 0 || key >= p.keys) continue;
        const T g = static_cast<T>(dscores[place]);
        for (int64_t h = 0; h < p.heads; ++h) {
          const int64_t head = p.head(row, query, h);
          const T a = product<T>(p, row, query, h, key);
          const T m = a <= 0 ? T{0} : g * static_cast<T>(p.weights[at(head)]);
          d.dweights[at(head)] += g * rectified(a);
          for (int64_t c = 0; c < p.channels; ++c) {
            const std::size_t in_q = at(head * p.channels + c);
            const std::size_t in_k = at((row * p.keys + key) * p.channels + c);
            d.dq[in_q] += m * static_cast<T>(p.k[in_k]);
            d.dk[in_k] += m * static_cast<T>(p.q[in_q]);
          }
        }
      }
    }
  }
  return d;
}

}  // namespace longspan::oracle
