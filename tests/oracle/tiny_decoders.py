"""Tiny random decoders of Hugging Face transformers, batches for them, and what is
right: the same model on each document alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from longspan._rulers import IGNORED, Case, Document, gradients_of, packed_rows

transformers.logging.set_verbosity_error()

VOCABULARY = 61
#: Sliding layers see this many keys, fewer than most documents have.
WINDOW = 5

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BOTH_KINDS = ["sliding_attention", "full_attention"]


def _decoder(model: str, config: str, **options: Any) -> Callable[..., Any]:
    def make(**others: Any) -> Any:
        made = getattr(transformers, config)(**(_COMMON | options | others))
        return getattr(transformers, model)(made)

    return make


#: The families that the package promises.
FAMILIES: dict[str, Callable[..., Any]] = {
    "llama": _decoder("LlamaForCausalLM", "LlamaConfig"),
    "qwen3": _decoder("Qwen3ForCausalLM", "Qwen3Config"),
    "mistral": _decoder("MistralForCausalLM", "MistralConfig", sliding_window=WINDOW),
    "gemma2": _decoder(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        sliding_window=WINDOW,
        attn_logit_softcapping=3.0,
        query_pre_attn_scalar=8,
        attn_implementation="eager",  # some versions of the other one leave the softcap out
    ),
    "gemma3": _decoder(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        sliding_window=WINDOW,
        query_pre_attn_scalar=8,
        layer_types=_BOTH_KINDS,
    ),
    "gemma4": _decoder(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        sliding_window=WINDOW,
        num_hidden_layers=4,
        layer_types=_BOTH_KINDS * 2,
        num_kv_shared_layers=2,
        global_head_dim=16,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
    ),
    "gpt_oss": _decoder(
        "GptOssForCausalLM",
        "GptOssConfig",
        sliding_window=WINDOW,
        layer_types=_BOTH_KINDS,
        num_local_experts=4,
        num_experts_per_tok=2,
        experts_implementation="eager",
    ),
}

#: Others that need nothing of their own.
OTHERS: dict[str, Callable[..., Any]] = {
    "qwen2": _decoder("Qwen2ForCausalLM", "Qwen2Config"),
    "olmo2": _decoder("Olmo2ForCausalLM", "Olmo2Config"),
    "phi3": _decoder("Phi3ForCausalLM", "Phi3Config", sliding_window=WINDOW),
    "granite": _decoder("GraniteForCausalLM", "GraniteConfig"),
    "mixtral": _decoder(
        "MixtralForCausalLM",
        "MixtralConfig",
        num_local_experts=4,
        experts_implementation="eager",
    ),
    # These build their masks by a window that their attention is not told.
    "qwen2_moe": _decoder(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=_BOTH_KINDS,
        num_experts=4,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        experts_implementation="eager",
    ),
    "phimoe": lambda **_: (  # in training it draws its experts
        _decoder(
            "PhimoeForCausalLM",
            "PhimoeConfig",
            sliding_window=WINDOW,
            num_local_experts=4,
            experts_implementation="eager",
        )().eval()
    ),
    "gpt2": lambda **_: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=256,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    ),
    "deepseek_v3": _decoder(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        num_key_value_heads=4,
        q_lora_rank=12,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        head_dim=4,
        v_head_dim=10,
        first_k_dense_replace=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
        experts_implementation="eager",
    ),
}

#: Keys that an indexer selects, fewer than most documents have.
SLOTS = 6

_DSA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "head_dim": 4,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "index_topk": SLOTS,
    "index_n_heads": 32,  # enough that no two scores are equal
    "index_head_dim": 8,
    "experts_implementation": "eager",
}

#: Attention to the keys that an indexer selects.
SELECTING: dict[str, Callable[..., Any]] = {
    "glm_moe_dsa": _decoder(
        "GlmMoeDsaForCausalLM",
        "GlmMoeDsaConfig",
        first_k_dense_replace=1,
        indexer_types=["full", "shared", "full"],
        **_DSA,
    ),
    "deepseek_v32": _decoder(
        "DeepseekV32ForCausalLM", "DeepseekV32Config", first_k_dense_replace=1, **_DSA
    ),
    "axk2": _decoder("AXK2ForCausalLM", "AXK2Config", first_k_dense_replace=1, **_DSA),
    "hy_v4": _decoder(
        "HYV4ForCausalLM", "HYV4Config", indexer_types=["full", "shared", "full"], **_DSA
    ),
}


#: Tokens of a pool of DeepSeek-V4: where an indexer selects, and where all are seen.
POOLS = (4, 6)


def _pooling(**others: Any) -> Any:
    """DeepSeek-V4 with a layer of each kind, whose first experts are chosen by token id."""
    model = _decoder(
        "DeepseekV4ForCausalLM",
        "DeepseekV4Config",
        num_hidden_layers=4,
        num_key_value_heads=1,
        layer_types=[
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        mlp_layer_types=["hash_moe", "moe", "moe", "hash_moe"],
        compress_rates={
            "compressed_sparse_attention": POOLS[0],
            "heavily_compressed_attention": POOLS[1],
        },
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        partial_rotary_factor=0.5,
        sliding_window=WINDOW,
        q_lora_rank=12,
        o_groups=2,
        o_lora_rank=4,
        index_n_heads=32,  # so that no ties decide
        index_head_dim=8,
        index_topk=2,
        hc_mult=2,
        hc_sinkhorn_iters=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        experts_implementation="eager",
    )(**others)
    random = torch.Generator().manual_seed(3)
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            buffer.copy_(torch.rand(VOCABULARY, 4, generator=random).argsort(-1)[:, :2])
    return model


#: Windows, and pools of the tokens before them.
POOLING: dict[str, Callable[..., Any]] = {"deepseek_v4": _pooling}


_DELTA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "num_experts": 0,
    "experts_implementation": "eager",
}
_KIMI: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "dense"],
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "linear_head_dim": 6,
    "linear_num_heads": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "experts_implementation": "eager",
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
    "mamba_d_head": 16,
    "mamba_chunk_size": 16,
    "num_local_experts": 0,
}

#: Recurrent and convolutional layers.
STATEFUL: dict[str, Callable[..., Any]] = {
    "lfm2": _decoder("Lfm2ForCausalLM", "Lfm2Config", layer_types=["conv", "full_attention"]),
    "lfm2_moe": _decoder(
        "Lfm2MoeForCausalLM",
        "Lfm2MoeConfig",
        layer_types=["conv", "full_attention"],
        num_dense_layers=1,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        experts_implementation="eager",
    ),
    "qwen3_next": _decoder("Qwen3NextForCausalLM", "Qwen3NextConfig", **_DELTA),
    "qwen3_5": _decoder("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", **_DELTA),
    "qwen3_5_moe": _decoder(
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeTextConfig",
        **_DELTA | {"num_experts": 4, "num_experts_per_tok": 2},
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    "olmo_hybrid": _decoder(
        "OlmoHybridForCausalLM", "OlmoHybridConfig", **_DELTA | {"linear_num_key_heads": 4}
    ),
    "kimi_linear": _decoder(
        "KimiLinearForCausalLM", "KimiLinearConfig", num_local_experts=4, **_KIMI
    ),
    "bailing_hybrid": _decoder(
        "BailingHybridForCausalLM", "BailingHybridConfig", num_local_experts=4, **_KIMI
    ),
    "mamba2": _decoder(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        num_heads=4,
        head_dim=16,
        state_size=6,
        n_groups=2,
        chunk_size=16,
    ),
    "bamba": _decoder("BambaForCausalLM", "BambaConfig", attn_layer_indices=[1], **_MAMBA),
    "falcon_h1": _decoder("FalconH1ForCausalLM", "FalconH1Config", mamba_d_ssm=64, **_MAMBA),
    "granitemoehybrid": _decoder(
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        layer_types=["linear_attention", "full_attention"],
        shared_intermediate_size=16,
        **_MAMBA,
    ),
    "nemotron_h": _decoder(
        "NemotronHForCausalLM",
        "NemotronHConfig",
        layers_block_type=["linear_attention", "full_attention", "mlp", "linear_attention"],
        ssm_state_size=6,
        mamba_num_heads=4,
        mamba_head_dim=16,
        n_groups=2,
        chunk_size=16,
    ),
    "zamba2": _decoder(
        "Zamba2ForCausalLM",
        "Zamba2Config",
        num_hidden_layers=4,
        num_key_value_heads=4,
        layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"],
        n_mamba_heads=4,
        mamba_ngroups=2,
        mamba_d_state=6,
        chunk_size=16,
        adapter_rank=4,
    ),
    "mamba": _decoder("MambaForCausalLM", "MambaConfig", state_size=6),
    "falcon_mamba": _decoder("FalconMambaForCausalLM", "FalconMambaConfig", state_size=6),
    "jamba": _decoder(
        "JambaForCausalLM",
        "JambaConfig",
        num_hidden_layers=3,
        attn_layer_period=3,
        attn_layer_offset=1,
        num_experts=4,
        mamba_d_state=6,
        experts_implementation="eager",
    ),
    "zamba": _decoder(
        "ZambaForCausalLM",
        "ZambaConfig",
        num_hidden_layers=4,
        num_key_value_heads=4,
        layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"],
        n_mamba_heads=2,
        mamba_d_state=6,
    ),
}


#: Sizes for 256 channels, where activations count.
WIDER_MAMBA: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 64,
    "state_size": 16,
    "chunk_size": 64,
}
WIDER_GLM: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 8,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "head_dim": 16,
    "v_head_dim": 32,
    "index_topk": 128,
    "index_head_dim": 32,
    "moe_intermediate_size": 256,
    "experts_implementation": "grouped_mm",
}
WIDER_V4: dict[str, Any] = {
    "num_key_value_heads": 1,
    "head_dim": 64,
    "q_lora_rank": 64,
    "o_lora_rank": 32,
    "index_head_dim": 32,
    "index_topk": 32,
    "moe_intermediate_size": 128,
    "sliding_window": 32,
    "max_position_embeddings": 4096,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 32},
    "experts_implementation": "grouped_mm",
}


def decoder(family: str, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """A model with random weights, the same in every process and type. Options are of its
    configuration."""
    if family in SELECTING and not _has_seams():
        pytest.skip("this transformers has other layers with selected keys, which are refused")
    torch.manual_seed(0)
    made = (FAMILIES | OTHERS | SELECTING | POOLING | STATEFUL)[family](**options)
    return with_random_weights(made, dtype)


@functools.cache
def _has_seams() -> bool:
    """Whether layers that select keys have the methods that recipes replace."""
    from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa

    return hasattr(modeling_glm_moe_dsa.GlmMoeDsaAttention, "expand_kv")


def with_random_weights(model: Any, dtype: torch.dtype) -> Any:
    """The model, its weights drawn anew, also those that start constant."""
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
            parameter.copy_(0.2 * values)
    return model.to(dtype)


def _ids(rows: int, length: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(rows * 1000 + length)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=random)
    labels = ids.clone()
    labels[torch.rand(rows, length, generator=random) < 0.15] = IGNORED
    return ids, labels


def packed(*rows: list[int]) -> Case:
    """Rows of documents one after the other, told apart by their positions."""
    length = sum(rows[0])
    ids, labels = _ids(len(rows), length)
    return packed_rows(ids, labels, rows)


def padded(lengths: list[int], length: int, side: str) -> Case:
    """One document a row, with pads on one side; labels of pads are ids like any."""
    ids, labels = _ids(len(lengths), length)
    mask, documents = torch.zeros_like(ids), []
    for row, size in enumerate(lengths):
        begin = 0 if side == "right" else length - size
        mask[row, begin : begin + size] = 1
        documents.append(Document(row, begin, begin + size))
    return Case({"input_ids": ids, "labels": labels, "attention_mask": mask}, tuple(documents))


def with_lengths(case: Case) -> Case:
    """The same documents as `seq_lens`."""
    rows = case.ids.shape[0]
    lengths = [[d.end - d.begin for d in case.documents if d.row == row] for row in range(rows)]
    width = max(map(len, lengths))
    table = torch.tensor([row + [-1000] * (width - len(row)) for row in lengths])
    batch = {key: value for key, value in case.batch.items() if key != "position_ids"}
    return Case(batch | {"seq_lens": table}, case.documents)


def with_slots(case: Case) -> Case:
    """Two documents with pads behind each, as `seq_lens` and `seq_lens_padded`."""
    lengths, slots = [7, 9], [10, 13]
    documents = (Document(0, 0, 7), Document(0, 10, 19))
    batch = {key: value for key, value in case.batch.items() if key != "position_ids"}
    tables = {"seq_lens": torch.tensor([lengths]), "seq_lens_padded": torch.tensor([slots])}
    return Case(batch | tables, documents)


CASES: dict[str, Callable[[], Case]] = {
    "one": lambda: packed([19]),
    "packed": lambda: packed([4, 9, 1, 11]),
    "rows": lambda: packed([6, 8, 9], [21, 2]),
    "lengths": lambda: with_lengths(packed([6, 8, 9], [21, 2])),
    "slots": lambda: with_slots(packed([23])),
    "right": lambda: padded([13, 5, 17], 17, "right"),
    "left": lambda: padded([13, 5, 17], 17, "left"),
}


@dataclass(frozen=True)
class Answer:
    """Of the whole batch on one rank."""

    loss: float
    gradients: dict[str, Tensor]
    #: One for each document.
    logits: tuple[Tensor, ...]


def embedded(model: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with embeddings in place of ids, and what else some models need."""
    rest = {key: value for key, value in batch.items() if key != "input_ids"}
    with torch.no_grad():
        rest["inputs_embeds"] = model.get_input_embeddings()(batch["input_ids"])
        if getattr(model.config, "hidden_size_per_layer_input", None):
            rest["per_layer_inputs"] = model.model.get_per_layer_inputs(batch["input_ids"], None)
    return rest


@functools.cache
def answer(
    family: str, case: str, dtype: torch.dtype = torch.float64, embeds: bool = False
) -> Answer:
    """Every document alone, with its slice of the targets and the count of all."""
    return answer_of(decoder(family, dtype), CASES[case](), embeds)


def answer_of(model: Any, case: Case, embeds: bool = False) -> Answer:
    targets = case.targets()
    count = targets.ne(IGNORED).sum()
    loss, logits = 0.0, []
    for d in case.documents:
        inputs = {"input_ids": case.ids[d.row : d.row + 1, d.begin : d.end]}
        out = model(
            **(embedded(model, inputs) if embeds else inputs),
            labels=inputs["input_ids"],
            shift_labels=targets[d.row : d.row + 1, d.begin : d.end],
            num_items_in_batch=count,
            use_cache=False,
        )
        out.loss.backward()
        loss += out.loss.item()
        logits.append(out.logits[0].detach())
    return Answer(loss, gradients_of(model), tuple(logits))
