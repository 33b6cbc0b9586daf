#pragma once

#include <cstdint>

#include "longspan/core/detail/check.h"

namespace longspan {

/// A whole number that remembers who counts, and refuses to leave 64 bits: for
/// sums and products of what callers give.
class Checked {
 public:
  Checked(const char* who, int64_t value) : who_(who), value_(value) {}

  int64_t value() const { return value_; }

  Checked& operator+=(int64_t other) {
    int64_t sum = 0;
    check(!__builtin_add_overflow(value_, other, &sum), who_, ": ", value_,
          " and ", other, " add up to more than 64 bits count");
    value_ = sum;
    return *this;
  }
  Checked& operator*=(int64_t other) {
    int64_t product = 0;
    check(!__builtin_mul_overflow(value_, other, &product), who_, ": ", value_,
          " times ", other, " is more than 64 bits count");
    value_ = product;
    return *this;
  }
  Checked& operator+=(Checked other) { return *this += other.value_; }
  Checked& operator*=(Checked other) { return *this *= other.value_; }

  friend Checked operator+(Checked a, Checked b) { return a += b; }
  friend Checked operator*(Checked a, Checked b) { return a *= b; }
  friend Checked operator+(Checked a, int64_t b) { return a += b; }
  friend Checked operator*(Checked a, int64_t b) { return a *= b; }

 private:
  const char* who_;
  int64_t value_;
};

}  // namespace longspan
