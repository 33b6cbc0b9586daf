#pragma once

#include "longspan/kernels/common/cpu/bf16/lanes.h"

/// Turns blocks of 16 x 16 words of 4 bytes.
namespace longspan {
namespace {

#ifdef __AVX512F__

/// Rows of 16 words become columns.
inline void transpose_registers(__m512i (&row)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    row[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    row[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    row[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    row[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i a = row[i], b = row[i + 4], c = row[i + 8], d = row[i + 12];
    const __m512i ab_even = _mm512_shuffle_i32x4(a, b, 0x88);
    const __m512i ab_odd = _mm512_shuffle_i32x4(a, b, 0xdd);
    const __m512i cd_even = _mm512_shuffle_i32x4(c, d, 0x88);
    const __m512i cd_odd = _mm512_shuffle_i32x4(c, d, 0xdd);
    t[i] = _mm512_shuffle_i32x4(ab_even, cd_even, 0x88);
    t[i + 8] = _mm512_shuffle_i32x4(ab_even, cd_even, 0xdd);
    t[i + 4] = _mm512_shuffle_i32x4(ab_odd, cd_odd, 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(ab_odd, cd_odd, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) row[i] = t[i];
}

/// Strides count bytes.
inline void transpose_block(const void* from, int64_t from_stride, void* to,
                            int64_t to_stride) {
  __m512i row[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    row[i] =
        _mm512_loadu_si512(static_cast<const char*>(from) + i * from_stride);
  }
  transpose_registers(row);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    _mm512_storeu_si512(static_cast<char*>(to) + i * to_stride, row[i]);
  }
}

/// Transposes pairs of rows of bfloat16: word j of row i is made of elements
/// j of rows 2 i and 2 i + 1.
inline void transpose_row_pairs(const uint16_t* from, int64_t from_stride,
                                void* to, int64_t to_stride) {
  __m512i row[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    const auto half = [&](int which) {
      return _mm512_cvtepu16_epi32(
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(
              from + (2 * i + which) * from_stride)));
    };
    row[i] = _mm512_or_si512(half(0), _mm512_slli_epi32(half(1), 16));
  }
  transpose_registers(row);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    _mm512_storeu_si512(static_cast<char*>(to) + i * to_stride, row[i]);
  }
}

#else

inline void transpose_block(const void* from, int64_t from_stride, void* to,
                            int64_t to_stride) {
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 16; ++j) {
      __builtin_memcpy(static_cast<char*>(to) + j * to_stride + 4 * i,
                       static_cast<const char*>(from) + i * from_stride + 4 * j,
                       4);
    }
  }
}

inline void transpose_row_pairs(const uint16_t* from, int64_t from_stride,
                                void* to, int64_t to_stride) {
  for (int i = 0; i < 32; ++i) {
    for (int j = 0; j < 16; ++j) {
      __builtin_memcpy(static_cast<char*>(to) + j * to_stride + 2 * i,
                       from + i * from_stride + j, 2);
    }
  }
}

#endif

}  // namespace
}  // namespace longspan
