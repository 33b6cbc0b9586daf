#pragma once

#include <cstdint>

#include "longspan/kernels/common/element.h"
#include "longspan/kernels/common/hopper/operand.cuh"

namespace longspan::hopper {

/// Matrix products of a warpgroup, 64 rows of A at a time: D += A B in float
/// from bfloat16 or float16, kType. B, and A unless it comes in registers, lie
/// in shared memory as blocks of 64 channels: a row of a block is 128 bytes,
/// its 16-byte pieces stand at place (piece ^ row % 8), and blocks start at
/// multiples of 1024.
///
/// D of a thread (warp w, lane l): d[4 * j + 2 * i + e] is row
/// 16 w + l / 4 + 8 i and column 8 j + 2 (l % 4) + e.

__device__ __forceinline__ void check_shared_base(uint32_t base) {
  if ((base & 0xFFFFFF) != kSharedBase) __trap();
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/// Waits until at most kLeft committed groups are under way.
template <int kLeft>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

/// Keeps the compiler from moving uses of registers over this point.
template <class Register, int kCount>
__device__ __forceinline__ void pin(Register (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (static_cast<Register>(0.5f) != static_cast<Register>(0)) {
      asm volatile("" : "+f"(x[i])::"memory");
    } else {
      asm volatile("" : "+r"(x[i])::"memory");
    }
  }
}

// clang-format off

// How an instruction calls the sums of a thread, and what they are.
#define LONGSPAN_NAMES_16 \
  "%0, %1, %2, %3, %4, %5, %6, %7" \
  ", %8, %9, %10, %11, %12, %13, %14, %15"
#define LONGSPAN_NAMES_24 \
  LONGSPAN_NAMES_16 \
  ", %16, %17, %18, %19, %20, %21, %22, %23"
#define LONGSPAN_NAMES_32 \
  LONGSPAN_NAMES_24 \
  ", %24, %25, %26, %27, %28, %29, %30, %31"
#define LONGSPAN_NAMES_64 \
  LONGSPAN_NAMES_32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39" \
  ", %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55" \
  ", %56, %57, %58, %59, %60, %61, %62, %63"
#define LONGSPAN_NAMES_128 \
  LONGSPAN_NAMES_64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71" \
  ", %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87" \
  ", %88, %89, %90, %91, %92, %93, %94, %95" \
  ", %96, %97, %98, %99, %100, %101, %102, %103" \
  ", %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119" \
  ", %120, %121, %122, %123, %124, %125, %126, %127"
#define LONGSPAN_SUMS_8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
  "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define LONGSPAN_SUMS_16(i) LONGSPAN_SUMS_8(i), LONGSPAN_SUMS_8(i + 8)
#define LONGSPAN_SUMS_24(i) LONGSPAN_SUMS_16(i), LONGSPAN_SUMS_8(i + 16)
#define LONGSPAN_SUMS_32(i) LONGSPAN_SUMS_16(i), LONGSPAN_SUMS_16(i + 16)
#define LONGSPAN_SUMS_64(i) LONGSPAN_SUMS_32(i), LONGSPAN_SUMS_32(i + 32)
#define LONGSPAN_SUMS_128(i) LONGSPAN_SUMS_64(i), LONGSPAN_SUMS_64(i + 64)

// One instruction: its columns and types, how many sums a thread has, what it
// calls the operands after them, whether it adds, and which of them lie across;
// then what they are.
#define LONGSPAN_PRODUCT(columns, types, count, operands, adds, across, ...) \
  asm volatile( \
      "{ .reg .pred p; setp.ne.b32 p, " adds ", 0;\n" \
      "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." types " {" \
      LONGSPAN_NAMES_##count "}, " operands ", p, 1, 1, " across "; }" \
      : LONGSPAN_SUMS_##count(0) \
      : __VA_ARGS__)

// A in shared memory.
#define LONGSPAN_SHARED_PRODUCT(columns, count, operands, adds, across) \
  template <int kAcrossA, int kAcrossB, \
            ElementType kType = ElementType::bfloat16> \
  __device__ __forceinline__ void wgmma(float (&d)[count], uint64_t a, \
                                        uint64_t b, int add = 1) { \
    if constexpr (kType == ElementType::float16) { \
      LONGSPAN_PRODUCT(columns, "f16.f16", count, operands, adds, across, \
                       "l"(a), "l"(b), "r"(add), "n"(kAcrossA), \
                       "n"(kAcrossB)); \
    } else { \
      LONGSPAN_PRODUCT(columns, "bf16.bf16", count, operands, adds, across, \
                       "l"(a), "l"(b), "r"(add), "n"(kAcrossA), \
                       "n"(kAcrossB)); \
    } \
  }

// A in registers.
#define LONGSPAN_REGISTER_PRODUCT(columns, count, operands, adds, across) \
  template <int kAcrossB, ElementType kType = ElementType::bfloat16> \
  __device__ __forceinline__ void wgmma(float (&d)[count], \
                                        const uint32_t (&a)[4], uint64_t b, \
                                        int add = 1) { \
    if constexpr (kType == ElementType::float16) { \
      LONGSPAN_PRODUCT(columns, "f16.f16", count, operands, adds, across, \
                       "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), \
                       "r"(add), "n"(kAcrossB)); \
    } else { \
      LONGSPAN_PRODUCT(columns, "bf16.bf16", count, operands, adds, across, \
                       "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), \
                       "r"(add), "n"(kAcrossB)); \
    } \
  }

/// 32 to 256 columns. kAcrossA, kAcrossB: the operand is `across_channels`.
LONGSPAN_SHARED_PRODUCT("32", 16, "%16, %17", "%18", "%19, %20")
LONGSPAN_SHARED_PRODUCT("48", 24, "%24, %25", "%26", "%27, %28")
LONGSPAN_SHARED_PRODUCT("64", 32, "%32, %33", "%34", "%35, %36")
LONGSPAN_SHARED_PRODUCT("128", 64, "%64, %65", "%66", "%67, %68")
LONGSPAN_SHARED_PRODUCT("256", 128, "%128, %129", "%130", "%131, %132")

/// D (+)= A B with A in registers, in the order of D's fragment.
LONGSPAN_REGISTER_PRODUCT("64", 32, "{%32, %33, %34, %35}, %36", "%37",
                          "%38")
LONGSPAN_REGISTER_PRODUCT("128", 64, "{%64, %65, %66, %67}, %68", "%69",
                          "%70")
LONGSPAN_REGISTER_PRODUCT("256", 128, "{%128, %129, %130, %131}, %132", "%133",
                          "%134")

#undef LONGSPAN_REGISTER_PRODUCT
#undef LONGSPAN_SHARED_PRODUCT
#undef LONGSPAN_PRODUCT
#undef LONGSPAN_SUMS_128
#undef LONGSPAN_SUMS_64
#undef LONGSPAN_SUMS_32
#undef LONGSPAN_SUMS_24
#undef LONGSPAN_SUMS_16
#undef LONGSPAN_SUMS_8
#undef LONGSPAN_NAMES_128
#undef LONGSPAN_NAMES_64
#undef LONGSPAN_NAMES_32
#undef LONGSPAN_NAMES_24
#undef LONGSPAN_NAMES_16
// clang-format on

}  // namespace longspan::hopper
