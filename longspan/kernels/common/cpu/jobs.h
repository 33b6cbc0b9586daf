#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

#include "longspan/kernels/common/element.h"

/// How work is cut for the CPU: control flow only.
namespace longspan {

/// Queries and keys in a block. Scores of a block (64 x 64 floats) fit the
/// first cache, and the packed operands of a product the second.
inline constexpr int kBlock = 64;

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
