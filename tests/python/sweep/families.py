"""Which models the sweep makes beyond the families of the package."""

from __future__ import annotations

import transformers

from longspan import _families
from longspan._families import Family, config_of, made

__all__ = ["SAMPLE", "Family", "config_of", "families", "made"]

transformers.logging.set_verbosity_error()

_BOTH = ["sliding_attention", "full_attention"]
_FULL = ["full_attention"] * 4
_ROPE = {"rope_theta": 1e4}

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
    return [*_families.families(), *_MORE]


#: Of every kind of answer some, in `make test`.
SAMPLE = (
    *("afmoe", "apertus", "bert", "camembert", "deepseek_v2", "ernie4_5_moe", "exaone4"),
    *("granitemoe_swa", "gpt_neox", "gptj", "helium", "jetmoe", "laguna", "llama, dynamic"),
    *("llama4_text, full layers", "mamba", "mllama", "modernbert-decoder", "moshi, window"),
    *("nemotron", "opt", "qwen3_next", "recurrent_gemma", "xlm-roberta", "youtu"),
)
