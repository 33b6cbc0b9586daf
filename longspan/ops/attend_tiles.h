#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <span>
#include <string>

#include "longspan/core/key_lines.h"
#include "longspan/ops/partial_attention.h"

namespace longspan {

/// Queries and one block of keys. Tensors are [rows, tokens, heads, channels],
/// of one dtype and device; channels are contiguous, the rest may be strided.
struct AttentionInputs {
  at::Tensor q, k, v;
  /// Query head h uses key head (h + head_offset) / heads_per_key_head.
  int64_t heads_per_key_head = 1, head_offset = 0;
  double scale = 1;
  double softcap = 0;  ///< 0 is none
};

/// Folds the visible keys of this block into a running answer, in place.
void attend_tiles(const AttentionInputs& inputs,
                  std::span<const KeyLines> lines, PartialAttention& running);

/// What the derivative needs to know of the finished answer, and where it goes.
struct AttentionGradients {
  at::Tensor out, dout;   ///< [rows, queries, heads, channels], dtype of q
  at::Tensor lse, delta;  ///< [rows, queries, heads], accumulation dtype: of
                          ///< all keys and the sink; sum of out * dout
  at::Tensor dq, dk, dv;  ///< like q, k, v, accumulation dtype; added to
};
void attend_tiles_backward(const AttentionInputs& inputs,
                           std::span<const KeyLines> lines,
                           AttentionGradients& gradients);

/// What computes such a call, and why nothing better does: on CUDA "flash" or
/// "blocked, not flash: it has no softcap"; on the CPU the kernel's name.
std::string which_kernel(const AttentionInputs& inputs);

/// The same from torch operators, block by block, on any device: what runs
/// where no kernel of ours or torch's covers the case.
void attend_tiles_blocked(const AttentionInputs& inputs,
                          std::span<const KeyLines> lines,
                          PartialAttention& running);
void attend_tiles_backward_blocked(const AttentionInputs& inputs,
                                   std::span<const KeyLines> lines,
                                   AttentionGradients& gradients);

}  // namespace longspan
