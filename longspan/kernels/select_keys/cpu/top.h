#pragma once

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include <type_traits>

#include "longspan/kernels/common/cpu/simd/vectors.h"
#include "longspan/kernels/select_keys/cpu/steps.h"

/// Finds the best of scores that pass by. As all arithmetic: internal linkage,
/// compiled for the instruction set of the including source.
namespace longspan {
namespace {

template <class T>
using Order = typename VectorTypes<T>::Integer;

/// Of no score: below that of -inf.
template <class T>
constexpr Order<T> kLowestOrder = Order<T>(1) << (8 * sizeof(T) - 1);

/// -0 becomes +0, and any NaN the one that is positive and quiet.
template <class T>
inline Vector<T> plain_score(Vector<T> score) {
  const Vector<T> zero = {};
  const Vector<T> nan = all_lanes(static_cast<T>(__builtin_nan("")));
  return score == score ? score + zero : nan;
}

/// Bits of a float ascend with its value, those of negative ones descend.
template <class T>
inline Choice<T> order_of(Vector<T> plain) {
  const auto bits = (Choice<T>)plain;
  return bits ^ ((bits >> (8 * sizeof(T) - 1)) & ~kLowestOrder<T>);
}

/// The order of one score.
template <class T>
inline Order<T> order_of(T score) {
  score = score == score ? score + T{0} : static_cast<T>(__builtin_nan(""));
  Order<T> bits;
  __builtin_memcpy(&bits, &score, sizeof bits);
  return bits ^ ((bits >> (8 * sizeof(T) - 1)) & ~kLowestOrder<T>);
}

/// Candidates of one query, with their types.
template <class T>
struct Appender {
  Order<T>* orders;
  int32_t* keys;
  int64_t size;
  Order<T> floor;

  explicit Appender(const Candidates& from)
      : orders(static_cast<Order<T>*>(from.orders)),
        keys(from.keys),
        size(from.size),
        floor(static_cast<Order<T>>(from.floor)) {}

