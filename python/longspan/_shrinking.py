"""Configurations of transformers with everything large made small: widths, heads, experts,
vocabularies, windows, and the thresholds behind which a model does something else."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

#: Sliding layers of a twin see this many keys.
WINDOW = 5
#: Token ids of a twin are below this.
VOCABULARY = 101
_HEADS = 4
_HEAD_DIM = 16
_WIDTH = _HEADS * _HEAD_DIM

#: Words that have an id, and positions that have a row of their own.
_WORDS = r"\w*vocab_size\w*|\w+_vocab|n_words"
_POSITIONS = r"max_position_embeddings|n_positions|n_ctx|max_target_positions|max_seq_len\w*"
#: Embeddings of another width than the layers.
_EMBEDDINGS = r"word_embed_proj_dim|\w*embed(ding)?_(size|dim)"

#: What stands for which number of which name; the first that fits counts. Where a model
#: has less than that already, it keeps what it has.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"num_key_value_heads|num_kv_heads|n_head_kv|kv_n_heads|num_\w+_key_value_heads", 2),
    (r"linear_num_key_heads", 2),
    (r"\w*attention_heads\w*|num_heads|n_heads?|linear_num_(value_)?heads", _HEADS),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", 8),
    (r"n_groups|mamba_n_?groups", 2),
    (r"mamba_d_state|ssm_state_size|state_size", 12),
    (r"time_step_rank|mamba_dt_rank|adapter_rank", 4),
    (r"chunk_size|mamba_chunk_size", 16),
    (r"global_head_dim", 2 * _HEAD_DIM),
    (r"head_dim|qk_nope_head_dim|v_head_dim|\w+_head_dim|kv_channels|d_kv|attention_head_size", 16),
    (r"q_lora_rank|kv_lora_rank|o_lora_rank|laurel_rank|gated_norm_rank", 24),
    (r"rotary_dim", 8),
    (r"\w+_iters", 4),
    (r"index_n_heads", 16),
    (r"index_topk", 6),
    (r"hidden_size_per_layer_input", 8),
    (rf"hidden_size|d_model|n_embd|emb_dim|{_EMBEDDINGS}", _WIDTH),
    (r"\w*intermediate_size\w*|\w*ffn_dim|n_inner|\w*ffn_hidden_size|dff|d_ff", 48),
    (_WORDS, VOCABULARY),
    (r"num_experts|n_routed_experts|num_local_experts|moe_num_experts", 8),
    (r"zero_expert_num", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k", 2),
    (r"n_group|num_expert_group", 4),
    (r"topk_group", 2),
    (r"sliding_window|window_size|sliding_window_size|attention_window_size", WINDOW),
    (r"local_attention", 2 * WINDOW),
    (r"attention_chunk_size", 8),
    (r"floor_scale|original_max_position_embeddings", 16),
    (_POSITIONS, 256),
    (r"encoder_layers|num_encoder_layers|num_layers_per_stack", 2),
)
_LAYERS = r"num_hidden_layers|n_layers?|num_layers|decoder_layers|num_decoder_layers"
#: Kinds of layers change at these; the twin keeps the places of those it has.
_FIRST_LAYERS = r"first_k_dense_replace|num_dense_layers|moe_layer_start_index"
_TOKENS = re.compile(r"\w+_token_(id|index)s?|\w+_index")
_NOISE = re.compile(r"\w*(dropout|pdrop|layerdrop|jitter)\w*")


def shrunk(config: Any, layers: Sequence[int]) -> Any:
    """A copy with small sizes that has only these layers of the original."""
    made = copy.deepcopy(config)
    _shrink(made, depth(config), layers)
    return made


def widened(small: Any, config: Any, *, vocabulary: int = 0, positions: int = 0) -> None:
    """Gives a shrunk configuration so many words and positions, where it has fewer; no more
    positions than the original has."""
    entries, before = vars(small), vars(config)
    for key, value in entries.items():
        if type(value).__module__ != "builtins" and hasattr(value, "to_dict"):
            widened(value, before[key], vocabulary=vocabulary, positions=positions)
        elif not isinstance(value, int) or isinstance(value, bool):
            continue
        elif re.fullmatch(_WORDS, key):
            entries[key] = max(value, vocabulary)
        elif re.fullmatch(_POSITIONS, key):
            entries[key] = max(value, min(positions, before[key]))


def positions_of(config: Any) -> int | None:
    """How many positions a model has rows for, where it says so."""
    found = [
        value
        for key, value in vars(config).items()
        if isinstance(value, int) and re.fullmatch(_POSITIONS, key)
    ]
    return min(found, default=None)


def depth(config: Any) -> int:
    """How many layers it asks for; those of its text where it has several parts."""
    found = [
        value
        for key, value in vars(config).items()
        if isinstance(value, int) and re.fullmatch(_LAYERS, key)
    ]
    kinds = vars(config).get("layers_block_type")
    if not found and isinstance(kinds, list):
        return len(kinds)
    text = vars(config).get("text_config")
    return max(found, default=0) if found or text is None else depth(text)


def _shrink(config: Any, every: int, layers: Sequence[int]) -> None:
    entries = vars(config)
    before = dict(entries)
    for key, value in before.items():
        if key.startswith("_"):
            continue
        if type(value).__module__ != "builtins" and hasattr(value, "to_dict"):
            inner = depth(value) or every
            _shrink(value, inner, [i for i in layers if i < inner])
        elif isinstance(value, dict):
            entries[key] = _shrunk_mapping(value, 8 if key == "compress_rates" else None)
        else:
            entries[key] = _smaller(key, value, every, layers)
    _relate(entries, before)


def _smaller(key: str, value: Any, every: int, layers: Sequence[int]) -> Any:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)):
        return _smaller_list(key, value, every, layers)
    if _NOISE.fullmatch(key):
        return type(value)(0)
    if not isinstance(value, int):
        return value
    if re.fullmatch(_LAYERS, key):
        return len(layers)
    if re.fullmatch(_FIRST_LAYERS, key):
        return sum(layer < value for layer in layers)
    if key == "num_kv_shared_layers":  # counted from the end
        return sum(layer >= every - value for layer in layers)
    if _TOKENS.fullmatch(key):
        return min(value, VOCABULARY - 1)
    size = _size(key)
    return value if size is None else min(value, size)


def _smaller_list(key: str, value: Any, every: int, layers: Sequence[int]) -> Any:
    made: list[Any]
    if len(value) == every > 0:
        made = [_smaller(key, value[layer], every, layers) for layer in layers]
    elif re.search(r"layers$|layer_ids$|_idxs$|layer_indices$", key) and all(
        isinstance(v, int) for v in value
    ):
        made = [place for place, layer in enumerate(layers) if layer in value]
    elif _TOKENS.fullmatch(key):
        made = [min(v, VOCABULARY - 1) if isinstance(v, int) else v for v in value]
    else:
        return value
    return type(value)(made)


def _shrunk_mapping(value: dict[Any, Any], most: int | None = None) -> dict[Any, Any]:
    """Rotary parameters, one set or several by kind of layer; or how many tokens layers
    of a kind compress to one."""
    made: dict[Any, Any] = {}
    for key, one in value.items():
        if isinstance(one, dict):
            made[key] = _shrunk_mapping(one)
        elif key == "original_max_position_embeddings":
            made[key] = min(one, 16)
        elif key == "max_position_embeddings":
            made[key] = min(one, 256)
        else:
            made[key] = one if most is None else min(one, most)
    return made


def _size(key: str) -> int | None:
    return next((size for pattern, size in _SIZES if re.fullmatch(pattern, key)), None)


def _relate(entries: dict[str, Any], before: dict[str, Any]) -> None:
    """Sizes that are one another's share or sum stay so, and those that differ do."""
    for key, value in before.items():
        if re.fullmatch(_EMBEDDINGS, key) and value and value != before.get("hidden_size", value):
            entries[key] = _WIDTH // 2
    for name, heads in (
        ("num_key_value_heads", "num_attention_heads"),
        ("num_kv_heads", "num_attention_heads"),
        ("swa_num_key_value_heads", "swa_num_attention_heads"),
        ("num_global_key_value_heads", "num_attention_heads"),
    ):
        if isinstance(entries.get(name), int):
            of = entries.get(heads, _HEADS)
            entries[name] = _share(before[name], before.get(heads, before[name]), of)
    if isinstance(entries.get("qk_rope_head_dim"), int):
        entries["qk_rope_head_dim"] = 8
        if before.get("head_dim") == before["qk_rope_head_dim"]:
            entries["head_dim"] = 8
        if "qk_head_dim" in entries and "qk_nope_head_dim" in entries:
            entries["qk_head_dim"] = entries["qk_nope_head_dim"] + 8
    _relate_states(entries, before)
    experts = [value for key, value in entries.items() if _size(key) == 8 and "expert" in key]
    if entries.get("n_group") and experts and isinstance(experts[0], int):
        entries["n_group"] = min(entries["n_group"], max(experts[0] // 2, 1))


def _relate_states(entries: dict[str, Any], before: dict[str, Any]) -> None:
    """Heads of layers with states fill what their inputs are expanded to."""
    if before.get("attention_hidden_size") == 2 * before.get("hidden_size", 0):
        entries["attention_hidden_size"] = 2 * entries["hidden_size"]
        entries["attention_head_dim"] = 2 * entries["hidden_size"] // _HEADS
    wide = entries.get("expand", entries.get("mamba_expand"))
    if not isinstance(wide, (int, float)):
        return
    inside = int(wide * entries["hidden_size"])
    if entries.get("mamba_d_ssm"):
        entries["mamba_d_ssm"] = inside
    for heads, size in (
        ("mamba_n_heads", "mamba_d_head"),
        ("n_mamba_heads", "mamba_headdim"),
        ("mamba_num_heads", "mamba_head_dim"),
    ):
        if isinstance(entries.get(size), int) and entries.get(heads):
            entries[size] = inside // entries[heads]
    if "state_size" in entries and "num_heads" in entries:
        entries["num_heads"] = inside // entries["head_dim"]


def _share(key_heads: int, heads: int, of: int) -> int:
    """Key heads for `of` heads: as many, one, or between."""
    if not isinstance(of, int) or not isinstance(heads, int) or key_heads >= heads:
        return of if isinstance(of, int) else key_heads
    return 1 if key_heads == 1 else max(of // 2, 1)
