#include "longspan/models/layers.h"

#include <ATen/ATen.h>

#include <cmath>
#include <utility>

#include "longspan/core/detail/check.h"
#include "longspan/models/convolve.h"
#include "longspan/models/deepseek_v4.h"
#include "longspan/models/delta.h"
#include "longspan/models/detail/norms.h"
#include "longspan/models/detail/run_chunks.h"
#include "longspan/models/mamba2.h"

namespace longspan {

namespace {

/// Evenly from [-1, 1] / sqrt(in).
at::Tensor drawn_weight(at::IntArrayRef sizes, int64_t in) {
  const double bound = 1 / std::sqrt(static_cast<double>(in));
  return at::empty(sizes).uniform_(-bound, bound);
}

/// The widths of a configuration, of which none may be 0.
void check_widths(
    const char* who,
    std::initializer_list<std::pair<const char*, int64_t>> widths) {
  for (const auto& [name, width] : widths) {
    check(width >= 1, who, ": `", name, "` is ", width,
          "; expected at least 1");
  }
}

/// [tokens, a + b + ..] in parts.
std::vector<at::Tensor> parts_of(const at::Tensor& x, at::IntArrayRef sizes) {
  return x.split_with_sizes(sizes, -1);
}

at::Tensor by_heads(const at::Tensor& x, int64_t heads) {
  return x.reshape({x.size(0), heads, x.size(1) / heads});
}

}  // namespace

Projection::Projection(int64_t in, int64_t out, bool with_bias) {
  weight = register_parameter("weight", drawn_weight({out, in}, in));
  if (with_bias) bias = register_parameter("bias", drawn_weight({out}, in));
}

at::Tensor Projection::forward(const at::Tensor& x) const {
  return at::linear(x, weight,
                    bias.defined() ? std::optional(bias) : std::nullopt);
}

Weight::Weight(at::Tensor start, at::Tensor bias_start) {
  weight = register_parameter("weight", std::move(start));
  if (bias_start.defined()) {
    bias = register_parameter("bias", std::move(bias_start));
  }
}

// ---- Mamba 2.

Mamba2Mixer::Mamba2Mixer(const Mamba2Config& config) : config_(config) {
  const char* const who = "Mamba2Mixer";
  check_widths(who, {{"hidden", config.hidden},
                     {"heads", config.heads},
                     {"head_dim", config.head_dim},
                     {"states", config.states},
                     {"groups", config.groups},
                     {"taps", config.taps},
                     {"chunk", config.chunk}});
  check(config.heads % config.groups == 0, who, ": ", config.groups,
        " groups do not divide ", config.heads, " heads");
  const int64_t inner = config.heads * config.head_dim;
  const int64_t convolved = inner + 2 * config.groups * config.states;
  in_proj_ = register_module(
      "in_proj",
      std::make_shared<Projection>(
          config.hidden, inner + convolved + config.heads, config.with_bias));
  conv1d_ = register_module(
      "conv1d",
      std::make_shared<Weight>(
          drawn_weight({convolved, 1, config.taps}, config.taps),
          config.with_conv_bias ? drawn_weight({convolved}, config.taps)
                                : at::Tensor()));
  // Steps of time between 0.001 and 0.1, before their softplus.
  const at::Tensor steps =
      at::empty({config.heads}).uniform_(std::log(0.001), std::log(0.1)).exp();
  dt_bias_ = register_parameter("dt_bias", steps.expm1().log());
  A_log_ = register_parameter(
      "A_log", at::arange(1, config.heads + 1, at::kFloat).log());
  D_ = register_parameter("D", at::ones({config.heads}));
  norm_ = register_module("norm", std::make_shared<Weight>(at::ones({inner})));
  out_proj_ = register_module(
      "out_proj",
      std::make_shared<Projection>(inner, config.hidden, config.with_bias));
}

at::Tensor Mamba2Mixer::forward(const at::Tensor& hidden,
                                const LayerShare& share) const {
  share.check_tokens("Mamba2Mixer", "hidden", hidden, {config_.hidden});
  const int64_t inner = config_.heads * config_.head_dim;
  const int64_t shared = config_.groups * config_.states;
  const auto wide = sum_type(hidden);
  const auto projected = parts_of(in_proj_->forward(hidden),
                                  {inner, inner + 2 * shared, config_.heads});
  const at::Tensor mixed = at::silu(
      convolve_runs(projected[1], conv1d_->weight, conv1d_->bias, share));
  const auto read = parts_of(mixed, {inner, shared, shared});
  const at::Tensor steps =
      at::softplus(projected[2].to(wide) + dt_bias_.to(wide))
          .clamp(config_.shortest_step, config_.longest_step);
  const at::Tensor scanned =
      mamba2_scan({.x = by_heads(read[0], config_.heads),
                   .dt = steps,
                   .A = -A_log_.to(wide).exp(),
                   .B = by_heads(read[1], config_.groups),
                   .C = by_heads(read[2], config_.groups),
                   .D = D_},
                  share, config_.chunk);
  const at::Tensor gated =
      scanned.flatten(1).to(wide) * at::silu(projected[0].to(wide));
  return out_proj_->forward(
      rms_normed(gated, norm_->weight, config_.eps).to(hidden.scalar_type()));
}

// ---- Qwen3-Next.

GatedDeltaNet::GatedDeltaNet(const GatedDeltaConfig& config) : config_(config) {
  const char* const who = "GatedDeltaNet";
  check_widths(who, {{"hidden", config.hidden},
                     {"key_heads", config.key_heads},
                     {"value_heads", config.value_heads},
                     {"key_dim", config.key_dim},
                     {"value_dim", config.value_dim},
                     {"taps", config.taps},
                     {"chunk", config.chunk}});
  check(config.value_heads % config.key_heads == 0, who, ": ", config.key_heads,
        " heads of keys do not divide ", config.value_heads, " of values");
  const int64_t keys = config.key_heads * config.key_dim;
  const int64_t values = config.value_heads * config.value_dim;
  in_proj_qkvz_ = register_module(
      "in_proj_qkvz",
      std::make_shared<Projection>(config.hidden, 2 * keys + 2 * values));
  in_proj_ba_ = register_module(
      "in_proj_ba",
      std::make_shared<Projection>(config.hidden, 2 * config.value_heads));
  conv1d_ = register_module(
      "conv1d", std::make_shared<Weight>(drawn_weight(
                    {2 * keys + values, 1, config.taps}, config.taps)));
  dt_bias_ = register_parameter("dt_bias", at::ones({config.value_heads}));
  A_log_ = register_parameter(
      "A_log", at::empty({config.value_heads}).uniform_(0.01, 16).log());
  norm_ = register_module(
      "norm", std::make_shared<Weight>(at::ones({config.value_dim})));
  out_proj_ = register_module(
      "out_proj", std::make_shared<Projection>(values, config.hidden));
}

at::Tensor GatedDeltaNet::forward(const at::Tensor& hidden,
                                  const LayerShare& share) const {
  share.check_tokens("GatedDeltaNet", "hidden", hidden, {config_.hidden});
  const int64_t tokens = hidden.size(0);
  const int64_t heads = config_.value_heads;
  const int64_t of_key = heads / config_.key_heads;
  const int64_t keys = config_.key_heads * config_.key_dim;
  const int64_t values = heads * config_.value_dim;
  const auto wide = sum_type(hidden);
  // For each head of keys: q, k, and v and z of its heads of values.
  const auto qkvz =
      parts_of(by_heads(in_proj_qkvz_->forward(hidden), config_.key_heads),
               {config_.key_dim, config_.key_dim, of_key * config_.value_dim,
                of_key * config_.value_dim});
  const auto ba =
      parts_of(by_heads(in_proj_ba_->forward(hidden), config_.key_heads),
               {of_key, of_key});
  const at::Tensor z = qkvz[3].reshape({tokens, heads, config_.value_dim});
  const at::Tensor mixed = at::silu(convolve_runs(
      at::cat({qkvz[0].flatten(1), qkvz[1].flatten(1), qkvz[2].flatten(1)}, 1),
      conv1d_->weight, {}, share));
  const auto read = parts_of(mixed, {keys, keys, values});
  const at::Tensor decay =
      -A_log_.to(wide).exp() *
      at::softplus(ba[1].flatten(1).to(wide) + dt_bias_.to(wide));
  const at::Tensor out = delta_rule({.q = by_heads(read[0], config_.key_heads),
                                     .k = by_heads(read[1], config_.key_heads),
                                     .v = by_heads(read[2], heads),
                                     .g = decay,
                                     .beta = ba[0].flatten(1).sigmoid()},
                                    share, {.chunk = config_.chunk});
  const at::Tensor gated =
      rms_normed(out, norm_->weight, config_.eps).to(wide) *
      at::silu(z.to(wide));
  return out_proj_->forward(gated.to(hidden.scalar_type()).flatten(1));
}

// ---- GLM-5.2.

class GlmDsaIndexer : public torch::nn::Module {
 public:
  explicit GlmDsaIndexer(const GlmDsaConfig& config) {
    wq_b = register_module(
        "wq_b", std::make_shared<Projection>(
                    config.q_rank, config.index_heads * config.index_dim));
    wk = register_module(
        "wk", std::make_shared<Projection>(config.hidden, config.index_dim));
    k_norm = register_module(
        "k_norm", std::make_shared<Weight>(at::ones({config.index_dim}),
                                           at::zeros({config.index_dim})));
    weights_proj = register_module(
        "weights_proj",
        std::make_shared<Projection>(config.hidden, config.index_heads));
  }

