#pragma once

#include "longspan/kernels/attend_selected/cpu/simd/heads.h"
#include "longspan/kernels/attention/cpu/bf16/scores.h"
#include "longspan/kernels/common/cpu/bf16/pack.h"

/// Brings listed rows and the heads of a query into the layouts of a product's
/// operands.
namespace longspan {
namespace {

/// A block of listed keys: A, [keys, head_dim], and B, pairs of keys by
/// channel, of as many channels as the gatherer asked for.
struct GatheredKeys {
  uint16_t* rows = nullptr;
  uint32_t* pairs = nullptr;
  int64_t row_stride = 0, pair_stride = 0;

  GatheredKeys() = default;
  GatheredKeys(const SelectedAttentionArgs& args, int paired, Carver& carver)
      : row_stride(row_length<uint16_t>(args.head_dim)),
        pair_stride(row_length<uint32_t>(rounded_up(paired, kDepthStep))) {
    rows = carver.take<uint16_t>(kKeysAtOnce * row_stride);
    pairs = carver.take<uint32_t>(kKeysAtOnce / 2 * pair_stride);
  }
};

/// Copies two rows of n channels, 0 up to a multiple of 32, and lays channels
/// below `paired` side by side. A missing row is 0.
inline void gather_two(const uint16_t* even, const uint16_t* odd, int n,
                       int paired, uint16_t* rows, int64_t row_stride,
                       uint32_t* pairs) {
#ifdef __AVX512BW__
  alignas(64) static constexpr uint16_t kLow[32] = {
      0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
      8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(kLow);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int c = 0; c < n; c += 32) {
    const __mmask32 left = n - c < 32 ? (1u << (n - c)) - 1 : ~0u;
    const __m512i a = _mm512_maskz_loadu_epi16(left, even + c);
    const __m512i b = odd == nullptr ? _mm512_setzero_si512()
                                     : _mm512_maskz_loadu_epi16(left, odd + c);
    _mm512_storeu_si512(rows + c, a);
    _mm512_storeu_si512(rows + row_stride + c, b);
    if (c >= paired) continue;
    _mm512_storeu_si512(pairs + c, _mm512_permutex2var_epi16(a, low, b));
    _mm512_storeu_si512(pairs + c + 16, _mm512_permutex2var_epi16(a, high, b));
  }
#else
  for (int c = 0; c < rounded_up(n, kDepthStep); ++c) {
    const uint16_t a = c < n ? even[c] : 0;
    const uint16_t b = c < n && odd != nullptr ? odd[c] : 0;
    rows[c] = a;
    rows[row_stride + c] = b;
    if (c < rounded_up(paired, kDepthStep)) {
      pairs[c] = a | static_cast<uint32_t>(b) << 16;
    }
  }
#endif
}

/// Listed keys [first, first + count), and zeros up to a multiple of 32.
inline void gather_pairs(const SelectedAttentionArgs& args,
                         const SelectedKeys& list, int64_t first, int count,
                         int paired, const GatheredKeys& to) {
  constexpr int kAhead = 16;
  int i = 0;
  for (; i < count; i += 2) {
    prefetch_listed<uint16_t>(args, list, first + i + kAhead,
                              first + i + kAhead + 2);
    const uint16_t* even = key_row<uint16_t>(args, list, first + i);
    const uint16_t* odd =
        i + 1 < count ? key_row<uint16_t>(args, list, first + i + 1) : nullptr;
    gather_two(even, odd, args.head_dim, paired, to.rows + i * to.row_stride,
               to.row_stride, to.pairs + i / 2 * to.pair_stride);
  }
  const int whole = rounded_up(args.head_dim, kDepthStep);
  for (; i < rounded_up(count, kDepthStep); i += 2) {
    for (int c = 0; c < whole; ++c) {
      to.rows[i * to.row_stride + c] = to.rows[(i + 1) * to.row_stride + c] = 0;
    }
    for (int c = 0; c < rounded_up(paired, kDepthStep); ++c) {
      to.pairs[i / 2 * to.pair_stride + c] = 0;
    }
  }
}

/// Heads of one query as columns; `rows` is where they pass through and stay
/// as rows, in whole steps of 32.
inline void pack_heads(const TokenArray<const void*>& array,
                       const SelectedKeys& list, const HeadPanel& panel, int n,
                       const GatheredKeys& rows, uint32_t* columns) {
  copy_rows(bf16_place(array, list.row, list.query, panel.first),
            array.head_stride, panel.count, rounded_up(panel.count, kDepthStep),
            n, rows.rows, rows.row_stride);
  pairs_of_channels(rows.rows, rows.row_stride,
                    rounded_up(panel.count, kSideStep), n, columns, kPanel);
}

}  // namespace
}  // namespace longspan
