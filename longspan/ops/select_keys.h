#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "longspan/ops/key_windows.h"

namespace longspan {

/// The lightning indexer and its top-k, on one rank: for each query the keys of
/// its window [start[t], end[t]) with the greatest `slots` scores,
/// score[t, s] = sum_h weights[t, h] * max(0, q[t, h] . k[s]).
///
/// q [Tq, Hi, Di], k [Tk, Di], weights [Tq, Hi] in the accumulation type of q,
/// start and end int32 [Tq]; all may have rows before, [B, Tq, Hi, Di] and so
/// on. Of equal scores the lower key wins, NaN ranks first, -0 is 0. There may
/// be fewer visible keys than slots. Any split of the queries gives the same
/// bits. A score passes its gradient where a product is neither 0 nor less, so
/// also where it is NaN, as torch's relu does.
///
/// Operators, for one rank and for many, are in attention/selected.h; here are
/// the functions below them, on tensors that check_indexer has checked and that
/// IndexerInputs (select_keys/inputs.h) brings into one form.

struct Selection {
  at::Tensor indices;  ///< int32 [Tq, slots], ascending, then -1
  at::Tensor scores;   ///< [Tq, slots], accumulation type, -inf for an empty
                       ///< slot; [Tq, 0] where nobody asked
};

struct IndexerInputs;

/// Windows and answers are [B, Tq] and [B, Tq, slots].
Selection select_keys(const IndexerInputs& in, const KeyWindows& windows,
                      int64_t slots, bool with_scores);

/// The scores of given keys [B, Tq, slots]; -inf where a slot is outside
/// [0, Tk). On CUDA they may differ from those of select_keys in the last bits:
/// another kernel sums them.
at::Tensor score_selected(const IndexerInputs& in, const at::Tensor& indices);

struct IndexerGradients {
  at::Tensor dq;            ///< [B, Tq, Hi, Di], type of q
  at::Tensor dk, dweights;  ///< accumulation type
};
IndexerGradients score_selected_backward(const IndexerInputs& in,
                                         const at::Tensor& indices,
                                         const at::Tensor& dscores);

/// The greatest `slots` of each row of scores [.., T, Tk] inside its window, in
/// the order of select_keys: int32 [.., T, slots]. No windows: all keys.
///
/// torch.ops.longspan.top_keys(scores, slots, start, end)
at::Tensor top_keys(const at::Tensor& scores, int64_t slots,
                    const at::Tensor& start = {}, const at::Tensor& end = {});

/// The loss that trains an indexer: for each query the KL divergence
/// sum_j target_j * (log target_j - log softmax(scores)_j) over its slots,
/// [Tq]. Empty slots (scores -inf) and queries without keys count 0.
/// Differentiable in scores; `target` is from selected_weights.
///
/// torch.ops.longspan.index_loss(scores, target)
at::Tensor index_loss(const at::Tensor& scores, const at::Tensor& target);

enum class IndexerWork { select, score, score_backward };

/// Which kernel computes such a call, and why a faster one does not: "hopper",
/// "ampere, not hopper: no kernel for 24 heads". "torch" stands for its
/// operators on some queries at a time.
std::string which_indexer_kernel(const at::Tensor& q, const at::Tensor& k,
                                 const at::Tensor& weights, int64_t slots,
                                 IndexerWork work = IndexerWork::select);

}  // namespace longspan
