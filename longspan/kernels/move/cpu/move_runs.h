#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "longspan/core/moves.h"
#include "longspan/kernels/common/parallel.h"

namespace longspan {

/// Copies tokens along one axis of a contiguous array, slice by slice.
struct MoveRunsArgs {
  const std::byte* source;  // [slices, source_tokens, token_bytes]
  std::byte* target;        // [slices, target_tokens, token_bytes]
  int64_t slices;           // product of the axes before the token axis
  int64_t source_tokens, target_tokens;
  int64_t token_bytes;              // of everything behind the token axis
  std::span<const Run> runs;        // ascending by target, disjoint, none empty
  std::span<const std::byte> fill;  // one element, repeated where no run writes
};

/// Any number of threads writes the same bytes.
void move_runs(const MoveRunsArgs& args, const ParallelFor& parallel_for);

}  // namespace longspan
