#include "longspan/core/document_runs.h"

#include <algorithm>

#include "longspan/core/detail/check.h"

namespace longspan {

std::vector<DocumentRun> runs_of(const Packing& packing,
                                 const Ownership& ownership, int rank) {
  check(packing.tokens() == ownership.tokens(), "runs_of: a packing of ",
        packing.tokens(), " tokens over an ownership of ", ownership.tokens(),
        "; both must have the same tokens");
  const auto offsets = packing.offsets();
  std::vector<DocumentRun> runs;
  int64_t local = 0;
  for (TokenRange held : ownership.ranges_of(rank)) {
    // The first document that ends behind the first token held.
    auto document =
        std::ranges::upper_bound(offsets, held.begin) - offsets.begin() - 1;
    for (;
         document < packing.documents() && packing.offset(document) < held.end;
         ++document) {
      const TokenRange real = packing.real(document);
      const TokenRange tokens = intersect(held, real);
      if (tokens.empty()) continue;
      DocumentRun run{.document = document,
                      .tokens = tokens,
                      .local = local + (tokens.begin - held.begin),
                      .position = tokens.begin - real.begin};
      if (run.position > 0) {
        const auto [owner, range] = ownership.holding(tokens.begin - 1);
        run.before_rank = owner;
        run.before = {std::max(range.begin, real.begin), tokens.begin};
      }
      runs.push_back(run);
    }
    local += held.size();
  }
  return runs;
}

}  // namespace longspan
