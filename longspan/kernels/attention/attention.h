#pragma once

#include <cstdint>
#include <span>

#include "longspan/core/key_lines.h"
#include "longspan/kernels/common/element.h"

namespace longspan {

/// Queries against one block of keys: what both directions need.
///
/// Query head h uses key head (h + head_offset) / heads_per_key_head; for a
/// whole layer the offset is 0, for a share of its heads it lies in
/// [0, heads_per_key_head).
struct AttentionArgs {
  ElementType type = ElementType::float32;
  int64_t rows = 0, queries = 0, keys = 0;
  int64_t heads = 0, heads_per_key_head = 1, head_offset = 0;
  int head_dim = 0, value_dim = 0;  // 1 to 576
  double scale = 1;
  double softcap = 0;  // s becomes softcap * tanh(s / softcap); 0 is none
  TokenArray<const void*> q;        // [rows, queries, heads, head_dim]
  TokenArray<const void*> k;        // [rows, keys, key heads, head_dim]
  TokenArray<const void*> v;        // [rows, keys, key heads, value_dim]
  std::span<const KeyLines> lines;  // ascending by row, then by first query
};

/// Folds the keys of this call into a running answer. Natural logs; a query
/// that has seen no key yet has out 0 and lse -inf, and a query that no line
/// mentions is left alone. The accumulation type of `out` and `lse` is float,
/// or double for float64.
struct AttentionForwardArgs : AttentionArgs {
  TokenArray<void*> out;  // [rows, queries, heads, value_dim], read and written
  TokenArray<void*> lse;  // [rows, queries, heads], read and written
};

/// Adds the derivatives of this call. `lse` is that of all keys (and of the
/// sink), `delta` the sum over channels of out * dout, both of the finished
/// answer.
struct AttentionBackwardArgs : AttentionArgs {
  TokenArray<const void*> dout;   // like out, of `type`
  TokenArray<const void*> lse;    // [rows, queries, heads], accumulation type
  TokenArray<const void*> delta;  // [rows, queries, heads], accumulation type
  TokenArray<void*> dq;           // like q, accumulation type, added to
  TokenArray<void*> dk;           // like k, accumulation type, added to
  TokenArray<void*> dv;           // like v, accumulation type, added to
};

}  // namespace longspan
