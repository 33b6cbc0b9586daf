#pragma once

#include <bit>
#include <cstdint>

#include "longspan/kernels/common/ampere/lanes.cuh"
#include "longspan/kernels/common/element.h"

/// Stands before longspan/kernels/common/hopper/ptx.cuh: the same functions,
/// for the machine on paper.
namespace longspan::hopper {

inline uint32_t shared_address(const void* p) {
  return __cvta_generic_to_shared(p);
}

inline int thread_anew() {
  return static_cast<int>(threadIdx.x);
}

inline void barrier_init(uint32_t barrier, int arrivals) {
  machine::barrier_init(barrier, arrivals);
}
inline void barrier_init_fence() {}
inline void barrier_arrive(uint32_t barrier) {
  machine::barrier_arrive(barrier, 0);
}
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  machine::barrier_wait(barrier, parity);
}
inline void barrier_wait_both(uint32_t one, uint32_t parity, uint32_t other,
                              uint32_t other_parity) {
  barrier_wait(one, parity);
  barrier_wait(other, other_parity);
}
inline void meet(int number, int threads) {
  machine::meet(number, threads, true);
}
inline void announce(int number, int threads) {
  machine::meet(number, threads, false);
}
inline bool meet_any(int number, int threads, bool x) {
  return machine::meet_any(number, threads, x);
}

inline void fence_for_wgmma() {
  machine::fence_async();
}

/// Matrix i of the four: its row r comes from lanes 4 r to 4 r + 3 and goes
/// where lane 8 i + r says.
inline void store_tiles(uint32_t to, const uint32_t (&x)[4]) {
  const auto* words = machine::meet_lanes({{0, x[0], x[1], x[2], x[3]}});
  const int matrix = machine::lane() / 8, row = machine::lane() % 8;
  uint32_t line[4];
  for (int i = 0; i < 4; ++i) {
    line[i] = static_cast<uint32_t>(words[4 * row + i].word[1 + matrix]);
  }
  machine::write_shared(to, line, sizeof line);
}
inline void store_pair(uint32_t to, float x, float y) {
  const float pair[2] = {x, y};
  machine::write_shared(to, pair, sizeof pair);
}
inline uint4 load_piece(uint32_t from) {
  uint4 x;
  std::memcpy(&x, machine::shared_at(from, sizeof x), sizeof x);
  return x;
}
inline uint32_t load_word(uint32_t from) {
  uint32_t x;
  std::memcpy(&x, machine::shared_at(from, sizeof x), sizeof x);
  return x;
}
inline void store_word(uint32_t to, uint32_t x) {
  machine::write_shared(to, &x, sizeof x);
}
inline void store_piece(uint32_t to, uint4 x) {
  machine::write_shared(to, &x, sizeof x);
}

inline void add_to(float* to, float a, float b) {
  to[0] += a;
  to[1] += b;
}

inline int wait_for_number(const int* at, int least) {
  machine::wait_for_number(at, least);
  return *at;
}
inline void tell_number(int* at, int x) {
  *at = x;
}
inline void count_up(int* at) {
  ++*at;
}

template <int kRegisters>
void take_registers() {}
template <int kRegisters>
void give_registers() {}

/// To the nearest, ties to even; NaN stays one.
inline uint32_t bf16_bits(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  if (x != x) return 0x7FC0;
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
/// Likewise; what is too large is infinite, what is small subnormal.
inline uint32_t f16_bits(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7FFFFFFF;
  if (x != x) return 0x7FFF;
  if (size >= std::bit_cast<uint32_t>(65520.f)) return sign | 0x7C00;
  if (size >= std::bit_cast<uint32_t>(0x1p-14f)) {
    return sign | (((size + 0xFFF + (size >> 13 & 1)) >> 13) - (112 << 10));
  }
  return sign | static_cast<uint32_t>(
                    std::nearbyint(std::bit_cast<float>(size) * 0x1p24f));
}
template <ElementType kType = ElementType::bfloat16>
uint32_t pack_pair(float low, float high) {
  if (kType == ElementType::float16) {
    return f16_bits(low) | f16_bits(high) << 16;
  }
  return bf16_bits(low) | bf16_bits(high) << 16;
}

/// Each half by itself; NaN is all ones.
template <ElementType kType>
uint32_t add_nothing_of(uint32_t pair, uint32_t sum) {
  const uint32_t largest = kType == ElementType::float16 ? 0x7C00 : 0x7F80;
  for (const int shift : {0, 16}) {
    if ((pair >> shift & largest) == largest) sum |= 0xFFFFu << shift;
  }
  return sum;
}

}  // namespace longspan::hopper
