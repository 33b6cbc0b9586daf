"""Layers of C++ (`longspan/models/layers.h`) against those of transformers: weights of random
layers are saved under transformers' names, a program of C++ loads them by name and runs the layer
over thread ranks, and outputs and every gradient are those of each document alone."""

from __future__ import annotations

import functools
import os
import pathlib
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from oracle.all_double import AllDouble
from oracle.tiny_decoders import decoder
from safetensors import safe_open
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.slow  # layers of transformers, token by token

PROGRAM = pathlib.Path(os.environ.get("LONGSPAN_BUILD", "build/dev")) / "tests" / "model_layers"
needs_program = pytest.mark.skipif(not PROGRAM.is_file(), reason="built without models in C++")

TOKENS = 48
#: Lengths and slots; 16 pads at the end are all that the last of four ranks has.
DOCUMENTS = ((17, 20), (1, 2), (9, 10))
CUTS = ("1 contiguous", "2 head-tail", "3 uneven", "4 contiguous")

Numbers = dict[str, Any]
Alone = Callable[[Tensor], Tensor]  # [1, S, hidden] of one document


def causal(length: int, window: int | None = None) -> Tensor:
    """Additive, [1, 1, S, S]."""
    back = torch.arange(length).unsqueeze(1) - torch.arange(length)
    seen = (back >= 0) & (back < (window or length))
    mask = torch.zeros(length, length, dtype=torch.float64)
    return mask.masked_fill(~seen, -torch.inf)[None, None]


def mamba2(**options: Any) -> tuple[Any, Numbers, Alone]:
    model = decoder("mamba2", **options)
    layer = model.backbone.layers[0].mixer.eval()
    numbers = {
        "heads": layer.num_heads,
        "head_dim": layer.head_dim,
        "states": layer.ssm_state_size,
        "groups": layer.n_groups,
        "taps": layer.conv_kernel_size,
        "chunk": 7,
        "with_bias": int(layer.use_bias),
        "with_conv_bias": int(layer.use_conv_bias),
        "eps": layer.layer_norm_epsilon,
        "shortest_step": layer.time_step_limit[0],
        "longest_step": layer.time_step_limit[1],
    }
    return layer, numbers, layer


def delta() -> tuple[Any, Numbers, Alone]:
    layer = decoder("qwen3_next").model.layers[0].linear_attn.eval()
    numbers = {
        "key_heads": layer.num_k_heads,
        "value_heads": layer.num_v_heads,
        "key_dim": layer.head_k_dim,
        "value_dim": layer.head_v_dim,
        "taps": layer.conv_kernel_size,
        "chunk": 7,
        "eps": layer.layer_norm_epsilon,
    }
    return layer, numbers, layer


def glm_dsa(shared: bool = False, **options: Any) -> tuple[Any, Numbers, Alone]:
    model = decoder("glm_moe_dsa", attn_implementation="eager", **options).model.eval()
    full, rotary = model.layers[0].self_attn, model.rotary_emb
    layer = model.layers[1].self_attn if shared else full
    config = layer.config
    numbers = {
        "heads": layer.num_heads,
        "q_rank": layer.q_lora_rank,
        "kv_rank": layer.kv_lora_rank,
        "key_dim": layer.qk_nope_head_dim,
        "rotary_dim": layer.qk_rope_head_dim,
        "value_dim": layer.v_head_dim,
        "index_heads": config.index_n_heads,
        "index_dim": config.index_head_dim,
        "slots": config.index_topk,
        "with_bias": int(config.attention_bias),
        "shared": int(shared),
        "frequencies": rotary.inv_freq,
    }
    if shared:
        numbers |= {f"before.{name}": value for name, value in full.state_dict().items()}

    def alone(hidden: Tensor) -> Tensor:
        positions = torch.arange(hidden.shape[1])[None]
        angles = rotary(hidden, position_ids=positions)
        mask, given = causal(hidden.shape[1]), {}
        if shared:
            with torch.no_grad():
                given["prev_topk_indices"] = full(hidden, angles, mask)[2]
        out: Tensor = layer(hidden, angles, mask, **given)[0]
        return out

    return layer, numbers, alone


