"""Which models the sweep makes, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from longspan._shrinking import depth, shrunk

transformers.logging.set_verbosity_error()

_BOTH = ["sliding_attention", "full_attention"]
_FULL = ["full_attention"] * 4
_ROPE = {"rope_theta": 1e4}


@dataclass(frozen=True)
class Family:
    """A class of transformers, and what its configuration says beyond its defaults."""

    name: str
    kind: str  #: model_type
    options: Mapping[str, Any] = field(default_factory=dict)
    layers: int = 0  #: at least; as many as show every kind of layer where 0

    @property
    def model(self) -> str:
        made = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self.kind]
        return made if isinstance(made, str) else made[0]


#: What defaults leave out, so that a model can be built at all.
_NEEDED: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in _BOTH}
    },
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 8, "clip_qkv": 8.0}},
    "dots1": {
        **{"moe_intermediate_size": 32, "n_routed_experts": 8, "n_group": 1, "topk_group": 1},
        **{"n_shared_experts": 1, "num_experts_per_tok": 2},
    },
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "xmod": {"default_language": "en_XX"},
    "deepseek_v2": {"topk_group": 1, "n_group": 1, "num_experts_per_tok": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "reformer": {"axial_pos_embds": False, "is_decoder": True},
}

#: Families whose layers want another of their kind.
_LAYERS = {"zamba": 4}

_MORE: tuple[Family, ...] = (
    Family(
        "lfm2, convolutions",
        "lfm2",
        {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    ),
    Family(
        "llama, yarn", "llama", {"rope_parameters": {**_ROPE, "rope_type": "yarn", "factor": 4.0}}
    ),
    Family(
        "llama, linear",
        "llama",
        {"rope_parameters": {**_ROPE, "rope_type": "linear", "factor": 4.0}},
    ),
    Family(
        "llama, dynamic",
        "llama",
        {"rope_parameters": {**_ROPE, "rope_type": "dynamic", "factor": 4.0}},
    ),
    Family(
        "llama, longrope",
        "llama",
        {
            "rope_parameters": {
                **_ROPE,
                "rope_type": "longrope",
                "factor": 4.0,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    Family(
        "llama, biases and ties",
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    Family("mistral, no window", "mistral", {"sliding_window": None}),
    Family("mixtral, window", "mixtral", {"sliding_window": 64}),
    Family("mixtral, router loss", "mixtral", {"output_router_logits": True}),
    Family(
        "qwen2, window",
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 64,
            "max_window_layers": 1,
            "num_hidden_layers": 2,
        },
    ),
    Family(
        "qwen3, window",
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 64,
            "max_window_layers": 1,
            "num_hidden_layers": 2,
        },
    ),
    Family(
        "qwen2_moe, window",
        "qwen2_moe",
        {
            "use_sliding_window": True,
            "sliding_window": 64,
            "num_hidden_layers": 2,
            "layer_types": _BOTH,
        },
    ),
    Family("qwen3_moe, window", "qwen3_moe", {"use_sliding_window": True, "sliding_window": 64}),
    Family("phi3, window", "phi3", {"sliding_window": 64}),
    Family("phimoe, window", "phimoe", {"sliding_window": 64}),
    Family("starcoder2, window", "starcoder2", {"sliding_window": 64}),
    Family("moshi, window", "moshi", {"sliding_window": 8}),
    Family(
        "gemma2, no softcap",
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    Family(
        "gemma3_text, window only",
        "gemma3_text",
        {"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2},
    ),
    Family(
        "gemma4_text, shared keys",
        "gemma4_text",
        {"num_hidden_layers": 4, "layer_types": _BOTH * 2, "num_kv_shared_layers": 2},
    ),
    Family(
        "gemma4_text, experts",
        "gemma4_text",
        {
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    Family("cohere2, full", "cohere2", {"num_hidden_layers": 4, "layer_types": _FULL}),
    Family("olmo3, full", "olmo3", {"num_hidden_layers": 4, "layer_types": _FULL}),
    Family(
        "llama4_text, full layers", "llama4_text", {"num_hidden_layers": 4, "layer_types": _FULL}
    ),
    Family(
        "llama4_text, full and rotated",
        "llama4_text",
        {"num_hidden_layers": 4, "layer_types": _FULL, "no_rope_layers": [1] * 4},
    ),
    Family("gpt_oss, full", "gpt_oss", {"num_hidden_layers": 4, "layer_types": _FULL}),
    Family("gpt2, scaled by layer", "gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    Family("gpt2, reordered", "gpt2", {"reorder_and_upcast_attn": True}),
    Family("gpt2, cross attention", "gpt2", {"add_cross_attention": True}),
    Family("opt, norm after", "opt", {"do_layer_norm_before": False}),
    Family("deepseek_v3, no query rank", "deepseek_v3", {"q_lora_rank": None}),
    Family(
        "deepseek_v32, full layers", "deepseek_v32", {"num_hidden_layers": 4, "layer_types": _FULL}
    ),
    Family(
        "glm_moe_dsa, full layers", "glm_moe_dsa", {"num_hidden_layers": 4, "layer_types": _FULL}
    ),
    Family(
        "granitemoehybrid, attention only",
        "granitemoehybrid",
        {"num_hidden_layers": 4, "layer_types": _FULL},
    ),
    Family("bert, both sides", "bert", {"is_decoder": False}),
)


def families() -> list[Family]:
    """Every causal family, then more configurations of some."""
    named = [
        Family(kind, kind, {"is_decoder": True} | _NEEDED.get(kind, {}), _LAYERS.get(kind, 2))
        for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    ]
    return [*named, *_MORE]


#: Of every kind of answer some, in `make test`.
SAMPLE = (
    *("afmoe", "apertus", "bert", "camembert", "deepseek_v2", "ernie4_5_moe", "exaone4"),
    *("granitemoe_swa", "gpt_neox", "gptj", "helium", "jetmoe", "laguna", "llama, dynamic"),
    *("llama4_text, full layers", "mamba", "mllama", "modernbert-decoder", "moshi, window"),
    *("nemotron", "opt", "qwen3_next", "recurrent_gemma", "xlm-roberta", "youtu"),
)


def config_of(family: Family) -> Any:
    """Small, in float64 where a choice is left."""
    model = getattr(transformers, family.model)
    kind: Any = transformers.CONFIG_MAPPING[family.kind]
    options = dict(family.options)
    if "is_decoder" not in vars(kind()):
        options.pop("is_decoder", None)
    config = kind(**options)
    if not isinstance(config, model.config_class):
        parts = [v for v in vars(config).values() if isinstance(v, model.config_class)]
        config = parts[0] if parts else config
    small = shrunk(config, range(_enough(config, family.layers)))
    small._experts_implementation = "eager"  # the other ones take no float64
    return small


def _enough(config: Any, least: int) -> int:
    """Layers until every kind was there."""
    every = depth(config)
    text = getattr(config, "text_config", config)
    lists = [
        value
        for value in vars(text).values()
        if isinstance(value, (list, tuple)) and len(value) == every > 0
    ]
    kinds = list(zip(*lists, strict=True)) if lists else []
    covered = next((n for n in range(1, len(kinds)) if set(kinds[:n]) == set(kinds)), len(kinds))
    threshold = getattr(text, "first_k_dense_replace", None)
    covered = max(covered, threshold + 1 if isinstance(threshold, int) else 0)
    return min(every, max(covered, least, 2))


def made(family: Family) -> Any:
    """The model, with random weights everywhere, in float64."""
    torch.manual_seed(0)
    model = getattr(transformers, family.model)(config_of(family)).double().eval()
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
            parameter.copy_(0.15 * values + (parameter if parameter.dim() < 2 else 0))
    return model
