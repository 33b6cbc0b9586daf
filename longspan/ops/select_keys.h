#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace longspan {

struct Selection {
  at::Tensor indices;  ///< int32 [Tq, slots], ascending, then -1
  at::Tensor scores;   ///< [Tq, slots], accumulation type, -inf for an empty
                       ///< slot; [Tq, 0] where nobody asked
};

/// The lightning indexer: for each query the `slots` keys with the greatest
/// score[t, s] = sum_h weights[t, h] * max(0, q[t, h] . k[s]) in its window
/// [start[t], end[t]).
///
/// q [Tq, Hi, Di], k [Tk, Di], weights [Tq, Hi] in the accumulation type of q,
/// start and end int32 [Tq]; all may have rows before, [B, Tq, Hi, Di] and so
/// on. Equal scores go to the lower key, NaN ranks first, -0 is 0. Fewer
/// visible keys than slots are ordinary. Scores carry a gradient to q, k and
/// weights when asked for. The same bits for every split of the queries.
///
/// torch.ops.longspan.select_keys(q, k, weights, start, end, slots, scores)
/// -> (scores, indices)
Selection select_keys(const at::Tensor& q, const at::Tensor& k,
                      const at::Tensor& weights, const at::Tensor& start,
                      const at::Tensor& end, int64_t slots,
                      bool with_scores = false);

/// The scores of given keys, [Tq, slots], differentiable in q, k and weights;
/// -inf where a slot is outside [0, Tk). On CUDA they may differ from those of
/// select_keys in the last bits: another kernel sums them.
///
/// torch.ops.longspan.score_selected(q, k, weights, indices)
at::Tensor score_selected(const at::Tensor& q, const at::Tensor& k,
                          const at::Tensor& weights, const at::Tensor& indices);

/// The greatest `slots` of each row of scores [.., T, Tk] inside its window, by
/// the same order: int32 [.., T, slots]. No windows: all keys.
///
/// torch.ops.longspan.top_keys(scores, slots, start, end)
at::Tensor top_keys(const at::Tensor& scores, int64_t slots,
                    const at::Tensor& start = {}, const at::Tensor& end = {});

/// What trains an indexer: for each query the divergence
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