def deepseek_v4(kind: int) -> tuple[Any, Numbers, Alone]:
    model = decoder("deepseek_v4", attn_implementation="eager").model.eval()
    # A window alone, pools that are all seen, pools that an indexer selects.
    layer, rotary = model.layers[(0, 2, 1)[kind]].self_attn, model.rotary_emb
    config, turns = layer.config, layer.rope_layer_type
    numbers = {
        "kind": kind,
        "heads": layer.num_heads,
        "head_dim": layer.head_dim,
        "q_rank": config.q_lora_rank,
        "out_groups": config.o_groups,
        "out_rank": config.o_lora_rank,
        "window": layer.sliding_window,
        "ratio": layer.compressor.compress_rate if layer.compressor else 0,
        "index_heads": config.index_n_heads,
        "index_dim": config.index_head_dim,
        "slots": config.index_topk,
        "eps": config.rms_norm_eps,
        "frequencies": getattr(rotary, f"{turns}_inv_freq"),
        "scaling": getattr(rotary, f"{turns}_attention_scaling"),
    }

    def alone(hidden: Tensor) -> Tensor:
        length = hidden.shape[1]
        positions = torch.arange(length)[None]
        angles = {turns: rotary(hidden, position_ids=positions, layer_type=turns)}
        out: Tensor = layer(hidden, angles, positions, causal(length, layer.sliding_window))[0]
        return out

    return layer, numbers, alone


LAYERS: dict[str, Callable[[], tuple[Any, Numbers, Alone]]] = {
    "mamba2": mamba2,
    "mamba2 with other switches": functools.partial(
        mamba2, use_bias=True, use_conv_bias=False, time_step_limit=(0.3, 0.8)
    ),
    "delta": delta,
    "glm_dsa": glm_dsa,
    "glm_dsa with biases": functools.partial(glm_dsa, attention_bias=True),
    "glm_dsa, a selection taken over": functools.partial(glm_dsa, shared=True),
    "deepseek_v4, a window": functools.partial(deepseek_v4, 0),
    "deepseek_v4, all pools": functools.partial(deepseek_v4, 1),
    "deepseek_v4, selected pools": functools.partial(deepseek_v4, 2),
}


def places() -> list[slice]:
    begins = [sum(slot for _, slot in DOCUMENTS[:d]) for d in range(len(DOCUMENTS))]
    return [slice(b, b + length) for b, (length, _) in zip(begins, DOCUMENTS, strict=True)]


def write(folder: pathlib.Path, name: str) -> tuple[pathlib.Path, Any, Alone, Tensor, Tensor]:
    """The layer, its inputs, and what the program is told."""
    layer, numbers, alone = LAYERS[name]()
    width = next(p.shape[1] for p in layer.parameters() if p.dim() == 2)
    random = torch.Generator().manual_seed(5)
    hidden = torch.randn(TOKENS, width, generator=random, dtype=torch.float64)
    gradient = torch.zeros(TOKENS, width, dtype=torch.float64)
    for place in places():
        drawn = torch.randn(gradient[place].shape, generator=random, dtype=torch.float64)
        gradient[place] = drawn
    # What lies in pads is seen by nobody.
    hidden[[i for i in range(TOKENS) if not any(i in range(TOKENS)[p] for p in places())]] = 1e3
    tensors = {f"layer.{key}": value.detach() for key, value in layer.state_dict().items()}
    others = {key: value for key, value in numbers.items() if isinstance(value, Tensor)}
    numbers = {key: value for key, value in numbers.items() if key not in others}
    tensors |= {key: value.detach() for key, value in others.items()}
    words = {key: str(value) for key, value in numbers.items()} | {
        "family": name.split()[0].rstrip(","),
        "hidden": str(width),
        "tokens": str(TOKENS),
        "documents": ",".join(f"{length}/{slot}" for length, slot in DOCUMENTS),
        "cuts": ",".join(CUTS),
    }
    path = folder / "input.safetensors"
    save_file(tensors | {"hidden": hidden, "gradient": gradient}, path, metadata=words)
    return path, layer, alone, hidden, gradient


