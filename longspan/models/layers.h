#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>

#include "longspan/models/glm_dsa.h"
#include "longspan/models/layer_share.h"
#include "longspan/models/rotary.h"

namespace longspan {

/// Layers of model families as modules. Names and shapes of their parameters
/// are those of transformers 5.22, so that load_weights finds them in a
/// checkpoint under the prefix of the layer.
///
/// forward takes [tokens, hidden] of this rank, in local order, and gives the
/// same; norms before and residuals after are the caller's, and so is a loss.
/// What comes out for pads means nothing and is seen by nobody. Norms and
/// scans are computed in float32 (float64 for float64). After backward on
/// every rank, gradients of parameters **sum** over the ranks.
///
/// New ones have random weights from torch's generator; ranks that are to
/// agree load the same ones.

/// x weight' + bias; weight [out, in].
class Projection : public torch::nn::Module {
 public:
  Projection(int64_t in, int64_t out, bool with_bias = false);
  at::Tensor forward(const at::Tensor& x) const;

  at::Tensor weight;
  at::Tensor bias;  ///< undefined where there is none
};

/// The weight of a norm or of a convolution, and a bias where it has one.
class Weight : public torch::nn::Module {
 public:
  explicit Weight(at::Tensor start, at::Tensor bias_start = {});

  at::Tensor weight;
  at::Tensor bias;
};

// ---- Mamba 2: "backbone.layers.<i>.mixer." in a checkpoint of Mamba 2.

struct Mamba2Config {
  int64_t hidden = 0;
  int64_t heads = 0;
  int64_t head_dim = 0;
  int64_t states = 0;  ///< state_size
  int64_t groups = 1;
  int64_t taps = 4;     ///< conv_kernel
  int64_t chunk = 256;  ///< chunk_size: speed and rounding alone
  bool with_bias = false;
  bool with_conv_bias = true;
  double eps = 1e-5;
  double shortest_step = 0;  ///< time_step_limit
  double longest_step = std::numeric_limits<double>::infinity();
};

class Mamba2Mixer : public torch::nn::Module {
 public:
  explicit Mamba2Mixer(const Mamba2Config& config);
  at::Tensor forward(const at::Tensor& hidden, const LayerShare& share) const;

 private:
  Mamba2Config config_;
  std::shared_ptr<Projection> in_proj_, out_proj_;
  std::shared_ptr<Weight> conv1d_, norm_;
  at::Tensor dt_bias_, A_log_, D_;
};

// ---- Qwen3-Next: "model.layers.<i>.linear_attn.".

struct GatedDeltaConfig {
  int64_t hidden = 0;
  int64_t key_heads = 0;
  int64_t value_heads = 0;  ///< a multiple of key_heads
  int64_t key_dim = 0;      ///< of a head
  int64_t value_dim = 0;
  int64_t taps = 4;
  int64_t chunk = 64;
  double eps = 1e-6;
};

class GatedDeltaNet : public torch::nn::Module {
 public:
  explicit GatedDeltaNet(const GatedDeltaConfig& config);
  at::Tensor forward(const at::Tensor& hidden, const LayerShare& share) const;

 private:
  GatedDeltaConfig config_;
  std::shared_ptr<Projection> in_proj_qkvz_, in_proj_ba_, out_proj_;
  std::shared_ptr<Weight> conv1d_, norm_;
  at::Tensor dt_bias_, A_log_;
};

// ---- GLM-5.2: "model.layers.<i>.self_attn.".

struct GlmDsaConfig {
  int64_t hidden = 0;
  int64_t heads = 0;
  int64_t q_rank = 0;      ///< q_lora_rank
  int64_t kv_rank = 0;     ///< kv_lora_rank
  int64_t key_dim = 0;     ///< qk_nope_head_dim
  int64_t rotary_dim = 0;  ///< qk_rope_head_dim
  int64_t value_dim = 0;   ///< v_head_dim
  int64_t index_heads = 0;
  int64_t index_dim = 0;
  int64_t slots = 0;  ///< index_topk
  bool with_bias = false;
  bool shared = false;  ///< takes over a selection: has no indexer
  double theta = 10000;
  at::Tensor frequencies = {};       ///< inv_freq, in place of theta
  std::optional<double> scale = {};  ///< where yarn changes it
  Fetch fetch = Fetch::gathered;
};

class GlmDsaIndexer;

class GlmDsaAttention : public torch::nn::Module {
 public:
  explicit GlmDsaAttention(const GlmDsaConfig& config);

  struct Answer {
    at::Tensor out;        ///< [tokens, hidden]
    at::Tensor selection;  ///< for layers that share it
  };
  /// A shared layer is given the selection of an earlier one; others make
  /// their own. Nothing flows into the indexer, as in transformers.
  Answer forward(const at::Tensor& hidden, const LayerShare& share,
                 const at::Tensor& selection = {}) const;

 private:
  GlmDsaConfig config_;
  std::shared_ptr<Projection> q_a_proj_, q_b_proj_, kv_a_proj_, kv_b_proj_,
      o_proj_;
  std::shared_ptr<Weight> q_a_layernorm_, kv_a_layernorm_;
  std::shared_ptr<GlmDsaIndexer> indexer_;
};

// ---- DeepSeek-V4: "model.layers.<i>.self_attn.".

struct DeepseekV4Config {
  /// sliding_attention, heavily_compressed_attention and
  /// compressed_sparse_attention.
  enum class Kind { window, heavy, sparse };

  Kind kind = Kind::window;
  int64_t hidden = 0;
  int64_t heads = 0;
  int64_t head_dim = 0;
  int64_t q_rank = 0;
  int64_t out_groups = 1;  ///< o_groups
  int64_t out_rank = 0;    ///< o_lora_rank
  int64_t window = 128;
  int64_t ratio = 0;  ///< compress_rates of the kind
  int64_t index_heads = 0;
  int64_t index_dim = 0;
  int64_t slots = 0;  ///< index_topk
  double eps = 1e-6;
  /// "main" for windows, "compress" for others; channels of all heads, those
  /// of the indexer too.
  RotaryConfig rotary = {};
};

class DeepseekV4Compressor;

class DeepseekV4Attention : public torch::nn::Module {
 public:
  explicit DeepseekV4Attention(const DeepseekV4Config& config);
  at::Tensor forward(const at::Tensor& hidden, const LayerShare& share) const;

 private:
  DeepseekV4Config config_;
  std::shared_ptr<Projection> q_a_proj_, q_b_proj_, kv_proj_, o_b_proj_;
  std::shared_ptr<Weight> q_a_norm_, kv_norm_, o_a_proj_;
  at::Tensor sinks_;
  std::shared_ptr<DeepseekV4Compressor> compressor_;
};

}  // namespace longspan
