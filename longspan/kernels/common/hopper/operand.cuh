#pragma once

#include <cstdint>

namespace longspan::hopper {

/// How products of wgmma.cuh are told where their operands lie.

/// Where dynamic shared memory of a kernel without any other starts. Operands
/// whose places are known when it is compiled need no registers.
constexpr uint32_t kSharedBase = 1024;

/// Where an operand starts, when its rows (of A) or columns (of B) are rows of
/// the block; 16 deeper is 32 bytes further.
__device__ __forceinline__ uint64_t along_channels(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | (1ull << 16) |
         (64ull << 32) | (1ull << 62);
}

/// Where an operand starts, when its depth runs over rows of the block and its
/// rows or columns over channels, blocks `block_bytes` apart; 16 deeper is 2048
/// bytes further.
__device__ __forceinline__ uint64_t across_channels(uint32_t address,
                                                    uint32_t block_bytes) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) |
         (static_cast<uint64_t>(block_bytes >> 4) << 16) | (64ull << 32) |
         (1ull << 62);
}

}  // namespace longspan::hopper