  void add(Order<T> order, int32_t key) {
    orders[size] = order;
    keys[size] = key;
    size += order > floor;
  }

#ifdef __AVX512F__
  /// Lanes of `kept`, side by side. In registers: to compress into memory is
  /// slow on some CPUs.
  void put(Choice<float> order, __m512i key, uint32_t kept) {
    const auto mask = static_cast<__mmask16>(kept);
    _mm512_storeu_si512(orders + size,
                        _mm512_maskz_compress_epi32(mask, (__m512i)order));
    _mm512_storeu_si512(keys + size, _mm512_maskz_compress_epi32(mask, key));
    size += __builtin_popcount(kept);
  }
  void put(Choice<double> order, __m256i key, uint32_t kept) {
    const auto mask = static_cast<__mmask8>(kept);
    _mm512_storeu_si512(orders + size,
                        _mm512_maskz_compress_epi64(mask, (__m512i)order));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(keys + size),
                        _mm256_maskz_compress_epi32(mask, key));
    size += __builtin_popcount(kept);
  }
#endif
};

#ifdef __AVX512F__

inline uint32_t lanes_above(Choice<float> a, Choice<float> b) {
  return _mm512_cmpgt_epi32_mask((__m512i)a, (__m512i)b);
}
inline uint32_t lanes_above(Choice<double> a, Choice<double> b) {
  return _mm512_cmpgt_epi64_mask((__m512i)a, (__m512i)b);
}
inline __m512i keys_from(int32_t first, float) {
  return _mm512_add_epi32(
      _mm512_set1_epi32(first),
      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}
inline __m256i keys_from(int32_t first, double) {
  return _mm256_add_epi32(_mm256_set1_epi32(first),
                          _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

#elif defined(__AVX2__)

inline uint32_t lanes_above(Choice<float> a, Choice<float> b) {
  return static_cast<uint32_t>(_mm256_movemask_ps((__m256)(a > b)));
}
inline uint32_t lanes_above(Choice<double> a, Choice<double> b) {
  return static_cast<uint32_t>(_mm256_movemask_pd((__m256d)(a > b)));
}

#endif

template <class T>
void append_above(const void* from, int64_t count, int32_t first,
                  Candidates& candidates) {
  const T* scores = static_cast<const T*>(from);
  Appender<T> to(candidates);
  int64_t i = 0;
#ifdef __AVX2__
  const Choice<T> floor = to.floor - Choice<T>{};
  for (; i + kLanes<T> <= count; i += kLanes<T>) {
    const Choice<T> order = order_of<T>(plain_score<T>(load(scores + i)));
    const uint32_t above = lanes_above(order, floor);
    if (above == 0) continue;
    const int32_t key = first + static_cast<int32_t>(i);
#ifdef __AVX512F__
    to.put(order, keys_from(key, T{}), above);
#else
    for (int lane = 0; lane < kLanes<T>; ++lane) {
      to.add(order[lane], key + lane);
    }
#endif
  }
#endif
  for (; i < count; ++i) {
    to.add(order_of(scores[i]), first + static_cast<int32_t>(i));
  }
  candidates.size = to.size;
}

/// How many of `size` orders are above a bound; whole vectors are read.
template <class T>
int64_t count_above(const Order<T>* orders, int64_t size, Order<T> bound) {
  const Choice<T> bounds = bound - Choice<T>{};
  Choice<T> counts[2] = {};
  int64_t i = 0;
  const auto add = [&](int part) {
    Choice<T> order;
    __builtin_memcpy(&order, orders + i, sizeof order);
#ifdef __AVX512F__
    const __m512i sum = (__m512i)counts[part];
    if constexpr (sizeof(T) == 4) {
      counts[part] = (Choice<T>)_mm512_mask_sub_epi32(
          sum, static_cast<__mmask16>(lanes_above(order, bounds)), sum,
          _mm512_set1_epi32(-1));
    } else {
      counts[part] = (Choice<T>)_mm512_mask_sub_epi64(
          sum, static_cast<__mmask8>(lanes_above(order, bounds)), sum,
          _mm512_set1_epi64(-1));
    }
#else
    counts[part] -= order > bounds;
#endif
    i += kLanes<T>;
  };
  while (i + kLanes<T> < size) {
    add(0);
    add(1);
  }
  if (i < size) add(0);
  int64_t count = 0;
  for (int lane = 0; lane < kLanes<T>; ++lane) {
    count += int64_t{counts[0][lane]} + counts[1][lane];
  }
  return count;
}

template <class T>
struct OrderRange {
  Order<T> low, high;
};

template <class T>
OrderRange<T> range_of(const Order<T>* orders, int64_t size) {
  OrderRange<T> range{orders[0], orders[0]};
  for (int64_t i = 1; i < size; ++i) {
    range.low = orders[i] < range.low ? orders[i] : range.low;
    range.high = orders[i] > range.high ? orders[i] : range.high;
  }
  return range;
}

/// The greatest bound that at least `slots` orders reach, or one that exactly
/// so many do. Halves the range: 32 or 64 counts at most, whatever the scores.
template <class T>
Order<T> bound_of_best(const Order<T>* orders, int64_t size, int64_t slots) {
  using Bits = std::make_unsigned_t<Order<T>>;
  OrderRange<T> range = range_of<T>(orders, size);
  while (range.low < range.high) {
    const Bits width =
        static_cast<Bits>(range.high) - static_cast<Bits>(range.low);
    const auto middle = static_cast<Order<T>>(static_cast<Bits>(range.low) +
                                              (width / 2 + width % 2));
    const int64_t reach = count_above<T>(orders, size, middle - 1);
    if (reach == slots) return middle;
    if (reach > slots) {
      range.low = middle;
    } else {
      range.high = middle - 1;
    }
  }
  return range.low;
}

template <class T>
void keep_best(Candidates& candidates, int64_t slots) {
  Appender<T> all(candidates);
  // Vectors read behind the last: nothing there counts.
  for (int64_t i = 0; i < kLanes<T>; ++i) {
    all.orders[all.size + i] = kLowestOrder<T>;
  }
  const Order<T> bound = bound_of_best<T>(all.orders, all.size, slots);
  int64_t equal = slots - count_above<T>(all.orders, all.size, bound);
  Appender<T> kept = all;
  kept.size = 0;
  int64_t i = 0;
#ifdef __AVX512F__
  // A vector is written at or before the place where it was read.
  const Choice<T> bounds = bound - Choice<T>{};
  for (; i < all.size; i += kLanes<T>) {
    Choice<T> order;
    __builtin_memcpy(&order, all.orders + i, sizeof order);
    decltype(keys_from(0, T{})) keys;
    __builtin_memcpy(&keys, all.keys + i, sizeof keys);
    const uint32_t above = lanes_above(order, bounds);
    uint32_t same = lanes_above(order, bounds - 1) & ~above;
    while (__builtin_popcount(same) > equal) {
      same &= ~(0x80000000u >> __builtin_clz(same));
    }
    equal -= __builtin_popcount(same);
    kept.put(order, keys, above | same);
  }
#else
  for (; i < all.size; ++i) {
    const Order<T> order = all.orders[i];
    const bool same = order == bound && equal > 0;
    equal -= same;
    kept.orders[kept.size] = order;
    kept.keys[kept.size] = all.keys[i];
    kept.size += order > bound || same;
  }
#endif
  candidates.size = kept.size;
  candidates.floor = bound;
}

template <class T>
constexpr TopKeySteps top_key_steps() {
  return {.append = append_above<T>, .keep_best = keep_best<T>};
}

}  // namespace
}  // namespace longspan