def run(path: pathlib.Path) -> subprocess.CompletedProcess[str]:
    command = [str(PROGRAM), str(path), str(path.with_name("output.safetensors"))]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def close(found: Tensor, expected: Tensor, what: str) -> None:
    scale = max(1.0, float(expected.abs().max()))
    worst = float((found - expected).abs().max())
    assert worst <= 1e-11 * scale, f"{what}: {worst} of {scale}"


@needs_program
@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_those_of_transformers(tmp_path: pathlib.Path, name: str) -> None:
    path, layer, alone, hidden, gradient = write(tmp_path, name)
    done = run(path)
    assert done.returncode == 0, done.stderr
    found = load_file(path.with_name("output.safetensors"))

    layer.zero_grad()
    own = hidden.clone().requires_grad_()
    outs = []
    with AllDouble():
        for place in places():
            out = alone(own[None, place])[0]
            (out * gradient[place]).sum().backward()  # type: ignore[no-untyped-call]
            outs.append(out.detach())
    assert own.grad is not None
    for i, cut in enumerate(CUTS):
        for place, out in zip(places(), outs, strict=True):
            close(found[f"{i}.out"][place], out, f"{cut}: out of {place}")
        close(found[f"{i}.hidden"], own.grad, f"{cut}: gradient of the input")
        for key, parameter in layer.named_parameters():
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            close(found[f"{i}.layer.{key}"], expected, f"{cut}: gradient of {key}")


def changed(folder: pathlib.Path, change: Callable[[dict[str, Tensor]], None]) -> pathlib.Path:
    path, *_ = write(folder, "delta")
    tensors = load_file(path)
    change(tensors)
    with safe_open(path, "pt") as file:
        words = file.metadata()
    save_file(tensors, path, metadata=words)
    return path


def refused(tmp_path: pathlib.Path, change: Callable[[dict[str, Tensor]], None]) -> str:
    """What the program says when a file of weights is changed."""
    path = changed(tmp_path, change)
    done = run(path)
    assert done.returncode == 1
    return done.stderr.replace(str(path), "FILE").strip()


@needs_program
def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: pathlib.Path) -> None:
    def renamed(tensors: dict[str, Tensor]) -> None:
        tensors["layer.norm.scale"] = tensors.pop("layer.norm.weight")

    def more(tensors: dict[str, Tensor]) -> None:
        tensors["layer.norm.bias"] = torch.zeros(3)

    def longer(tensors: dict[str, Tensor]) -> None:
        tensors["layer.A_log"] = torch.zeros(5, dtype=torch.float64)

    assert refused(tmp_path, renamed) == (
        "load_weights: 'FILE' under 'layer.' has no 'norm.weight'; it has 'norm.scale', which the "
        "module lacks"
    )
    assert refused(tmp_path, more) == (
        "load_weights: 'FILE' under 'layer.' has 'norm.bias', which the module lacks"
    )
    assert refused(tmp_path, longer) == (
        "load_weights: 'layer.A_log' is [5] in 'FILE' under 'layer.' but [4] in the module"
    )


@needs_program
def test_numbers_are_not_rounded_without_being_asked(tmp_path: pathlib.Path) -> None:
    """Wider parameters take narrow numbers as they are; the reverse is refused."""

    def narrow(tensors: dict[str, Tensor]) -> None:
        for name in ("hidden", "gradient"):
            tensors[name] = tensors[name].to(torch.float32)

    assert refused(tmp_path, narrow).startswith("load_weights: 'layer.dt_bias' is F64 in 'FILE'")

    def narrow_weights(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if name.startswith("layer."):
                tensors[name] = tensors[name].to(torch.bfloat16)

    assert run(changed(tmp_path, narrow_weights)).returncode == 0


@needs_program
def test_a_torn_file_is_refused(tmp_path: pathlib.Path) -> None:
    path, *_ = write(tmp_path, "delta")
    path.write_bytes(path.read_bytes()[:-1])
    done = run(path)
    assert done.returncode == 1
    assert "it was torn or something was added" in done.stderr
