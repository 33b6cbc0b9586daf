"""Families of transformers in small: the configuration of each with its sizes shrunk, and
models with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from longspan._shrinking import depth, shrunk, widened

_all: Any = transformers
_NAMES: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
_BOTH = ["sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Family:
    """A class of transformers, and what its configuration says beyond its defaults."""

    name: str
    kind: str  #: model_type
    options: Mapping[str, Any] = field(default_factory=dict)
    layers: int = 0  #: at least; as many as show every kind of layer where 0

    @property
    def model(self) -> str:
        made = _NAMES[self.kind]
        return str(made if isinstance(made, str) else made[0])


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
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},  # else it has no convolution
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "reformer": {"axial_pos_embds": False, "is_decoder": True},
}

#: Families whose layers want another of their kind.
_LAYERS = {"zamba": 4}


def families() -> list[Family]:
    """Every causal family, by its defaults as far as they make a model."""
    return [
        Family(kind, kind, {"is_decoder": True} | _NEEDED.get(kind, {}), _LAYERS.get(kind, 2))
        for kind in _NAMES
    ]


def config_of(family: Family, *, vocabulary: int = 0, positions: int = 0) -> Any:
    """Small, in float64 where a choice is left; see `small_config`."""
    model = getattr(_all, family.model)
    kind: Any = _all.CONFIG_MAPPING[family.kind]
    options = dict(family.options)
    if "is_decoder" not in vars(kind()):
        options.pop("is_decoder", None)
    config = kind(**options)
    if not isinstance(config, model.config_class):
        parts = [v for v in vars(config).values() if isinstance(v, model.config_class)]
        config = parts[0] if parts else config
    return small_config(config, family.layers, vocabulary=vocabulary, positions=positions)


def small_config(config: Any, layers: int = 0, *, vocabulary: int = 0, positions: int = 0) -> Any:
    """A configuration with small sizes and as few layers as show every kind, at least so many;
    with so many words and positions, where that is more than the fewest."""
    small = shrunk(config, range(_enough(config, layers)))
    widened(small, config, vocabulary=vocabulary, positions=positions)
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


def made(family: Family, *, vocabulary: int = 0, positions: int = 0) -> Any:
    """The model, with random weights everywhere, in float64."""
    config = config_of(family, vocabulary=vocabulary, positions=positions)
    return with_random_weights(getattr(_all, family.model), config)


def built(family: Family, config: Any) -> Any:
    """The model with the weights that the family begins with, from one seed."""
    torch.manual_seed(0)
    return getattr(_all, family.model)(config)


def with_random_weights(kind: Any, config: Any) -> Any:
    """A model of this class, its weights drawn from one seed, also those that start constant; in
    float64."""
    torch.manual_seed(0)
    model = kind(config).double().eval()
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
            parameter.copy_(0.15 * values + (parameter if parameter.dim() < 2 else 0))
    return model
