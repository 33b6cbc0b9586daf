#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

/// Words of selected keys that need no ranks. The operators that choose and
/// attend are in attention/selected.h.
namespace longspan {

struct Selection {
  at::Tensor indices;  ///< int32 [Tq, slots], ascending, then -1
  at::Tensor scores;   ///< [Tq, slots], accumulation type, -inf for an empty
                       ///< slot; [Tq, 0] where nobody asked
};

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

enum class SelectedWork { forward, backward, weights };

/// Which kernel computes such a call, and why a faster one does not: "hopper",
/// "ampere, not hopper: elements are not bfloat16". "torch" stands for its
/// operators on some queries at a time.
std::string which_selected_kernel(const at::Tensor& q, const at::Tensor& kv,
                                  const at::Tensor& indices,
                                  int64_t value_dim = 0,
                                  SelectedWork work = SelectedWork::forward);

}  // namespace longspan
