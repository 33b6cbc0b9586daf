#pragma once

#include <utility>

#include "longspan/kernels/common/cpu/jobs.h"
#include "longspan/kernels/common/cpu/simd/vectors.h"
#include "longspan/kernels/common/element.h"

/// Reads arrays of callers into scratch rows of the accumulation type.
namespace longspan {
namespace {

struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <class Element>
struct AccumulatorOf {
  using Type = float;
};
template <>
struct AccumulatorOf<double> {
  using Type = double;
};
template <class Element>
using Accumulator = typename AccumulatorOf<Element>::Type;

inline float float_of_bits(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

inline float widened(float value) {
  return value;
}
inline double widened(double value) {
  return value;
}
inline float widened(Bfloat16 value) {
  return float_of_bits(static_cast<uint32_t>(value.bits) << 16);
}

/// Moves the exponent to that of a float: by a multiplication, which keeps
/// infinities and NaNs, or for numbers below 2^-14 by a subtraction, which
/// normalizes them.
inline float widened(Float16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  const uint32_t magnitude = bits << 1;
  const float normal =
      float_of_bits((magnitude >> 4) + (0xe0u << 23)) * 0x1p-112f;
  const float tiny = float_of_bits((magnitude >> 17) | (126u << 23)) - 0.5f;
  const float size = magnitude < (1u << 27) ? tiny : normal;
  uint32_t size_bits;
  __builtin_memcpy(&size_bits, &size, sizeof size);
  return float_of_bits(size_bits | (bits & 0x80000000u));
}

/// An array of a caller: elements of one (row, first token, head).
template <class Element, class Pointer>
inline Element* place_in(const TokenArray<Pointer>& array, int64_t row,
                         int64_t token, int64_t head) {
  return static_cast<Element*>(array.data) + row * array.row_stride +
         token * array.token_stride + head * array.head_stride;
}

/// Rows of channels: scratch, or the caller's own.
template <class T>
struct Rows {
  const T* data;
  int64_t stride;
};

/// Copies `rows` rows of n elements, times a factor; what is left of the last
/// vector is 0.
template <class Element>
void pack_rows(const Element* from, int64_t from_stride, int rows, int n,
               Accumulator<Element> factor, Accumulator<Element>* to,
               int64_t to_stride) {
  using T = Accumulator<Element>;
  const int whole = whole_vectors<T>(n);
  for (int row = 0; row < rows; ++row) {
    for (int i = 0; i < n; ++i) to[i] = widened(from[i]) * factor;
    for (int i = n; i < whole; ++i) to[i] = 0;
    from += from_stride;
    to += to_stride;
  }
}

/// What a product reads of a row: elements, or whole vectors, which may reach
/// behind the last element.
enum class Reads { elements, vectors };

/// The caller's rows where a product can take them as they are, else a copy in
/// `scratch`. Rows that lie far apart would fight for the same places of the
/// cache.
template <Reads reads, class Element>
Rows<Accumulator<Element>> rows_of(const Element* from, int64_t from_stride,
                                   int rows, int n,
                                   Accumulator<Element>* scratch) {
  using T = Accumulator<Element>;
  const int64_t stride = row_length<T>(n);
  if constexpr (sizeof(Element) == sizeof(T)) {
    const bool fits = reads == Reads::elements || n % kLanes<T> == 0;
    if (fits && from_stride <= stride) return {from, from_stride};
  }
  pack_rows(from, from_stride, rows, n, T{1}, scratch, stride);
  return {scratch, stride};
}

/// Whether no element of `rows` rows of n is infinite or NaN: only for those is
/// x - x not 0.
template <class T>
bool all_finite(Rows<T> rows, int count, int n) {
  typename VectorTypes<T>::Integer wrong = 0;
  for (int row = 0; row < count; ++row) {
    const T* x = rows.data + row * rows.stride;
    for (int i = 0; i < n; ++i) wrong |= !(x[i] - x[i] == 0);
  }
  return wrong == 0;
}

/// Lanes of a and b in turns, from lane `first` of each on.
template <class T, int first, int... lane>
inline Vector<T> in_turns(Vector<T> a, Vector<T> b,
                          std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(a, b,
                                 (first + lane / 2 + lane % 2 * kLanes<T>)...);
}

/// As many rows as a vector has lanes become columns. Taking lanes of row i and
/// of row i + half in turns moves one bit of the lane's number into the row's.
template <class T>
void transpose_square(const T* from, int64_t from_stride, T* to,
                      int64_t to_stride) {
  constexpr int kHalf = kLanes<T> / 2;
  using AllLanes = std::make_integer_sequence<int, kLanes<T>>;
  Vector<T> rows[kLanes<T>], mixed[kLanes<T>];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes<T>; ++i) rows[i] = load(from + i * from_stride);
#pragma GCC unroll 4
  for (int bits = kLanes<T>; bits > 1; bits /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < kHalf; ++i) {
      mixed[2 * i] = in_turns<T, 0>(rows[i], rows[i + kHalf], AllLanes());
      mixed[2 * i + 1] =
          in_turns<T, kHalf>(rows[i], rows[i + kHalf], AllLanes());
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes<T>; ++i) rows[i] = mixed[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < kLanes<T>; ++i) store(to + i * to_stride, rows[i]);
}

/// Queries of one head, times a factor: as rows, and as columns where a product
/// wants whole vectors of queries. Those that a block lacks are 0.
template <class Element, class T = Accumulator<Element>>
void pack_queries(const Element* from, int64_t from_stride, int count, int n,
                  T factor, T* rows, T* columns) {
  const int64_t stride = row_length<T>(n), to_stride = row_length<T>(kBlock);
  pack_rows(from, from_stride, count, n, factor, rows, stride);
  for (int64_t i = count * stride; i < kBlock * stride; ++i) rows[i] = 0;
  for (int i = 0; i < n; i += kLanes<T>) {
    for (int query = 0; query < kBlock; query += kLanes<T>) {
      transpose_square(rows + query * stride + i, stride,
                       columns + i * to_stride + query, to_stride);
    }
  }
}

/// Hands out parts of a scratch, in order, or counts what that would take
/// where there is no scratch yet.
class Carver {
 public:
  explicit Carver(void* scratch) : scratch_(static_cast<char*>(scratch)) {}

  /// Whole cache lines.
  template <class T>
  T* take(int64_t count) {
    const int64_t begin = taken_;
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    taken_ += (bytes + 63) / 64 * 64;
    return scratch_ == nullptr ? nullptr
                               : reinterpret_cast<T*>(scratch_ + begin);
  }
  int64_t bytes() const { return taken_; }

 private:
  char* scratch_;
  int64_t taken_ = 0;
};

}  // namespace
}  // namespace longspan