  std::shared_ptr<Projection> wq_b, wk, weights_proj;
  std::shared_ptr<Weight> k_norm;
};

GlmDsaAttention::GlmDsaAttention(const GlmDsaConfig& config) : config_(config) {
  const char* const who = "GlmDsaAttention";
  check_widths(who, {{"hidden", config.hidden},
                     {"heads", config.heads},
                     {"q_rank", config.q_rank},
                     {"kv_rank", config.kv_rank},
                     {"key_dim", config.key_dim},
                     {"value_dim", config.value_dim}});
  check(config.rotary_dim >= 0 && config.rotary_dim % 2 == 0, who,
        ": `rotary_dim` is ", config.rotary_dim, "; expected an even number");
  const auto projection = [&](const char* name, int64_t in, int64_t out,
                              bool with_bias = false) {
    return register_module(name,
                           std::make_shared<Projection>(in, out, with_bias));
  };
  const auto norm = [&](const char* name, int64_t width) {
    return register_module(name, std::make_shared<Weight>(at::ones({width})));
  };
  q_a_proj_ =
      projection("q_a_proj", config.hidden, config.q_rank, config.with_bias);
  q_a_layernorm_ = norm("q_a_layernorm", config.q_rank);
  q_b_proj_ = projection("q_b_proj", config.q_rank,
                         config.heads * (config.key_dim + config.rotary_dim));
  kv_a_proj_ = projection("kv_a_proj_with_mqa", config.hidden,
                          config.kv_rank + config.rotary_dim, config.with_bias);
  kv_a_layernorm_ = norm("kv_a_layernorm", config.kv_rank);
  kv_b_proj_ = projection("kv_b_proj", config.kv_rank,
                          config.heads * (config.key_dim + config.value_dim));
  o_proj_ = projection("o_proj", config.heads * config.value_dim, config.hidden,
                       config.with_bias);
  if (config.shared) return;
  check_widths(who, {{"index_heads", config.index_heads},
                     {"index_dim", config.index_dim},
                     {"slots", config.slots}});
  check(config.index_dim >= config.rotary_dim, who, ": `index_dim` is ",
        config.index_dim, ", below the ", config.rotary_dim,
        " channels that turn");
  indexer_ =
      register_module("indexer", std::make_shared<GlmDsaIndexer>(config));
}

GlmDsaAttention::Answer GlmDsaAttention::forward(
    const at::Tensor& hidden, const LayerShare& share,
    const at::Tensor& selection) const {
  const char* const who = "GlmDsaAttention";
  share.check_tokens(who, "hidden", hidden, {config_.hidden});
  check(selection.defined() == config_.shared, who,
        config_.shared
            ? ": a shared layer needs the selection of an earlier one"
            : ": got a selection, but the layer makes its own");
  const RotaryAngles angles =
      rotary_angles(share.positions(),
                    {.channels = config_.rotary_dim,
                     .theta = config_.theta,
                     .frequencies = config_.frequencies},
                    hidden.scalar_type());
  constexpr double kEps =
      1e-6;  // as transformers has it, whatever rms_norm_eps
  const at::Tensor residual =
      rms_normed(q_a_proj_->forward(hidden), q_a_layernorm_->weight, kEps);
  const auto latent = parts_of(kv_a_proj_->forward(hidden),
                               {config_.kv_rank, config_.rotary_dim});
  const at::Tensor rows =
      at::cat({rms_normed(latent[0], kv_a_layernorm_->weight, kEps),
               rotated(latent[1], angles, RotaryPlace::last)},
              1);
  GlmDsaTensors tensors = {
      .q = rotated(by_heads(q_b_proj_->forward(residual), config_.heads),
                   angles, RotaryPlace::last),
      .rows = rows,
      .expansion =
          kv_b_proj_->weight.view({config_.heads, -1, config_.kv_rank}),
      .selection = selection};
  if (indexer_ != nullptr) {
    const at::NoGradGuard without_gradients;
    const auto wide = sum_type(hidden);
    const at::Tensor keys =
        at::layer_norm(indexer_->wk->forward(hidden), {config_.index_dim},
                       indexer_->k_norm->weight, indexer_->k_norm->bias, kEps);
    tensors.index_k = rotated(keys, angles, RotaryPlace::first);
    tensors.index_q = rotated(
        by_heads(indexer_->wq_b->forward(residual), config_.index_heads),
        angles, RotaryPlace::first);
    // Positive factors pass through max(0, .).
    tensors.index_weights =
        indexer_->weights_proj->forward(hidden).to(wide) /
        std::sqrt(static_cast<double>(config_.index_heads * config_.index_dim));
  }
  const GlmDsaAnswer found = glm_dsa(
      tensors, share,
      {.slots = config_.slots, .scale = config_.scale, .fetch = config_.fetch});
  return {o_proj_->forward(found.out.flatten(1)), found.selection};
}

// ---- DeepSeek-V4.

/// kv_proj, gate_proj, position_bias and kv_norm, as a compressor and its
/// indexer have them.
class DeepseekV4Pools : public torch::nn::Module {
 public:
  DeepseekV4Pools(const DeepseekV4Config& config, int64_t dim) {
    const bool overlap = config.kind == DeepseekV4Config::Kind::sparse;
    const int64_t width = overlap ? 2 * dim : dim;
    kv_proj = register_module(
        "kv_proj", std::make_shared<Projection>(config.hidden, width));
    gate_proj = register_module(
        "gate_proj", std::make_shared<Projection>(config.hidden, width));
    position_bias = register_parameter(
        "position_bias", drawn_weight({config.ratio, width}, width));
    kv_norm =
        register_module("kv_norm", std::make_shared<Weight>(at::ones({dim})));
  }

