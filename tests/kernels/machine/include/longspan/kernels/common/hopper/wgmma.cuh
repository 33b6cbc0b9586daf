#pragma once

#include <cstdint>

#include "longspan/kernels/common/hopper/operand.cuh"
#include "longspan/kernels/common/hopper/ptx.cuh"

/// Stands before longspan/kernels/common/hopper/wgmma.cuh.
namespace longspan::hopper {

static_assert(kSharedBase == machine::kFirstAddress);

inline void check_shared_base(uint32_t base) {
  if (base != kSharedBase) __trap();
}

inline void wgmma_fence() {
  machine::wgmma_fence();
}
inline void wgmma_commit() {
  machine::wgmma_commit();
}
template <int kLeft>
void wgmma_wait() {
  machine::wgmma_wait(kLeft);
}
template <class Register, int kCount>
void pin(Register (&)[kCount]) {}

template <int kAcrossA, int kAcrossB, ElementType kType = ElementType::bfloat16,
          int kCount>
void wgmma(float (&d)[kCount], uint64_t a, uint64_t b, int add = 1) {
  machine::multiply({.columns = 2 * kCount,
                     .type = kType,
                     .across_a = kAcrossA != 0,
                     .across_b = kAcrossB != 0,
                     .adds = add != 0,
                     .a = a,
                     .b = b},
                    d, nullptr);
}
template <int kAcrossB, ElementType kType = ElementType::bfloat16, int kCount>
void wgmma(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b,
           int add = 1) {
  machine::multiply({.columns = 2 * kCount,
                     .type = kType,
                     .in_registers = true,
                     .across_b = kAcrossB != 0,
                     .adds = add != 0,
                     .b = b},
                    d, a);
}

}  // namespace longspan::hopper
