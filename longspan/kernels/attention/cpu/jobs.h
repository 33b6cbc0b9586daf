#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>

#include "longspan/kernels/attention/attention.h"
#include "longspan/kernels/attention/cpu/blocks.h"

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

inline int64_t accumulator_bytes(ElementType type) {
  return type == ElementType::float64 ? 8 : 4;
}

/// First, last, second, last but one, ...: any run of jobs then has about its
/// share of a causal mask.
inline int64_t from_both_ends(int64_t i, int64_t count) {
  return i % 2 == 0 ? i / 2 : count - 1 - i / 2;
}

/// Uninitialized memory that starts at a cache line.
class AlignedBytes {
 public:
  explicit AlignedBytes(int64_t bytes)
      : data_(static_cast<std::byte*>(::operator new(
            static_cast<std::size_t>(bytes), std::align_val_t{64}))) {}
  ~AlignedBytes() { ::operator delete(data_, std::align_val_t{64}); }
  AlignedBytes(const AlignedBytes&) = delete;
  AlignedBytes& operator=(const AlignedBytes&) = delete;

  std::byte* data() const { return data_; }

 private:
  std::byte* data_;
};

}  // namespace longspan
