#pragma once

#include <ATen/core/Tensor.h>

#include "longspan/ops/key_windows.h"
#include "longspan/ops/selection.h"

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

}  // namespace longspan
