#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace longspan {

/// Index of the last entry that is <= value in an ascending list whose first
/// entry is <= value. The loop has no branch to mispredict.
inline int64_t last_not_above(const std::vector<int64_t>& ascending,
                              int64_t value) {
  const int64_t* base = ascending.data();
  std::size_t length = ascending.size();
  while (length > 1) {
    const std::size_t half = length / 2;
    base = base[half] <= value ? base + half : base;
    length -= half;
  }
  return base - ascending.data();
}

}  // namespace longspan
