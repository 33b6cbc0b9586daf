#pragma once

#include <cstdint>
#include <vector>

#include "longspan/core/packing.h"
#include "longspan/core/token_range.h"

namespace longspan {

class Mask;

/// Facts about tokens, written to arrays that the caller owns: one entry for
/// each token of the ranges, in their order. All of them run over documents and
/// write whole stretches, so they cost about what filling the array costs.

/// Position inside the document; its pads count on, and the tail starts at 0.
void write_positions(const Packing& packing,
                     const std::vector<TokenRange>& ranges, int64_t* out);

/// 1 for the first document that has tokens, 2 for the next, ...; 0 for pads.
void write_document_ids(const Packing& packing,
                        const std::vector<TokenRange>& ranges, int64_t* out);

void write_pads(const Packing& packing, const std::vector<TokenRange>& ranges,
                bool* out);

/// keys_of(q) for every query of the range; [0, 0) for those that see nothing.
/// Only for masks whose keys are one range (error otherwise). The caller makes
/// sure that mask.keys() fits the 32-bit form.
void write_key_windows(const Mask& mask, TokenRange range, int32_t* begin,
                       int32_t* end);
void write_key_windows(const Mask& mask, TokenRange range, int64_t* begin,
                       int64_t* end);

}  // namespace longspan
