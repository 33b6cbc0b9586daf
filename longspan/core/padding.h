#pragma once

#include <cstdint>

#include "longspan/core/ownership.h"
#include "longspan/core/packing.h"

namespace longspan {

/// What padding rounds up.
struct PadTo {
  int64_t slot_multiple = 1;   ///< every document of a stream
  int64_t total_multiple = 1;  ///< the stream, or every row
};

/// What an ownership kind needs over `ranks` ranks, where shares must also be
/// a multiple of `share` tokens.
PadTo padding_for(OwnershipKind kind, int ranks, int64_t share = 1);

/// The documents with slots and a stream of those multiples.
Packing padded(const Packing& packing, const PadTo& to);

/// The documents in a stream of `tokens` tokens, where there are fewer.
Packing lengthened(const Packing& packing, int64_t tokens);

/// Tokens to append to `tokens` so that they can be cut over `ranks` ranks.
int64_t pads_for(OwnershipKind kind, int64_t tokens, int ranks,
                 int64_t share = 1);

}  // namespace longspan
