#include "longspan/core/multiple.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <numeric>

#include "longspan/core/detail/check.h"

namespace longspan {

int64_t round_up(int64_t value, int64_t multiple) {
  check(multiple > 0, "round_up: multiple is ", multiple,
        "; expected at least 1");
  check(value >= 0, "round_up: value is ", value, "; expected at least 0");
  const int64_t rest = value % multiple;
  if (rest == 0) return value;
  check(value <= std::numeric_limits<int64_t>::max() - (multiple - rest),
        "round_up: ", value, " has no multiple of ", multiple, " in 64 bits");
  return value + (multiple - rest);
}

int64_t common_multiple(int64_t a, int64_t b) {
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
  check(a != kLeast && b != kLeast, "common_multiple: ", kLeast,
        " has none in 64 bits");
  if (a == 0 || b == 0) return std::max(a, b);
  const int64_t step = std::abs(a) / std::gcd(a, b);
  check(step <= std::numeric_limits<int64_t>::max() / std::abs(b),
        "common_multiple: ", a, " and ", b, " have none in 64 bits");
  return step * std::abs(b);
}

int64_t share_multiple(const std::vector<int64_t>& ratios) {
  int64_t multiple = 1;
  for (int64_t ratio : ratios) {
    if (ratio <= 0) continue;
    multiple = common_multiple(multiple, ratio == 4 ? 2 * ratio : ratio);
  }
  return multiple;
}

}  // namespace longspan
