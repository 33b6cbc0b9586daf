#pragma once

#include <cstdint>

#include "longspan/kernels/common/element.h"
#include "longspan/kernels/common/parallel.h"

namespace longspan {

/// Every query attends to keys of its own list (sparse attention).
///
/// A key is a row of `kv` with all its channels, its value the first
/// `value_dim` of them. Query head h belongs to key head
/// h / (heads / key_heads). A slot outside [0, keys) is empty, is skipped and
/// never used as an address; a key that is listed twice counts twice.
struct SelectedAttentionArgs {
  ElementType type = ElementType::float32;
  int64_t rows = 0, queries = 0, keys = 0;
  int64_t heads = 0, key_heads = 1, slots = 0;
  int head_dim = 0, value_dim = 0;  // 1 to 576, value_dim <= head_dim
  double scale = 1;
  TokenArray<const void*> q;           // [rows, queries, heads, head_dim]
  TokenArray<const void*> kv;          // [rows, keys, key_heads, head_dim]
  TokenArray<const int32_t*> indices;  // [rows, queries, key_heads, slots]
};

/// The answer over the listed keys: out[h] = sum_j p_j v_j with
/// p_j = exp(s_j) / (sum exp(s) + exp(sink[h])). Without a listed key out is 0
/// and lse -inf.
struct SelectedForwardArgs : SelectedAttentionArgs {
  const void* sink = nullptr;  // [heads], accumulation type; null: none
  TokenArray<void*> out;       // [rows, queries, heads, value_dim], of `type`
  /// [rows, queries, heads], accumulation type: the natural log of the sum over
  /// the keys, the sink left out.
  TokenArray<void*> lse;
};

/// The derivatives. `lse` here is that of the keys and the sink; a query where
/// it is infinite passes none. `delta` is the sum over channels of out * dout.
struct SelectedBackwardArgs : SelectedAttentionArgs {
  TokenArray<const void*> dout;   // like out, of `type`
  TokenArray<const void*> lse;    // [rows, queries, heads], accumulation type
  TokenArray<const void*> delta;  // [rows, queries, heads], accumulation type
  TokenArray<void*> dq;           // like q, of `type`, written
  TokenArray<void*> dkv;          // like kv, accumulation type, added to
};

/// How much the heads of a query look at each slot together:
/// weights[j] = sum_h exp(s_hj - lse_h), 0 for an empty slot. A list of
/// `key_heads` > 1 is summed over the heads of its own group; heads whose lse
/// is infinite count nothing.
struct SelectedWeightsArgs : SelectedAttentionArgs {
  TokenArray<const void*> lse;  // [rows, queries, heads], accumulation type
  TokenArray<void*> weights;    // [rows, queries, key_heads, slots], likewise
};

/// One implementation. Any number of threads gives the same bits.
struct SelectedAttentionKernels {
  void (*forward)(const SelectedForwardArgs& args,
                  const ParallelFor& parallel_for) = nullptr;
  void (*backward)(const SelectedBackwardArgs& args,
                   const ParallelFor& parallel_for) = nullptr;
  void (*weights)(const SelectedWeightsArgs& args,
                  const ParallelFor& parallel_for) = nullptr;
};

}  // namespace longspan
