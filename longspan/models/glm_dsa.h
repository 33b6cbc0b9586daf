#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "longspan/attention/fetch.h"
#include "longspan/models/layer_share.h"

namespace longspan {

/// What attention of GLM-5.2 (and DeepSeek-V3.2) reads, of this rank's tokens.
///
/// A token has one latent row of C channels, from which `expansion` makes a key
/// and a value for each head, and R rotated channels that all heads share.
struct GlmDsaTensors {
  at::Tensor q;          ///< [tokens, H, K + R], the last R rotated
  at::Tensor rows;       ///< [tokens, C + R], the last R rotated
  at::Tensor expansion;  ///< [H, K + V, C]: kv_b_proj by heads
  /// Of the indexer: [tokens, Hi, Di], [tokens, Di], [tokens, Hi]; all rotated
  /// and scaled. Undefined where an earlier layer's selection is taken over.
  at::Tensor index_q = {}, index_k = {}, index_weights = {};
  at::Tensor selection = {};  ///< of an earlier layer
};

struct GlmDsaOptions {
  int64_t slots = 0;                 ///< keys that a query selects (index_topk)
  std::optional<double> scale = {};  ///< 1 / sqrt(K + R) unless given
  /// Whether scores and target are made, which train the indexer
  /// (index_loss); otherwise nothing flows into it.
  bool train_indexer = false;
  Fetch fetch = Fetch::gathered;
};

struct GlmDsaAnswer {
  at::Tensor out;        ///< [tokens, H, V] like q
  at::Tensor selection;  ///< int32 [tokens, slots], tokens of the stream, or -1
  at::Tensor scores;     ///< as LayerAnswer has them
  at::Tensor target;
};

/// Attention to the keys that an indexer selects, over the ranks of a group:
/// what one rank gives for these tokens, for each head
///
///   out = sum over s of softmax(scale q . key_s) value_s
///
/// over the `slots` visible tokens s with the greatest sum of index_weights[h]
/// max(0, index_q[h] . index_k[s]). Rows travel, not heads: queries are taken
/// into the rows' space (absorbed), and what they find is taken to values.
/// A query that sees nothing, such as a pad's, has 0.
///
/// Differentiable in q, rows and expansion; the indexer's by scores. Gradients
/// are those of the sum of all ranks' losses; those of expansion **sum** over
/// the ranks.
GlmDsaAnswer glm_dsa(const GlmDsaTensors& tensors, const LayerShare& share,
                     const GlmDsaOptions& options);

}  // namespace longspan
