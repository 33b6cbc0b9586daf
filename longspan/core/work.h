#pragma once

#include <cstdint>
#include <vector>

#include "longspan/core/ownership.h"

namespace longspan {

class Mask;

/// Heads and channels of one attention layer.
struct AttentionShape {
  int64_t heads = 1;
  int64_t key_heads = 1;
  int64_t head_dim = 128;
  int64_t value_dim = 128;
  int64_t bytes_per_element = 2;
};

/// What one rank has to do, counted in tokens and pairs.
struct RankWork {
  int64_t tokens = 0;        ///< held by the rank
  int64_t pairs = 0;         ///< visible query-key pairs of its queries
  int64_t foreign_keys = 0;  ///< keys of other ranks that it needs
};

/// Queries and keys share the ownership (masks whose keys are tokens). Cost:
/// O(ranges of the rank x log documents).
RankWork work_of(const Mask& mask, const Ownership& ownership, int rank);
std::vector<RankWork> work_per_rank(const Mask& mask,
                                    const Ownership& ownership);

/// Floating-point operations of the forward pass over `pairs` pairs.
int64_t forward_flops(int64_t pairs, const AttentionShape& shape);

/// Bytes of the keys and values of `tokens` tokens.
int64_t key_value_bytes(int64_t tokens, const AttentionShape& shape);

/// Bytes that a rank receives in the forward pass: every foreign token (ring,
/// gathered), or only those that one of its queries sees (needed).
int64_t received_bytes_all(const Ownership& ownership, int rank,
                           const AttentionShape& shape);
int64_t received_bytes_needed(const RankWork& work,
                              const AttentionShape& shape);

}  // namespace longspan
