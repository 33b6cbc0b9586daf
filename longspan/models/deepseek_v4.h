#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "longspan/models/layer_share.h"
#include "longspan/models/rotary.h"

namespace longspan {

/// What pools of tokens are made of, by a compressor of DeepSeek-V4 or by its
/// indexer's: every channel is pooled with the softmax of its gates, normed,
/// and turned to the position of the pool's first token.
struct Compression {
  at::Tensor values;  ///< [tokens, D], or [tokens, 2 D] with an overlap
  at::Tensor gates;   ///< like values
  at::Tensor bias;    ///< [ratio, ..]: of the gates of each window
  at::Tensor norm;    ///< [D]: the weight of the norm
};

/// What attention of DeepSeek-V4 reads, of this rank's tokens. Nothing is
/// rotated yet.
struct DeepseekV4Tensors {
  at::Tensor q;      ///< [tokens, H, D]
  at::Tensor kv;     ///< [tokens, D]: a row is the key and the value
  at::Tensor sinks;  ///< [H]: logits without a value
  /// Layers with a compressor; without, only the window is seen.
  std::optional<Compression> pools = {};
  /// Layers that select among their pools; without, all that ended are seen.
  std::optional<Compression> index_pools = {};
  at::Tensor index_q = {};        ///< [tokens, Hi, Di]
  at::Tensor index_weights = {};  ///< [tokens, Hi], scaled
};

struct DeepseekV4Options {
  int64_t window = 1;  ///< tokens that a query sees, itself included
  int64_t ratio = 0;   ///< tokens of a pool
  int64_t slots = 0;   ///< pools that a query selects (index_topk)
  RotaryConfig rotary = {};
  double eps = 1e-6;                 ///< of the norms of pools
  std::optional<double> scale = {};  ///< 1 / sqrt(D) unless given
};

/// Attention of DeepSeek-V4 over the ranks of a group: each token looks at a
/// window of rows, at pools of the tokens before (all that ended, or those
/// that its indexer selects) and at a sink, and the rotation that values carry
/// is taken back at its position. What one rank gives for each document by
/// itself, [tokens, H, D] like q; 0 for pads.
///
/// Pools look at the window before their own too where values have twice the
/// channels of kv. What travels is known from the documents: rows before each
/// border, parts of pools that straddle ranks, and finished pools.
///
/// Differentiable in q, kv, sinks and what `pools` has; nothing flows into the
/// indexer. Gradients are those of the sum of all ranks' losses; those of
/// sinks, biases and norms **sum** over the ranks.
at::Tensor deepseek_v4(const DeepseekV4Tensors& tensors,
                       const LayerShare& share,
                       const DeepseekV4Options& options);

}  // namespace longspan
