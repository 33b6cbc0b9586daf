#pragma once

#include "longspan/kernels/attention.h"
#include "longspan/kernels/cpu/simd/vectors.h"

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

/// Whether any of n values, whole vectors of them, is infinite or NaN: only
/// for those is x - x not a number.
template <class T>
inline bool any_not_finite(const T* values, int64_t n) {
  Choice<T> wrong = {};
  for (int64_t i = 0; i < n; i += kLanes<T>) {
    const Vector<T> x = load(values + i), difference = x - x;
    wrong |= difference != difference;
  }
  typename VectorTypes<T>::Integer any = 0;
  for (int i = 0; i < kLanes<T>; ++i) any |= wrong[i];
  return any != 0;
}

/// An array of a caller: elements of one (row, first token, head).
template <class Element, class Pointer>
inline Element* place_in(const TokenArray<Pointer>& array, int64_t row,
                         int64_t token, int64_t head) {
  return static_cast<Element*>(array.data) + row * array.row_stride +
         token * array.token_stride + head * array.head_stride;
}

/// Copies `rows` rows of n elements; what is left of the last vector is 0.
/// Returns whether all are finite.
template <class Element>
bool pack_rows(const Element* from, int64_t from_stride, int rows, int n,
               Accumulator<Element>* to, int64_t to_stride) {
  using T = Accumulator<Element>;
  bool finite = true;
  const int whole = whole_vectors<T>(n);
  for (int row = 0; row < rows; ++row) {
    for (int i = 0; i < n; ++i) to[i] = widened(from[i]);
    for (int i = n; i < whole; ++i) to[i] = 0;
    finite &= !any_not_finite(to, whole);
    from += from_stride;
    to += to_stride;
  }
  return finite;
}

/// Turns packed rows into n rows of `lanes` columns; columns that have no row
/// are 0.
template <class T>
void transpose(const T* from, int64_t from_stride, int rows, int n, T* to,
               int64_t to_stride, int lanes) {
  for (int i = 0; i < n; ++i) {
    for (int row = 0; row < rows; ++row) {
      to[i * to_stride + row] = from[row * from_stride + i];
    }
    for (int row = rows; row < lanes; ++row) to[i * to_stride + row] = 0;
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
