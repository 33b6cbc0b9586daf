#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace longspan {

struct SelectedOptions {
  double scale = 1;
  int64_t value_dim = 0;  ///< values are the first channels of keys; 0: all
  at::Tensor sink = {};   ///< [H]: a logit without a value
};

struct SelectedAnswer {
  at::Tensor out;  ///< [Tq, H, value_dim], like q
  at::Tensor lse;  ///< [Tq, H], natural log over the keys, the sink left out;
                   ///< accumulation type, no gradient
};

/// Attention of each query to the keys of its own list.
///
/// q [Tq, H, D]; kv [Tk, D], or [Tk, G, D] with G key heads that divide H;
/// indices int32 or int64 [Tq, slots], or [Tq, G, slots]. All may have rows
/// before: [B, Tq, H, D], [B, Tk, D] and so on. D is 1 to 576. A slot outside
/// [0, Tk) is empty: it is skipped, and never used as an address. A key that is
/// listed twice counts twice. A query without keys has out 0, lse -inf and
/// passes no gradient.
///
/// torch.ops.longspan.attend_selected(q, kv, indices, sink, scale, value_dim).
SelectedAnswer attend_selected(const at::Tensor& q, const at::Tensor& kv,
                               const at::Tensor& indices,
                               const SelectedOptions& options);

struct SelectedGradients {
  at::Tensor dq;     ///< like q
  at::Tensor dkv;    ///< like kv; accumulation type where `exact_dkv`
  at::Tensor dsink;  ///< [H], accumulation type; empty without a sink
};

/// The derivatives. On CUDA dkv may differ in the last bits from run to run,
/// unless torch is told to be deterministic. `exact_dkv` leaves dkv in the
/// accumulation type, for those who still have to add it up over ranks.
SelectedGradients attend_selected_backward(
    const at::Tensor& dout, const at::Tensor& q, const at::Tensor& kv,
    const at::Tensor& indices, const at::Tensor& out, const at::Tensor& lse,
    const SelectedOptions& options, bool exact_dkv);

/// What the heads of a query look at, summed over heads and normalised over
/// the slots: [Tq, slots] (or [Tq, G, slots], each group by itself), 0 for an
/// empty slot and for a query without keys. No gradient. `lse` is that of
/// attend_selected; a sink takes its share before heads are added.
///
/// torch.ops.longspan.selected_weights(q, kv, indices, lse, sink, scale).
at::Tensor selected_weights(const at::Tensor& q, const at::Tensor& kv,
                            const at::Tensor& indices, const at::Tensor& lse,
                            const SelectedOptions& options);

enum class SelectedWork { forward, backward, weights };

/// Which kernel computes such a call, and why a faster one does not: "hopper",
/// "ampere, not hopper: elements are not bfloat16". "torch" stands for its
/// operators on some queries at a time.
std::string which_selected_kernel(const at::Tensor& q, const at::Tensor& kv,
                                  const at::Tensor& indices,
                                  int64_t value_dim = 0,
                                  SelectedWork work = SelectedWork::forward);

}  // namespace longspan
