#pragma once

#include <numeric>
#include <utility>

#include "tests/kernels/cuda/device.cuh"

namespace longspan::test {

/// The promise, by a stable sort.
inline std::vector<int32_t> sorted_choice(const float* scores, int64_t keys,
                                          int64_t first, int64_t end,
                                          int64_t slots) {
  first = std::max<int64_t>(first, 0);
  end = std::max(first, std::min(end, keys));
  std::vector<int32_t> order(end - first);
  std::iota(order.begin(), order.end(), static_cast<int32_t>(first));
  const auto better = [&](int32_t a, int32_t b) {
    const float x = scores[a], y = scores[b];
    if (std::isnan(x) || std::isnan(y)) return std::isnan(x) && !std::isnan(y);
    return x > y;
  };
  std::stable_sort(order.begin(), order.end(), better);
  if (static_cast<int64_t>(order.size()) > slots) order.resize(slots);
  std::sort(order.begin(), order.end());
  order.resize(slots, -1);
  return order;
}

/// Windows [start, end) of T queries, in rows of `queries`: causal, empty, of
/// about as many keys as slots, and far outside.
inline std::pair<std::vector<int32_t>, std::vector<int32_t>>
windows_of_every_kind(int64_t T, int64_t queries, int64_t keys, int64_t slots) {
  std::vector<int32_t> start(T), end(T);
  for (int64_t t = 0; t < T; ++t) {
    const auto z = mixed(77 + t);
    const int64_t causal = t % queries * keys / queries + 1;
    const int64_t sizes[] = {0, 1, slots - 1, slots, slots + 1};
    start[t] = 0;
    end[t] = static_cast<int32_t>(causal);
    if (t % 3 == 1) start[t] = static_cast<int32_t>(z % causal);
    if (t % 3 == 2) {
      start[t] = static_cast<int32_t>(z % (keys + 20)) - 10;
      end[t] = static_cast<int32_t>(start[t] + sizes[t / 3 % 5]);
    }
    if (t % 37 == 5) start[t] = -2147483647, end[t] = 2147483647;
    if (t % 41 == 6) start[t] = 2147483647, end[t] = -2147483647;
  }
  return {start, end};
}

/// Query t sees keys [0, t].
struct CausalWindows {
  Device<int32_t> start, end;

  explicit CausalWindows(int64_t T)
      : start(std::vector<int32_t>(T, 0)), end(one_to(T)) {}

 private:
  static std::vector<int32_t> one_to(int64_t last) {
    std::vector<int32_t> numbers(last);
    std::iota(numbers.begin(), numbers.end(), 1);
    return numbers;
  }
};

}  // namespace longspan::test
