#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "longspan/kernels/levels/levels.h"
#include "tests/oracle/attention.h"

/// Arrays in the layouts and element types that kernels read and write, made
/// from the plain arrays of the oracle.
namespace longspan::test {

/// The bits of a half-precision number that is exactly `value`.
inline uint16_t float16_bits(double value) {
  const auto sign = static_cast<uint16_t>(std::signbit(value) ? 0x8000 : 0);
  const double size = std::abs(value);
  if (std::isnan(value)) return 0x7e00;
  if (std::isinf(value)) return sign | 0x7c00;
  if (size < 0x1p-14) return sign | static_cast<uint16_t>(size * 0x1p24);
  int exponent;
  const double fraction = std::frexp(size, &exponent);  // in [0.5, 1)
  return static_cast<uint16_t>(sign | ((exponent + 14) << 10) |
                               (static_cast<int>(fraction * 2048) & 0x3ff));
}

inline double float16_value(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
  const double size = exponent == 0 ? std::ldexp(fraction, -24)
                      : exponent == 31
                          ? fraction != 0 ? NAN : INFINITY
                          : std::ldexp(1024 + fraction, exponent - 25);
  return bits >> 15 != 0 ? -size : size;
}

inline uint16_t bfloat16_bits(double value) {
  return static_cast<uint16_t>(
      std::bit_cast<uint32_t>(static_cast<float>(value)) >> 16);
}

inline double bfloat16_value(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

/// To the nearest bfloat16, ties to even.
inline double nearest_bfloat16(double value) {
  if (!std::isfinite(value)) return value;
  const auto bits = std::bit_cast<uint32_t>(static_cast<float>(value));
  return std::bit_cast<float>((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000);
}

/// To the nearest float16, ties to even; infinite beyond the largest.
inline double nearest_float16(double value) {
  if (!std::isfinite(value)) return value;
  const double size = std::abs(value);
  if (size >= 65520) return std::copysign(INFINITY, value);
  int exponent;
  std::frexp(size, &exponent);
  const double step = std::ldexp(1, std::max(exponent, -13) - 11);
  return std::copysign(std::nearbyint(size / step) * step, value);
}

/// The value that an array of this type holds for `value`; rounded to zero.
inline double rounded(ElementType type, double value) {
  switch (type) {
    case ElementType::float32:
      return static_cast<float>(value);
    case ElementType::bfloat16:
      return bfloat16_value(bfloat16_bits(value));
    case ElementType::float16:
      return float16_value(float16_bits(value));
    case ElementType::float64:
      break;
  }
  return value;
}

inline std::size_t element_bytes(ElementType type) {
  return type == ElementType::float64   ? 8
         : type == ElementType::float32 ? 4
                                        : 2;
}

/// What everything summed is kept in.
inline ElementType accumulation(ElementType type) {
  return type == ElementType::float64 ? type : ElementType::float32;
}

enum class Strides { contiguous, gapped };

/// An array [rows, tokens, heads, channels], contiguous or with heads outside
/// tokens and gaps everywhere. Gaps hold NaN and must keep it.
class Array {
 public:
  Array(ElementType type, Strides strides, int64_t rows, int64_t tokens,
        int64_t heads, int64_t channels)
      : type_(type), shape_{rows, tokens, heads, channels} {
    if (strides == Strides::contiguous) {
      head_ = channels;
      token_ = heads * head_;
      row_ = tokens * token_;
    } else {
      token_ = channels + 3;
      head_ = tokens * token_ + 5;
      row_ = heads * head_ + 7;
    }
    elements_ = rows * row_;
    bytes_.resize(static_cast<std::size_t>(elements_) * element_bytes(type));
    for (int64_t i = 0; i < elements_; ++i) put(i, NAN);
  }

  template <class T>
  void fill(const std::vector<T>& values) {
    std::size_t i = 0;
    each(
        [&](int64_t offset) { put(offset, static_cast<double>(values[i++])); });
  }
  void fill(double value) {
    each([&](int64_t offset) { put(offset, value); });
  }

  std::vector<double> values() const {
    std::vector<double> result;
    each([&](int64_t offset) { result.push_back(get(offset)); });
    return result;
  }
  const std::vector<std::byte>& bytes() const { return bytes_; }
  ElementType type() const { return type_; }

  /// Whether the gaps are as they were.
  bool gaps_kept() const {
    Array copy = *this;
    copy.fill(NAN);
    for (int64_t i = 0; i < elements_; ++i) {
      if (!std::isnan(copy.get(i))) return false;
    }
    return true;
  }

  operator TokenArray<const void*>() const {
    return {bytes_.data(), row_, token_, head_};
  }
  operator TokenArray<void*>() { return {bytes_.data(), row_, token_, head_}; }

 private:
  template <class Visit>
  void each(const Visit& visit) const {
    for (int64_t row = 0; row < shape_[0]; ++row) {
      for (int64_t token = 0; token < shape_[1]; ++token) {
        for (int64_t head = 0; head < shape_[2]; ++head) {
          for (int64_t c = 0; c < shape_[3]; ++c) {
            visit(row * row_ + token * token_ + head * head_ + c);
          }
        }
      }
    }
  }

  template <class Raw>
  void put_raw(int64_t offset, Raw raw) {
    std::memcpy(bytes_.data() + static_cast<std::size_t>(offset) * sizeof raw,
                &raw, sizeof raw);
  }
  template <class Raw>
  Raw get_raw(int64_t offset) const {
    Raw raw;
    std::memcpy(&raw,
                bytes_.data() + static_cast<std::size_t>(offset) * sizeof raw,
                sizeof raw);
    return raw;
  }
  void put(int64_t offset, double value) {
    switch (type_) {
      case ElementType::float32:
        return put_raw(offset, static_cast<float>(value));
      case ElementType::bfloat16:
        return put_raw(offset, bfloat16_bits(value));
      case ElementType::float16:
        return put_raw(offset, float16_bits(value));
      case ElementType::float64:
        return put_raw(offset, value);
    }
  }
  double get(int64_t offset) const {
    switch (type_) {
      case ElementType::float32:
        return get_raw<float>(offset);
      case ElementType::bfloat16:
        return bfloat16_value(get_raw<uint16_t>(offset));
      case ElementType::float16:
        return float16_value(get_raw<uint16_t>(offset));
      case ElementType::float64:
        break;
    }
    return get_raw<double>(offset);
  }

  ElementType type_;
  int64_t shape_[4];
  int64_t row_ = 0, token_ = 0, head_ = 0, elements_ = 0;
  std::vector<std::byte> bytes_;
};

/// Everything a kernel reads and writes for one problem, in one element type.
/// `out` and the gradients start at 0 and lse at -inf.
struct AttentionArrays {
  Array q, k, v, dout;
  Array out, lse, delta;
  Array dq, dk, dv;

  AttentionArrays(const oracle::AttentionProblem& p,
                  const std::vector<double>& upstream, ElementType type,
                  Strides strides)
      : q(type, strides, p.rows, p.queries, p.heads, p.head_dim),
        k(type, strides, p.rows, p.keys, p.key_heads(), p.head_dim),
        v(type, strides, p.rows, p.keys, p.key_heads(), p.value_dim),
        dout(type, strides, p.rows, p.queries, p.heads, p.value_dim),
        out(accumulation(type), strides, p.rows, p.queries, p.heads,
            p.value_dim),
        lse(accumulation(type), strides, p.rows, p.queries, p.heads, 1),
        delta(lse),
        dq(accumulation(type), strides, p.rows, p.queries, p.heads, p.head_dim),
        dk(accumulation(type), strides, p.rows, p.keys, p.key_heads(),
           p.head_dim),
        dv(accumulation(type), strides, p.rows, p.keys, p.key_heads(),
           p.value_dim) {
    q.fill(p.q);
    k.fill(p.k);
    v.fill(p.v);
    dout.fill(upstream);
    for (Array* zeroed : {&out, &dq, &dk, &dv}) zeroed->fill(0.0);
    lse.fill(-INFINITY);
  }
};

/// The part of a kernel's arguments that both directions have.
inline void set_shape(AttentionArgs& args, const oracle::AttentionProblem& p,
                      ElementType type, const AttentionArrays& arrays,
                      std::span<const KeyLines> lines) {
  args.type = type;
  args.rows = p.rows;
  args.queries = p.queries;
  args.keys = p.keys;
  args.heads = p.heads;
  args.heads_per_key_head = p.heads_per_key_head;
  args.head_offset = p.head_offset;
  args.head_dim = static_cast<int>(p.head_dim);
  args.value_dim = static_cast<int>(p.value_dim);
  args.scale = p.scale;
  args.softcap = p.softcap;
  args.q = arrays.q;
  args.k = arrays.k;
  args.v = arrays.v;
  args.lines = lines;
}

inline void run_forward(const AttentionKernels& kernels,
                        const oracle::AttentionProblem& p, ElementType type,
                        std::span<const KeyLines> lines,
                        AttentionArrays& arrays,
                        const ParallelFor& parallel_for = serial_for) {
  AttentionForwardArgs args;
  set_shape(args, p, type, arrays, lines);
  args.out = arrays.out;
  args.lse = arrays.lse;
  kernels.forward(args, parallel_for);
}

/// The sum over channels of out * dout, in the accumulation type.
template <class T>
std::vector<double> deltas(const AttentionArrays& arrays, int64_t value_dim) {
  const std::vector<double> out = arrays.out.values();
  const std::vector<double> dout = arrays.dout.values();
  std::vector<double> result(out.size() / static_cast<std::size_t>(value_dim));
  for (std::size_t i = 0; i < result.size(); ++i) {
    T sum = 0;
    for (std::size_t c = 0; c < static_cast<std::size_t>(value_dim); ++c) {
      const std::size_t at = i * static_cast<std::size_t>(value_dim) + c;
      sum += static_cast<T>(out[at]) * static_cast<T>(dout[at]);
    }
    result[i] = static_cast<double>(sum);
  }
  return result;
}

/// From what a finished forward left in `arrays`.
inline void run_backward(const AttentionKernels& kernels,
                         const oracle::AttentionProblem& p, ElementType type,
                         std::span<const KeyLines> lines,
                         AttentionArrays& arrays,
                         const ParallelFor& parallel_for = serial_for) {
  arrays.delta.fill(type == ElementType::float64
                        ? deltas<double>(arrays, p.value_dim)
                        : deltas<float>(arrays, p.value_dim));
  AttentionBackwardArgs args;
  set_shape(args, p, type, arrays, lines);
  args.dout = arrays.dout;
  args.lse = arrays.lse;
  args.delta = arrays.delta;
  args.dq = arrays.dq;
  args.dk = arrays.dk;
  args.dv = arrays.dv;
  kernels.backward(args, parallel_for);
}

}  // namespace longspan::test
