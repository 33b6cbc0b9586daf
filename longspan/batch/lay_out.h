#pragma once

#include <cstdint>

#include "longspan/batch/pack.h"
#include "longspan/core/named_layout.h"

namespace longspan {

/// Lengthens a batch to what a layout needs over `ranks` ranks, with shares of
/// a multiple of `share` tokens; or to the tokens of an ownership, where it has
/// more.
PackedBatch pad(const PackedBatch& batch, const NamedLayout& layout, int ranks,
                int64_t share = 1);
PackedBatch pad(const PackedBatch& batch, const Ownership& ownership);

/// Rows that were packed, padded and given owners: what shard() then cuts.
struct LaidOut {
  PackedBatch packed;
  Ownership ownership;  ///< of the tokens of a padded row, or of the stream
};

/// For a named layout. Rows are all cut alike, whatever documents they
/// hold.
LaidOut lay_out(RowBatch batch, const NamedLayout& layout, int ranks,
                int64_t share = 1);

/// The layout that evens out the work of causal attention: per document where
/// several share a row and pads for that are less than 2 % of the tokens, else
/// head-tail.
const NamedLayout& fitting_layout(const RowBatch& batch, int ranks,
                                  int64_t share = 1);

/// For an ownership; pads go to the end.
LaidOut lay_out(RowBatch batch, const Ownership& ownership, Form form);

}  // namespace longspan
