#pragma once

#include <cstdint>

#include "longspan/kernels/attend_selected/cpu/steps.h"

namespace longspan {

/// Every (row, key head, query) of a call, queries of a key head side by side.
inline int64_t selected_items(const SelectedAttentionArgs& args) {
  return args.rows * args.key_heads * args.queries;
}

/// Where an item is; its list is still empty.
inline SelectedKeys item_of(const SelectedAttentionArgs& args, int64_t item) {
  const int64_t owner = item / args.queries;
  return {.row = owner / args.key_heads,
          .query = item % args.queries,
          .key_head = owner % args.key_heads};
}

/// The slots of an item, as the caller has them.
inline const int32_t* slots_of(const SelectedAttentionArgs& args,
                               const SelectedKeys& item) {
  return args.indices.data + item.row * args.indices.row_stride +
         item.query * args.indices.token_stride +
         item.key_head * args.indices.head_stride;
}

inline bool is_key(const SelectedAttentionArgs& args, int32_t slot) {
  return slot >= 0 && slot < args.keys;
}

/// Copies the slots that name a key, in order.
inline int64_t copy_keys(const SelectedAttentionArgs& args,
                         const int32_t* slots, int32_t* keys) {
  int64_t count = 0;
  for (int64_t i = 0; i < args.slots; ++i) {
    keys[count] = slots[i];
    count += is_key(args, slots[i]) ? 1 : 0;
  }
  return count;
}

}  // namespace longspan
