#pragma once

#include <cstdint>
#include <functional>

namespace longspan {

/// Runs body(begin, end) over disjoint parts of [0, items), possibly on several
/// threads, and returns when all are done. Parts have at least `grain` items
/// where there are that many. torch's pool at the edge, a plain loop in tests.
using ParallelFor =
    std::function<void(int64_t items, int64_t grain,
                       const std::function<void(int64_t, int64_t)>& body)>;

/// One thread, one part.
inline void serial_for(int64_t items, int64_t /*grain*/,
                       const std::function<void(int64_t, int64_t)>& body) {
  if (items > 0) body(0, items);
}

}  // namespace longspan
