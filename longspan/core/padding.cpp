#include "longspan/core/padding.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "longspan/core/detail/check.h"
#include "longspan/core/multiple.h"

namespace longspan {

PadTo padding_for(OwnershipKind kind, int ranks, int64_t share) {
  check(share >= 1, "padding_for: shares of a multiple of ", share,
        " tokens; expected at least 1");
  const int64_t parts = tokens_multiple(kind, ranks);
  check(share <= std::numeric_limits<int64_t>::max() / ranks,
        "padding_for: shares of a multiple of ", share, " tokens on ", ranks,
        " ranks are more than 64 bits count");
  const int64_t multiple = common_multiple(parts, share * ranks);
  return kind == OwnershipKind::per_document_head_tail
             ? PadTo{.slot_multiple = multiple}
             : PadTo{.total_multiple = multiple};
}

Packing padded(const Packing& packing, const PadTo& to) {
  return packing.with_slots_multiple_of(to.slot_multiple)
      .with_tokens_multiple_of(to.total_multiple);
}

Packing lengthened(const Packing& packing, int64_t tokens) {
  std::vector<int64_t> slots;
  for (int64_t d = 0; d < packing.documents(); ++d) {
    slots.push_back(packing.padded_length(d));
  }
  const auto lengths = packing.lengths();
  return Packing::of({lengths.begin(), lengths.end()}, std::move(slots),
                     std::max(tokens, packing.tokens()));
}

int64_t pads_for(OwnershipKind kind, int64_t tokens, int ranks, int64_t share) {
  check(tokens >= 0, "pads_for: ", tokens, " tokens; expected 0 or more");
  return padded(Packing::single(tokens), padding_for(kind, ranks, share))
             .tokens() -
         tokens;
}

}  // namespace longspan
