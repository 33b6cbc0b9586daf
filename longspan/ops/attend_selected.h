#pragma once

#include <ATen/core/Tensor.h>

#include "longspan/ops/partial_attention.h"
#include "longspan/ops/selection.h"

namespace longspan {

/// Attention of each query to the keys of its own list (sparse), on one rank.
///
/// q [Tq, H, D]; kv [Tk, D], or [Tk, G, D] with G key heads that divide H;
/// indices int32 or int64 [Tq, slots], or [Tq, G, slots]. All may have rows
/// before: [B, Tq, H, D], [B, Tk, D] and so on. D is 1 to 576. A slot outside
/// [0, Tk) is empty: it is skipped, and never used as an address. A key that is
/// listed twice counts twice. A query without keys has out 0, lse -inf and
/// passes no gradient.
///
/// Operators, for one rank and for many, are in attention/selected.h; here are
/// the functions below them, on tensors that check_selected has checked and
/// that SelectedInputs (attend_selected/inputs.h) brings into one form.

struct SelectedInputs;

/// out [B, Tq, H, value_dim] in the type of q, lse [B, Tq, H].
PartialAttention attend_selected(const SelectedInputs& in);

struct SelectedGradients {
  at::Tensor dq;     ///< [B, Tq, H, D], type of q
  at::Tensor dkv;    ///< [B, Tk, G, D], accumulation type
  at::Tensor dsink;  ///< [H], accumulation type; empty without a sink
};

/// The derivatives; out and lse are those of attend_selected. On CUDA dkv may
/// differ in the last bits from run to run, unless torch is told to be
/// deterministic.
SelectedGradients attend_selected_backward(const SelectedInputs& in,
                                           const at::Tensor& dout,
                                           const at::Tensor& out,
                                           const at::Tensor& lse);

/// Attention weights, summed over the heads of a query and normalised over
/// the slots: [B, Tq, G, slots], each group by itself, 0 for an empty slot and
/// for a query without keys. `lse` is that of attend_selected; a sink takes its
/// share before heads are added.
at::Tensor selected_weights(const SelectedInputs& in, const at::Tensor& lse);

}  // namespace longspan
