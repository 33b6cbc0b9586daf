#pragma once

#include <cstdint>

#include "longspan/kernels/common/hopper/ptx.cuh"

namespace longspan::hopper {

/// Boxes of a tensor, fetched by the copy engine: one thread asks, a barrier in
/// shared memory hears of the bytes. `map` is a CUtensorMap in the kernel's
/// arguments, its axes [row][head][token][channel], the last one fastest.

/// Arrives, and says how many bytes the barrier has to wait for.
__device__ __forceinline__ void barrier_expect(uint32_t barrier,
                                               uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
      "r"(bytes)
      : "memory");
}

/// What lies outside of the tensor arrives as zeros.
__device__ __forceinline__ void fetch_box(uint32_t to, const void* map,
                                          uint32_t barrier, int channel,
                                          int token, int head, int row) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx"
      "::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(channel), "r"(token), "r"(head), "r"(row)
      : "memory");
}

/// Adds a box of floats in shared memory to the tensor, in no order; what lies
/// outside of it is left away. The reads and the additions are asynchronous.
__device__ __forceinline__ void add_box(const void* map, uint32_t from,
                                        int channel, int token, int head,
                                        int row) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group "
      "[%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
      "r"(from), "r"(channel), "r"(token), "r"(head), "r"(row)
      : "memory");
}

__device__ __forceinline__ void boxes_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/// Waits until what this thread committed has been read from shared memory.
__device__ __forceinline__ void boxes_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

__device__ __forceinline__ void boxes_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

__device__ __forceinline__ void prefetch_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

}  // namespace longspan::hopper
