#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "longspan/attention/fetch.h"
#include "longspan/comm/group.h"
#include "longspan/ops/selection.h"
#include "longspan/plan/attention_layout.h"

namespace longspan {

/// Selected-key attention, on one rank or over the ranks of a group: what one
/// rank gives for these queries, whatever the ownership.
///
/// Queries, rows of keys (`kv`) and index keys are those of the rank's own
/// tokens in the ownership's local order; `indices` and windows are tokens of
/// the stream. Selections have the bits of one rank; other results differ by
/// rounding. Without a layout there is one rank, which holds the whole stream
/// in order.
///
/// Attention: q [Tq, H, D]; kv [Tk, D], or [Tk, G, D] with G key heads that
/// divide H; indices int32 or int64 [Tq, slots], or [Tq, G, slots]. D is 1 to
/// 576. A slot outside of the stream is empty: it is skipped, and never used as
/// an address. A key that is listed twice counts twice. A query without keys
/// has out 0, lse -inf and passes no gradient.
/// The indexer: q [Tq, Hi, Di], k [Tk, Di], weights [Tq, Hi] in the
/// accumulation type of q, windows int32 [Tq]. Each query gets the `slots` keys
/// of its window with the greatest score[t, s] = sum_h weights[t, h] *
/// max(0, q[t, h] . k[s]); equal scores go to the lower key, NaN ranks first,
/// and fewer visible keys than slots are ordinary. All may have rows before,
/// [B, Tq, H, D] and so on.
///
/// How keys reach queries:
///   gathered  all rows of keys in one exchange, in the order of the stream.
///             Backward sums their gradients over the ranks in the accumulation
///             type, in the order of the ranks, and casts them after that.
///   needed    only rows that some query here selected: counts and places are
///             asked for, the rows come, and their gradients go back the same
///             way. Sizes depend on the data, so the host waits for the device.
///
/// Kept for backward: this rank's own tensors, the indices, the output and its
/// log-sum-exp. Keys of other ranks come again, as in attend: keeping them
/// would cost the keys of the whole stream in every layer, which splitting over
/// ranks is meant to avoid.
///
/// Gradient contract: when every rank backpropagates the loss of its own
/// tokens, the gradients of q, kv and of the indexer are those of the sum of
/// all losses, and parameter gradients (of sinks too) **summed** over the ranks
/// are the full gradients. Every rank must run backward, in the same order as
/// forward.

struct SelectOptions {
  int64_t slots = 0;
  at::Tensor start = {};  ///< windows; undefined: keys_of of the mask
  at::Tensor end = {};
  bool scores = false;
  /// Queries of the indexer travel so that work is even, cut by the lengths of
  /// the windows, and the selections come back. Under windows of the mask every
  /// rank knows the cut; given windows are first gathered as lengths, and the
  /// host waits for them.
  bool balanced = false;
};

/// The keys of each query, tokens of the stream. Index keys are gathered;
/// scores carry gradients to q, k and weights where asked for.
///
/// torch.ops.longspan.select_keys(q, k, weights, start, end, slots, scores,
/// balanced=False, layout=None, group="") -> (scores, indices)
Selection select_keys(const at::Tensor& q, const at::Tensor& k,
                      const at::Tensor& weights, const SelectOptions& options);
Selection select_keys(const at::Tensor& q, const at::Tensor& k,
                      const at::Tensor& weights, const AttentionLayout& layout,
                      const Group& group, const SelectOptions& options);

/// The scores of given keys, differentiable in q, k and weights.
///
/// torch.ops.longspan.score_selected(q, k, weights, indices, layout=None,
/// fetch="gathered", group="")
at::Tensor score_selected(const at::Tensor& q, const at::Tensor& k,
                          const at::Tensor& weights, const at::Tensor& indices);
at::Tensor score_selected(const at::Tensor& q, const at::Tensor& k,
                          const at::Tensor& weights, const at::Tensor& indices,
                          const AttentionLayout& layout, const Group& group,
                          Fetch fetch = Fetch::gathered);

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

/// Attention to given keys; a layer may use the selection of an earlier one.
///
/// torch.ops.longspan.attend_selected(q, kv, indices, sink, scale, value_dim,
/// layout=None, fetch="gathered", group="") -> (out, lse)
SelectedAnswer attend_selected(const at::Tensor& q, const at::Tensor& kv,
                               const at::Tensor& indices,
                               const SelectedOptions& options);
SelectedAnswer attend_selected(const at::Tensor& q, const at::Tensor& kv,
                               const at::Tensor& indices,
                               const AttentionLayout& layout,
                               const Group& group,
                               const SelectedOptions& options,
                               Fetch fetch = Fetch::gathered);

/// Attention weights for index_loss: [Tq, slots], or [Tq, G, slots]. They carry
/// no gradient.
///
/// torch.ops.longspan.selected_weights(q, kv, indices, lse, sink, scale,
/// layout=None, fetch="gathered", group="")
at::Tensor selected_weights(const at::Tensor& q, const at::Tensor& kv,
                            const at::Tensor& indices, const at::Tensor& lse,
                            const SelectedOptions& options);
at::Tensor selected_weights(const at::Tensor& q, const at::Tensor& kv,
                            const at::Tensor& indices, const at::Tensor& lse,
                            const AttentionLayout& layout, const Group& group,
                            const SelectedOptions& options,
                            Fetch fetch = Fetch::gathered);

/// The tensors of one layer on this rank. kv and index_k have one type.
struct SelectedLayer {
  at::Tensor q, kv;                      ///< of attention
  at::Tensor index_q, index_k, weights;  ///< of the indexer
};

struct LayerAnswer {
  at::Tensor out, lse;
  at::Tensor indices;
  at::Tensor scores;  ///< [Tq, 0] where nobody asked
  at::Tensor target;  ///< selected_weights; [Tq, 0] where nobody asked
};

/// select_keys, then attend_selected, with fewer exchanges: gathered moves kv
/// and index keys together, one run of bytes a token; needed gathers index keys
/// and then fetches rows of kv. Backward moves both together where scores were
/// asked for, else kv alone.
///
/// torch.ops.longspan.select_and_attend(q, kv, index_q, index_k, weights,
/// start, end, sink, slots, scale, value_dim, scores=False, target=False,
/// balanced=False, layout=None, fetch="gathered", group="")
/// -> (out, lse, scores, target, indices)
LayerAnswer select_and_attend(const SelectedLayer& layer,
                              const SelectOptions& selection,
                              const SelectedOptions& attention,
                              bool with_target = false);
LayerAnswer select_and_attend(const SelectedLayer& layer,
                              const AttentionLayout& layout, const Group& group,
                              const SelectOptions& selection,
                              const SelectedOptions& attention,
                              Fetch fetch = Fetch::gathered,
                              bool with_target = false);

}  // namespace longspan
