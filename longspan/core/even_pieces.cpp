#include "longspan/core/detail/even_pieces.h"

#include <algorithm>
#include <functional>

#include "longspan/core/detail/check.h"
#include "longspan/core/detail/checked.h"
#include "longspan/core/mask.h"

namespace longspan {

namespace {

/// `before(t)` is the work of the first t queries.
std::vector<TokenRange> cut(int64_t tokens, int ranks,
                            const std::function<int64_t(int64_t)>& before) {
  check(ranks >= 1, "even_pieces: ", ranks, " ranks; expected one or more");
  const int64_t total = before(tokens);
  std::vector<TokenRange> pieces;
  int64_t begin = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    // total * (rank + 1) / ranks, rounded up, without that product.
    const int64_t share = total / ranks * (rank + 1) +
                          (total % ranks * (rank + 1) + ranks - 1) / ranks;
    int64_t low = begin, high = tokens;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (before(middle) < share) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    // The last one also takes those that see nothing.
    const int64_t end = rank + 1 == ranks ? tokens : low;
    pieces.push_back({begin, end});
    begin = end;
  }
  return pieces;
}

}  // namespace

std::vector<TokenRange> even_pieces(const std::vector<Mask>& masks, int ranks) {
  check(!masks.empty(), "even_pieces: no mask");
  const int64_t tokens = masks[0].queries();
  for (const Mask& mask : masks) {
    check(mask.queries() == tokens, "even_pieces: masks of ", tokens, " and ",
          mask.queries(), " queries");
  }
  return cut(tokens, ranks, [&](int64_t end) {
    Checked pairs("even_pieces", 0);
    for (const Mask& mask : masks) {
      pairs += mask.pairs({0, end}, {0, mask.keys()});
    }
    return pairs.value();
  });
}

std::vector<TokenRange> even_pieces(std::span<const int64_t> sums, int ranks) {
  return cut(std::ssize(sums), ranks, [&](int64_t end) {
    return end == 0 ? 0 : sums[static_cast<std::size_t>(end - 1)];
  });
}

}  // namespace longspan
