#pragma once

#include "longspan/kernels/attention/hopper/forward/config.h"
#include "longspan/kernels/attention/hopper/forward/widest_config.h"
#include "longspan/kernels/common/hopper/half_type.h"

namespace longspan::hopper {

/// Which plan takes so many channels of a type.
template <class Body>
auto with_dense_forward_plan(ElementType type, int head_dim, int value_dim,
                             const Body& body) {
  return with_half_type(type, [&]<ElementType kType>() {
    if (head_dim <= 64 && value_dim <= 64) {
      return body(DenseForwardPlan<64, 64, false, kType>());
    }
    if (head_dim <= 128 && value_dim <= 128) {
      return body(DenseForwardPlan<128, 128, false, kType>());
    }
    if (head_dim <= 192 && value_dim <= 128) {
      return body(DenseForwardPlan<192, 128, false, kType>());
    }
    if (head_dim <= 256 && value_dim <= 256) {
      return body(DenseForwardPlan<256, 256, false, kType>());
    }
    return body(WidestForwardPlan<kType>());
  });
}

/// More would leave fewer than eight queries to a head, and no fewer tiles.
constexpr int kMostPackedHeads = 8;

/// H200, 16384 tokens, narrow against wide: 64 channels 159 against 113 TFLOP/s
/// for a window of 128, 215 / 179 for 256, 280 / 257 for 512 and 316 / 321 for
/// 1024; 128 channels 205 / 190, then 275 / 297.
inline int64_t most_narrow_keys(int head_dim) {
  return head_dim <= 64 ? 512 : 128;
}

inline bool has_narrow_plan(int head_dim, int value_dim) {
  return head_dim <= 128 && value_dim <= 128;
}

template <class Body>
auto with_narrow_forward_plan(ElementType type, int head_dim, int value_dim,
                              const Body& body) {
  return with_half_type(type, [&]<ElementType kType>() {
    if (head_dim <= 64 && value_dim <= 64) {
      return body(DenseForwardPlan<64, 64, true, kType>());
    }
    return body(DenseForwardPlan<128, 128, true, kType>());
  });
}

}  // namespace longspan::hopper
