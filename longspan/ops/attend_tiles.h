#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <string>

#include "longspan/core/key_lines.h"
#include "longspan/kernels/attention/attention.h"
#include "longspan/ops/accumulator.h"

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

/// The inputs as kernels take them. They must outlive the arguments.
void fill(AttentionArgs& args, const AttentionInputs& inputs,
          std::span<const KeyLines> lines);

/// Folds the visible keys of this block into a running answer.
void attend_tiles(const AttentionInputs& inputs,
                  std::span<const KeyLines> lines, Accumulator& running);

/// What the derivative needs to know of the finished answer.
struct AttentionAnswer {
  at::Tensor out, dout;  ///< [rows, queries, heads, channels], dtype of q
  at::Tensor lse;        ///< [rows, queries, heads], accumulation dtype: of all
                         ///< keys and the sink

  /// Sum over channels of out * dout, 0 where lse is -inf; like lse. Made when
  /// it is first asked for, since torch's fused kernels make their own.
  const at::Tensor& delta() const;
  mutable at::Tensor known_delta = {};
};

/// Where derivatives are added up: like q, k, v.
struct AttentionGradients {
  Accumulator &dq, &dk, &dv;
  bool is_all = true;  ///< one call makes them, and nothing is added to them
};
void attend_tiles_backward(const AttentionInputs& inputs,
                           std::span<const KeyLines> lines,
                           const AttentionAnswer& answer,
                           AttentionGradients& gradients);

/// What computes such a call, and why nothing better does: on the CPU the
/// kernel's name, on CUDA "hopper", "flash, not cudnn: it takes no windows" or
/// "blocked, not flash: it has no softcap".
std::string which_kernel(const AttentionInputs& inputs,
                         std::span<const KeyLines> lines);

/// attend_tiles from torch operators, block by block, on any device: for cases
/// that no kernel of ours or torch's covers.
void attend_tiles_blocked(const AttentionInputs& inputs,
                          std::span<const KeyLines> lines,
                          Accumulator& running);
void attend_tiles_backward_blocked(const AttentionInputs& inputs,
                                   std::span<const KeyLines> lines,
                                   const AttentionAnswer& answer,
                                   AttentionGradients& gradients);

}  // namespace longspan
