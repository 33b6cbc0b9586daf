#pragma once

#include <algorithm>
#include <cstdint>

#include "longspan/kernels/attention/attention.h"
#include "longspan/kernels/attention/cpu/blocks.h"
#include "longspan/kernels/common/cpu/jobs.h"

namespace longspan {

/// Key heads that the query heads of a call use.
inline int64_t key_heads_of(const AttentionArgs& args) {
  if (args.heads == 0) return 0;
  return (args.heads - 1 + args.head_offset) / args.heads_per_key_head + 1;
}

/// Query heads that use a key head, as a range.
inline TokenRange heads_of(const AttentionArgs& args, int64_t key_head) {
  const int64_t first = key_head * args.heads_per_key_head - args.head_offset;
  return {std::max<int64_t>(first, 0),
          std::min(first + args.heads_per_key_head, args.heads)};
}

inline int64_t query_blocks_of(const AttentionArgs& args) {
  return (args.queries + kBlock - 1) / kBlock;
}

inline int queries_in_block(const AttentionArgs& args, int64_t block) {
  return static_cast<int>(
      std::min<int64_t>(kBlock, args.queries - block * kBlock));
}

}  // namespace longspan
