#pragma once

#include "longspan/ops/attend_selected/inputs.h"
#include "longspan/ops/partial_attention.h"

namespace longspan {

/// Selected attention from torch's own operators, a few queries at a time: for
/// devices and shapes without a kernel. Nothing is read back to the host.

/// [B, Tq, H, value_dim] and [B, Tq, H], both in the accumulation type.
PartialAttention attend_selected_composite(const SelectedInputs& in);

/// What the derivative needs beside the inputs.
struct SelectedResult {
  at::Tensor dout;   ///< [B, Tq, H, value_dim]
  at::Tensor lse;    ///< [B, Tq, H], of the keys and the sink
  at::Tensor delta;  ///< [B, Tq, H]
};

/// dq [B, Tq, H, D] and dkv [B, Tk, G, D], both in the accumulation type.
struct SelectedSums {
  at::Tensor dq, dkv;
};
SelectedSums attend_selected_backward_composite(const SelectedInputs& in,
                                                const SelectedResult& result);

/// [B, Tq, G, slots], the accumulation type, summed over heads.
at::Tensor selected_weights_composite(const SelectedInputs& in,
                                      const at::Tensor& lse);

}  // namespace longspan