  Compression compression(const at::Tensor& hidden) const {
    return {.values = kv_proj->forward(hidden),
            .gates = gate_proj->forward(hidden),
            .bias = position_bias,
            .norm = kv_norm->weight};
  }

  std::shared_ptr<Projection> kv_proj, gate_proj;
  std::shared_ptr<Weight> kv_norm;
  at::Tensor position_bias;
};

class DeepseekV4Scorer : public torch::nn::Module {
 public:
  explicit DeepseekV4Scorer(const DeepseekV4Config& config) {
    weights_proj = register_module(
        "weights_proj",
        std::make_shared<Projection>(config.hidden, config.index_heads));
  }
  std::shared_ptr<Projection> weights_proj;
};

class DeepseekV4Indexer : public DeepseekV4Pools {
 public:
  explicit DeepseekV4Indexer(const DeepseekV4Config& config)
      : DeepseekV4Pools(config, config.index_dim) {
    q_b_proj = register_module(
        "q_b_proj", std::make_shared<Projection>(
                        config.q_rank, config.index_heads * config.index_dim));
    scorer =
        register_module("scorer", std::make_shared<DeepseekV4Scorer>(config));
  }
  std::shared_ptr<Projection> q_b_proj;
  std::shared_ptr<DeepseekV4Scorer> scorer;
};

class DeepseekV4Compressor : public DeepseekV4Pools {
 public:
  explicit DeepseekV4Compressor(const DeepseekV4Config& config)
      : DeepseekV4Pools(config, config.head_dim) {
    if (config.kind != DeepseekV4Config::Kind::sparse) return;
    indexer =
        register_module("indexer", std::make_shared<DeepseekV4Indexer>(config));
  }
  std::shared_ptr<DeepseekV4Indexer> indexer;
};

DeepseekV4Attention::DeepseekV4Attention(const DeepseekV4Config& config)
    : config_(config) {
  const char* const who = "DeepseekV4Attention";
  using Kind = DeepseekV4Config::Kind;
  check_widths(who, {{"hidden", config.hidden},
                     {"heads", config.heads},
                     {"head_dim", config.head_dim},
                     {"q_rank", config.q_rank},
                     {"out_groups", config.out_groups},
                     {"out_rank", config.out_rank},
                     {"window", config.window}});
  check(config.heads % config.out_groups == 0, who, ": ", config.out_groups,
        " groups do not divide ", config.heads, " heads");
  if (config.kind != Kind::window) {
    check_widths(who, {{"ratio", config.ratio}});
  }
  if (config.kind == Kind::sparse) {
    check_widths(who, {{"index_heads", config.index_heads},
                       {"index_dim", config.index_dim},
                       {"slots", config.slots}});
  }
  const auto projection = [&](const char* name, int64_t in, int64_t out) {
    return register_module(name, std::make_shared<Projection>(in, out));
  };
  const auto norm = [&](const char* name, int64_t width) {
    return register_module(name, std::make_shared<Weight>(at::ones({width})));
  };
  const int64_t inner = config.heads * config.head_dim;
  const int64_t in_group = inner / config.out_groups;
  const int64_t outer = config.out_groups * config.out_rank;
  q_a_proj_ = projection("q_a_proj", config.hidden, config.q_rank);
  q_a_norm_ = norm("q_a_norm", config.q_rank);
  q_b_proj_ = projection("q_b_proj", config.q_rank, inner);
  kv_proj_ = projection("kv_proj", config.hidden, config.head_dim);
  kv_norm_ = norm("kv_norm", config.head_dim);
  o_a_proj_ = register_module("o_a_proj", std::make_shared<Weight>(drawn_weight(
                                              {outer, in_group}, in_group)));
  o_b_proj_ = projection("o_b_proj", outer, config.hidden);
  sinks_ = register_parameter("sinks", at::zeros({config.heads}));
  if (config.kind != Kind::window) {
    compressor_ = register_module(
        "compressor", std::make_shared<DeepseekV4Compressor>(config));
  }
}

at::Tensor DeepseekV4Attention::forward(const at::Tensor& hidden,
                                        const LayerShare& share) const {
  share.check_tokens("DeepseekV4Attention", "hidden", hidden, {config_.hidden});
  const int64_t tokens = hidden.size(0), groups = config_.out_groups;
  const at::Tensor residual =
      rms_normed(q_a_proj_->forward(hidden), q_a_norm_->weight, config_.eps);
  DeepseekV4Tensors tensors = {
      .q = rms_normed(by_heads(q_b_proj_->forward(residual), config_.heads), {},
                      config_.eps),
      .kv =
          rms_normed(kv_proj_->forward(hidden), kv_norm_->weight, config_.eps),
      .sinks = sinks_};
  if (compressor_ != nullptr) {
    tensors.pools = compressor_->compression(hidden);
    if (const auto& indexer = compressor_->indexer) {
      const at::NoGradGuard without_gradients;
      tensors.index_pools = indexer->compression(hidden);
      tensors.index_q =
          by_heads(indexer->q_b_proj->forward(residual), config_.index_heads);
      tensors.index_weights =
          indexer->scorer->weights_proj->forward(hidden).to(sum_type(hidden)) /
          std::sqrt(
              static_cast<double>(config_.index_heads * config_.index_dim));
    }
  }
  const at::Tensor out = deepseek_v4(tensors, share,
                                     {.window = config_.window,
                                      .ratio = config_.ratio,
                                      .slots = config_.slots,
                                      .rotary = config_.rotary,
                                      .eps = config_.eps});
  // Groups of heads by a matrix of each: [groups, tokens, in] x [.., in, rank].
  const at::Tensor matrices =
      o_a_proj_->weight.view({groups, config_.out_rank, -1}).transpose(1, 2);
  const at::Tensor mixed = out.reshape({tokens, groups, matrices.size(1)})
                               .transpose(0, 1)
                               .matmul(matrices)
                               .transpose(0, 1);
  return o_b_proj_->forward(mixed.flatten(1));
}

}  // namespace longspan
