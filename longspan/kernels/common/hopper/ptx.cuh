#pragma once

#include <cstdint>

#include "longspan/kernels/common/ampere/lanes.cuh"
#include "longspan/kernels/common/element.h"

namespace longspan::hopper {

/// The instructions of sm_90a that C++ has no words for, one function each.

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

/// threadIdx.x, read where it is used: what follows from it is kept in no
/// register before.
__device__ __forceinline__ int thread_anew() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// ---- Barriers in shared memory -------------------------------------------

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier),
               "r"(arrivals)
               : "memory");
}

/// Makes initialised barriers visible to asynchronous instructions.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier)
               : "memory");
}

/// Arrives if `does`, without a branch between products that are under way.
__device__ __forceinline__ void barrier_arrive_if(bool does, uint32_t barrier) {
  asm volatile(
      "{ .reg .pred p;\n"
      "setp.ne.b32 p, %1, 0;\n"
      "@p mbarrier.arrive.shared::cta.b64 _, [%0]; }" ::"r"(barrier),
      "r"(static_cast<int>(does))
      : "memory");
}

/// Arrives once everything this thread copied before has landed.
__device__ __forceinline__ void barrier_arrive_copies(uint32_t barrier) {
  asm volatile(
      "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier)
      : "memory");
}

__device__ __forceinline__ bool barrier_try(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{ .reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

/// Waits until the phase of that parity is complete. A barrier that nobody
/// completes is a bug, and traps after seconds; with a loop that only this ends
/// early, ptxas also leaves products under way alone (13.0 serialises those of
/// the score kernel around a bare loop).
__device__ __forceinline__ void barrier_wait(uint32_t barrier,
                                             uint32_t parity) {
  for (int polls = 0; !barrier_try(barrier, parity); ++polls) {
    if (polls > 1 << 28) __trap();
  }
}

/// Waits for two, and asks both at once.
__device__ __forceinline__ void barrier_wait_both(uint32_t one, uint32_t parity,
                                                  uint32_t other,
                                                  uint32_t other_parity) {
  const bool there = barrier_try(one, parity);
  const bool other_there = barrier_try(other, other_parity);
  if (there && other_there) return;
  barrier_wait(one, parity);
  barrier_wait(other, other_parity);
}

// ---- Barriers by number, of some warps of a block ------------------------

__device__ __forceinline__ void meet(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

/// Counts as one that meets, and goes on.
__device__ __forceinline__ void announce(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

/// Meets, and says whether x was true for anybody.
__device__ __forceinline__ bool meet_any(int number, int threads, bool x) {
  uint32_t any;
  asm volatile(
      "{ .reg .pred p, q;\n"
      "setp.ne.b32 q, %3, 0;\n"
      "bar.red.or.pred p, %1, %2, q;\n"
      "selp.u32 %0, 1, 0, p; }"
      : "=r"(any)
      : "r"(number), "r"(threads), "r"(static_cast<int>(x))
      : "memory");
  return any != 0;
}

// ---- Copies --------------------------------------------------------------

/// 16 bytes of device memory to shared memory; zeros, and nothing read, when
/// not `there`.
__device__ __forceinline__ void copy_16(uint32_t to, const void* from,
                                        bool there) {
  asm volatile(
      "cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to),
      "l"(from), "r"(there ? 16 : 0)
      : "memory");
}

/// Between ordinary writes of shared memory and wgmma that reads them.
__device__ __forceinline__ void fence_for_wgmma() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Four 8x8 tiles of 16 bits from fragments to shared memory.
__device__ __forceinline__ void store_tiles(uint32_t to,
                                            const uint32_t (&x)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
          to),
      "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
      : "memory");
}

/// Two floats to shared memory.
__device__ __forceinline__ void store_pair(uint32_t to, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y)
               : "memory");
}

/// 16 bytes of shared memory, and 4.
__device__ __forceinline__ uint4 load_piece(uint32_t from) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(from)
               : "memory");
  return x;
}

__device__ __forceinline__ uint32_t load_word(uint32_t from) {
  uint32_t x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
  return x;
}

__device__ __forceinline__ void store_word(uint32_t to, uint32_t x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

__device__ __forceinline__ void store_piece(uint32_t to, uint4 x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x),
               "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

/// Stores without a branch.
__device__ __forceinline__ void store_if(bool does, float* to, float x) {
  asm volatile(
      "{ .reg .pred p;\n"
      "setp.ne.b32 p, %2, 0;\n"
      "@p st.global.f32 [%0], %1; }" ::"l"(to),
      "f"(x), "r"(static_cast<int>(does))
      : "memory");
}

__device__ __forceinline__ void store_if(bool does, float* to, float x,
                                         float y) {
  asm volatile(
      "{ .reg .pred p;\n"
      "setp.ne.b32 p, %3, 0;\n"
      "@p st.global.v2.f32 [%0], {%1, %2}; }" ::"l"(to),
      "f"(x), "f"(y), "r"(static_cast<int>(does))
      : "memory");
}

/// Adds to floats in device memory, in any order with others that do.
__device__ __forceinline__ void add_to(float* to, float a, float b) {
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(a), "f"(b)
               : "memory");
}

__device__ __forceinline__ void add_to(float* to, float a, float b, float c,
                                       float d) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to),
               "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}

// ---- Numbers in device memory, between blocks of threads ------------------

/// Waits until a number that only grows is at least `least`, and says what it
/// is. What its writer did before is then done, also for the copy engine.
__device__ __forceinline__ int wait_for_number(const int* at, int least) {
  int found;
  for (int polls = 0;; ++polls) {
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];"
                 : "=r"(found)
                 : "l"(at)
                 : "memory");
    if (found >= least) break;
    if (polls > 1 << 26) __trap();
  }
  asm volatile("fence.proxy.async.global;" ::: "memory");
  return found;
}

/// Writes it, after all that this thread did and waited for: what the copy
/// engine did is there once it was waited for.
__device__ __forceinline__ void tell_number(int* at, int x) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(at), "r"(x)
               : "memory");
}

/// Adds one to it, after all that this warp did before it met.
__device__ __forceinline__ void count_up(int* at) {
  asm volatile(
      "fence.acq_rel.gpu;\n"
      "red.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(at)
      : "memory");
}

// ---- Registers of a warpgroup --------------------------------------------

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- Arithmetic ----------------------------------------------------------

/// Two elements in a word, `low` in the lower half; what exceeds float16 is
/// infinite.
template <ElementType kType = ElementType::bfloat16>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  uint32_t y;
  if constexpr (kType == ElementType::float16) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  }
  return y;
}

/// sum + 0 * pair, both of two elements: a sum that began with 0 stays that, or
/// is NaN once an element was infinite or NaN.
template <ElementType kType>
__device__ __forceinline__ uint32_t add_nothing_of(uint32_t pair,
                                                   uint32_t sum) {
  uint32_t y;
  if constexpr (kType == ElementType::float16) {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(pair), "r"(0), "r"(sum));
  } else {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;"
        : "=r"(y)
        : "r"(pair), "r"(0), "r"(sum));
  }
  return y;
}

}  // namespace longspan::hopper
