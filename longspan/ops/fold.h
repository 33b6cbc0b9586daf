#pragma once

#include <cstddef>
#include <span>

#include "longspan/kernels/fold/fold_parts.h"
#include "longspan/ops/partial_attention.h"

namespace longspan {

/// An answer about some tokens of all rows, the first of them `token`. Without
/// lse it is a plain addend.
struct PlacedPart {
  PartialAttention part;
  int64_t token = 0;
};

/// Writes `before` (unless null) and the parts, folded together, to `into`,
/// which may be `before`: in one pass of a kernel on CUDA. Returns false where
/// the kernel cannot run. Parts have one type, and are at most kMostFolded.
/// Tokens that no part covers become 0 and -inf.
inline constexpr std::size_t kMostFolded = FoldPartsArgs::kMostParts;
bool fold_on_device(const PartialAttention* before,
                    std::span<const PlacedPart> parts,
                    const PartialAttention& into);

}  // namespace longspan
