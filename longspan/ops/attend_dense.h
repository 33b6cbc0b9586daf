#pragma once

#include <ATen/core/Tensor.h>

namespace longspan {

struct DenseOptions {
  double scale = 1;
  at::Tensor mask = {};  ///< broadcasts to [B, H, T, Tk]; bool: true = may see;
                         ///< floating: added to the scores
  at::Tensor sink = {};  ///< [H]: a logit without a value
};

struct DenseAnswer {
  at::Tensor out;  ///< [B, H, T, Dv], like q
  at::Tensor lse;  ///< [B, H, T], natural log over the keys, the sink left out;
                   ///< accumulation type, no gradient
};

/// Attention with every score written out: eager, T x Tk memory for each head,
/// for small inputs and as the answer to compare with.
///
/// q [B, H, T, D], k [B, G, Tk, D] and v [B, G, Tk, Dv] with G heads that
/// divide H. -inf in an additive mask hides a key, and so does the lowest
/// finite number of its type or of bfloat16: a query whose keys are all hidden
/// has out 0, lse -inf and passes no gradient. Differentiable in q, k, v, the
/// sink and an additive mask, any number of times.
///
/// torch.ops.longspan.attend_dense(q, k, v, mask, sink, scale) -> (out, lse)
DenseAnswer attend_dense(const at::Tensor& q, const at::Tensor& k,
                         const at::Tensor& v, const DenseOptions& options);

}  // namespace longspan
