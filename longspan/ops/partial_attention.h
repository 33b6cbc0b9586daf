#pragma once

#include <ATen/core/Tensor.h>

#include <limits>

namespace longspan {

/// The log-sum-exp of a query that saw no key.
inline constexpr double kMinusInfinity =
    -std::numeric_limits<double>::infinity();

/// What sums are kept in: float64 for float64, float32 for everything else.
at::ScalarType accumulation_type(at::ScalarType dtype);

/// The options of a tensor, in the accumulation type of its elements.
at::TensorOptions sums_like(const at::Tensor& tensor);

/// Attention over some of the keys: the output, and the natural log of the sum
/// of exp(score) over those keys. A query that saw no key has out 0, lse -inf.
struct PartialAttention {
  at::Tensor out;  ///< [..., channels], accumulation type
  at::Tensor lse;  ///< [...]

  /// Over no keys.
  static PartialAttention nothing(at::IntArrayRef sizes, int64_t channels,
                                  const at::TensorOptions& options);

  /// Attention over the keys of both (log-sum-exp merge), in any order; either
  /// may have seen no key. The keys must not overlap.
  static PartialAttention merge(const PartialAttention& a,
                                const PartialAttention& b);

  /// Merges `other` into this one, in place.
  void add(const PartialAttention& other);

  /// The output when each head also gives weight to a logit without a value
  /// (attention sink): out * exp(lse) / (exp(lse) + exp(sink)). `sink` is
  /// [heads], the last axis of lse.
  at::Tensor with_sink(const at::Tensor& sink) const;
};

}  // namespace longspan
