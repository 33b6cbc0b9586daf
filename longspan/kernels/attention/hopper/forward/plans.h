#pragma once

#include "longspan/kernels/attention/hopper/forward/config.h"
#include "longspan/kernels/attention/hopper/forward/widest_config.h"

namespace longspan::hopper {

/// Which plan takes so many channels.
template <class Body>
auto with_dense_forward_plan(int head_dim, int value_dim, const Body& body) {
  if (head_dim <= 64 && value_dim <= 64) {
    return body(DenseForwardPlan<64, 64>());
  }
  if (head_dim <= 128 && value_dim <= 128) {
    return body(DenseForwardPlan<128, 128>());
  }
  if (head_dim <= 192 && value_dim <= 128) {
    return body(DenseForwardPlan<192, 128>());
  }
  if (head_dim <= 256 && value_dim <= 256) {
    return body(DenseForwardPlan<256, 256>());
  }
  return body(WidestForwardPlan());
}

/// More would leave fewer than eight queries to a head, and no fewer tiles.
constexpr int kMostPackedHeads = 8;

inline bool has_narrow_plan(int head_dim, int value_dim) {
  return head_dim <= 128 && value_dim <= 128;
}

template <class Body>
auto with_narrow_forward_plan(int head_dim, int value_dim, const Body& body) {
  if (head_dim <= 64 && value_dim <= 64) {
    return body(DenseForwardPlan<64, 64, true>());
  }
  return body(DenseForwardPlan<128, 128, true>());
}

}  // namespace longspan::hopper
