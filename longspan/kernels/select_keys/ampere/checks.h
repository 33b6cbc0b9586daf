#pragma once

#include <optional>
#include <string>

#include "longspan/kernels/common/ampere/launch.h"
#include "longspan/kernels/select_keys/select_keys.h"

namespace longspan::ampere {

/// Why a block cannot have that much shared memory, or nothing.
inline std::optional<std::string> why_not_shared(size_t bytes) {
  const size_t most = block_memory();
  if (bytes <= most) return std::nullopt;
  return "so many heads and channels take " + std::to_string(bytes) +
         " bytes of shared memory, the device has " + std::to_string(most);
}

/// What all kernels of the indexer ask.
inline std::optional<std::string> why_not_score(const KeyScoreArgs& args) {
  if (args.type != ElementType::bfloat16 && args.type != ElementType::float16) {
    return "elements are neither bfloat16 nor float16";
  }
  if (args.head_dim % 8 != 0 || args.head_dim > 256) {
    return "no kernel for " + std::to_string(args.head_dim) +
           " channels (has multiples of 8 up to 256)";
  }
  if (!fits_32_bits(args.rows * args.queries) || !fits_32_bits(args.keys) ||
      !fits_32_bits(args.slots) || !fits_32_bits(args.heads)) {
    return "more than 2^30 queries, keys, slots or heads";
  }
  if (!fits_32_bits(args.q.head_stride) || !fits_32_bits(args.k.token_stride)) {
    return "more than 2^30 elements from one head or key to the next";
  }
  if (!is_aligned(args.q) || !is_aligned(args.k)) {
    return "q or k is not aligned to 16 bytes";
  }
  return why_not_since(80);
}

}  // namespace longspan::ampere
