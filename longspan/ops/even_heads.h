#pragma once

#include "longspan/ops/accumulator.h"
#include "longspan/ops/attend_tiles.h"

namespace longspan {

/// Inputs as fused kernels take them: as they are where heads share key heads
/// evenly, which the kernels know, or else with keys copied for each head.
class EvenHeads {
 public:
  explicit EvenHeads(const AttentionInputs& inputs);

  const AttentionInputs& inputs() const { return inputs_; }

  /// Adds gradients of the keys or values of inputs() to those of the key heads
  /// that were given, tokens from `token` on, of the rows from `row` on.
  void add_to_key_heads(Accumulator& total, const at::Tensor& part, int64_t row,
                        int64_t token) const;

 private:
  AttentionInputs inputs_;
  int64_t heads_per_key_head_, head_offset_;
  bool expanded_;
};

}  // namespace longspan
