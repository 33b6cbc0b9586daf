#pragma once

#include <algorithm>
#include <cstddef>

#include "longspan/kernels/attention/hopper/attention.h"
#include "longspan/kernels/attention/hopper/upload.cuh"
#include "longspan/kernels/common/hopper/checks.h"
#include "longspan/kernels/common/hopper/tensor_map.h"

namespace longspan::hopper {

/// What launches of both directions share.

/// As the copy engine wants it: no stride of zero, each below 2^40 bytes.
template <class Pointer>
bool has_real_strides(const TokenArray<Pointer>& array, int64_t rows,
                      int64_t tokens, int64_t heads) {
  const auto fine = [](int64_t stride, int64_t count) {
    constexpr int64_t kMost = int64_t{1} << 38;
    return count <= 1 || (stride > 0 && stride < kMost);
  };
  return fine(array.row_stride, rows) && fine(array.token_stride, tokens) &&
         fine(array.head_stride, heads);
}

inline int64_t key_heads(const AttentionArgs& args) {
  return (args.heads + args.head_offset - 1) / args.heads_per_key_head + 1;
}

/// Where a table lies that was uploaded to `memory`.
template <class Params, class Line>
void tell_work(Params& params, const WorkOf<Line>& table, void* memory) {
  auto* at = static_cast<std::byte*>(memory);
  params.next_item = reinterpret_cast<int*>(at);
  at += WorkOf<Line>::kHeader;
  params.blocks = reinterpret_cast<const WorkBlock*>(at);
  at += table.blocks.size() * sizeof(WorkBlock);
  params.parts = reinterpret_cast<const WorkPart*>(at);
  at += table.parts.size() * sizeof(WorkPart);
  params.lines = reinterpret_cast<const Line*>(at);
  params.block_count = static_cast<int>(table.blocks.size());
}

}  // namespace longspan::hopper
