#pragma once

#include <ATen/core/Tensor.h>

namespace longspan {

/// The lightning indexer's score of every key, [Tq, Tk]:
/// score[t, s] = sum_h weights[t, h] * max(0, q[t, h] . k[s]).
///
/// Inputs as for select_keys; with windows, keys outside [start[t], end[t]) get
/// -inf. In the accumulation type; differentiable in q, k and weights. Beside
/// the answer it takes bounded scratch, however many heads there are. For the
/// greatest scores alone call select_keys, which never stores all scores.
///
/// torch.ops.longspan.index_scores(q, k, weights, start, end)
at::Tensor index_scores(const at::Tensor& q, const at::Tensor& k,
                        const at::Tensor& weights, const at::Tensor& start = {},
                        const at::Tensor& end = {});

}  // namespace longspan
