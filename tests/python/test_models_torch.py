"""Parallelized decoders beside what people use with them: torch.compile, gradient
checkpointing, autocast, adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import longspan
from longspan import Group, run_ranks

pytest.importorskip("transformers")

from oracle.tiny_decoders import (
    FAMILIES,
    POOLING,
    SELECTING,
    answer_of,
    decoder,
    gradients_of,
    packed,
)
from oracle.whole_models import check_as_exact, check_restored

pytestmark = pytest.mark.slow  # graphs are compiled

#: Batches of other lengths and other numbers of documents.
LENGTHS = ([4, 9, 1, 11], [40], [3] * 9)


def step(model: Any, local: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    out = model(**local)
    out.loss.backward()
    return out.loss.detach(), gradients_of(model)


def check_same(
    ours: tuple[Tensor, dict[str, Tensor]],
    theirs: tuple[Tensor, dict[str, Tensor]],
    tolerance: float,
) -> None:
    torch.testing.assert_close(ours[0], theirs[0], rtol=tolerance, atol=0)
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in theirs[1].items():
        error = (ours[1][name] - gradient).abs().max()
        assert error <= tolerance * gradient.abs().max() + 1e-12, name


class Graphs:
    """A backend that counts graphs and looks for attention in them."""

    def __init__(self, backend: str) -> None:
        self.attention: list[int] = []
        self._backend: Callable[..., Any] = torch._dynamo.lookup_backend(backend)

    def __call__(self, graph: Any, inputs: Any) -> Any:
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        self.attention.append(sum("longspan.attend" in name for name in names))
        return self._backend(graph, inputs)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


#: One of each kind that makes another graph of ours: plain, with a window and a cap, with
#: keys that later layers share, with selections that are handed from layer to layer, or are
#: each layer's own. Others are made of the same; with experts transformers itself breaks graphs.
COMPILED: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {},
    "gemma4": {
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
        "num_kv_shared_layers": 1,
    },
    "glm_moe_dsa": {"mlp_layer_types": ["dense"] * 3},
    "deepseek_v32": {"num_hidden_layers": 1},  # the first is dense
    "axk2": {"num_hidden_layers": 1},
    "hy_v4": {"num_hidden_layers": 1, "indexer_types": ["full"], "mlp_layer_types": ["dense"]},
}


@pytest.mark.parametrize(
    "family",
    # 7 s of graphs each; the last two have layers like those before.
    [
        pytest.param(family, marks=[pytest.mark.deep] * (family in ("axk2", "hy_v4")))
        for family in COMPILED
    ],
)
def test_one_graph_for_changing_lengths(family: str) -> None:
    model = longspan.parallelize(decoder(family, torch.float32, **COMPILED[family]))
    graphs = Graphs("aot_eager")
    compiled = torch.compile(model, backend=graphs, dynamic=True, fullgraph=True)
    for lengths in LENGTHS:
        local = longspan.shard(packed(lengths).batch, model=model)
        check_same(step(compiled, local), step_named(compiled, model, local), 1e-6)
        if lengths is LENGTHS[0]:
            first = len(graphs.attention)
    assert len(graphs.attention) == first, "a new length made a new graph"
    # The compiler may look at a frame twice before it keeps the graph.
    layers = model.config.num_hidden_layers
    assert set(graphs.attention) == {layers} and first <= 2


def step_named(compiled: Any, model: Any, local: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The plain model's step, under the names of the compiled one."""
    loss, _ = step(model, local)
    return loss, gradients_of(compiled)


@pytest.mark.deep
def test_inductor_over_two_ranks() -> None:
    case, small = packed([4, 9, 1, 11]), {"num_hidden_layers": 1}
    true = answer_of(decoder("llama", **small), case)

    def body(group: Group) -> tuple[Tensor, dict[str, Tensor]]:
        model = longspan.parallelize(decoder("llama", torch.float32, **small), group)
        local = longspan.shard(case.batch, group, model=model)
        compiled = torch.compile(model, backend="inductor", fullgraph=True)
        loss, _ = step(compiled, local)
        return loss, gradients_of(model)

    losses, gradients = zip(*run_ranks(2, body, timeout=240), strict=True)
    assert sum(losses).item() == pytest.approx(true.loss, rel=1e-5)
    for name, gradient in true.gradients.items():
        error = (sum(g[name] for g in gradients).double() - gradient).abs().max()
        assert error <= 1e-4 * gradient.abs().max(), name


@pytest.mark.parametrize(
    ("family", "reentrant"),
    [(family, False) for family in (*FAMILIES, *SELECTING, *POOLING)]
    # Keys that Gemma 4's layers share lose their gradient there, with any attention.
    + [(family, True) for family in (*FAMILIES, *SELECTING, *POOLING) if family != "gemma4"],
)
def test_gradient_checkpointing(family: str, reentrant: bool) -> None:
    def body(group: Group) -> None:
        model = longspan.parallelize(decoder(family), group).train()
        local = longspan.shard(packed([4, 9, 1, 11]).batch, group, model=model)
        plain = step(model, local)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        check_same(step(model, local), plain, 0.0)

    run_ranks(2, body)


@pytest.mark.parametrize("family", [*FAMILIES, *SELECTING, *POOLING])
def test_autocast(family: str) -> None:
    """As far from float64 as one rank is under autocast, with each document alone."""
    case = packed([4, 9, 1, 11])
    true = answer_of(decoder(family), case)
    with torch.autocast("cpu", torch.bfloat16):
        plain = answer_of(decoder(family, torch.float32), case)

    def body(group: Group) -> tuple[float, dict[str, Tensor]]:
        model = longspan.parallelize(decoder(family, torch.float32), group)
        local = longspan.shard(case.batch, group, model=model)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**local).loss
        loss.backward()
        return loss.item(), gradients_of(model)

    losses, gradients = zip(*run_ranks(2, body), strict=True)
    check_as_exact(losses, gradients, true, plain)


@pytest.mark.parametrize("family", [*FAMILIES, *SELECTING, *POOLING])
def test_bfloat16_is_as_exact_as_one_rank(family: str) -> None:
    """As far from float64 as one rank is with each document alone, all in bfloat16. Of so many
    tokens that no single choice of an expert or a key, which rounding turns, decides."""
    case = packed([57, 30])
    true = answer_of(decoder(family), case)
    plain = answer_of(decoder(family, torch.bfloat16), case)

    def body(group: Group) -> tuple[float, dict[str, Tensor]]:
        model = longspan.parallelize(decoder(family, torch.bfloat16), group)
        loss = model(**longspan.shard(case.batch, group, model=model)).loss
        loss.backward()
        return loss.item(), gradients_of(model)

    losses, gradients = zip(*run_ranks(3, body), strict=True)
    check_as_exact(losses, gradients, true, plain)


def with_adapters(model: Any) -> Any:
    """On every linear layer."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(
        r=2,
        target_modules="all-linear",
        init_lora_weights=False,
        exclude_modules=["o_a_proj"],  # of DeepSeek-V4, block by block: peft takes it for dense
    )
    torch.manual_seed(5)
    return peft.get_peft_model(model, lora)


@pytest.mark.parametrize("inside", [True, False], ids=["model", "adapter"])
@pytest.mark.parametrize("family", ["llama", *SELECTING, *POOLING])
def test_adapters(family: str, inside: bool) -> None:
    """On every linear layer, and parallelized before or after the adapter wraps it."""
    case = packed([4, 9, 1, 11])

    def adapted() -> Any:
        return with_adapters(decoder(family))

    true = answer_of(adapted(), case)
    assert true.gradients and all("lora" in name for name in true.gradients)
    models = [adapted() for _ in range(3)]

    def body(group: Group) -> dict[str, Tensor]:
        model = models[group.rank()]
        longspan.parallelize(model.base_model.model if inside else model, group)
        local = longspan.shard(case.batch, group, model=model)
        _, gradients = step(model, local)
        with pytest.raises(RuntimeError, match="generate: this model is parallelized"):
            model.generate(input_ids=case.ids)
        longspan.restore(model)
        return gradients

    results = run_ranks(3, body)
    for name, gradient in true.gradients.items():
        error = (sum(g[name] for g in results) - gradient).abs().max()
        assert error <= 3e-6 * gradient.abs().max(), name


# ---- Wrapped models, as they were.


#: With what keeps graphs few.
WRAPPED: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma4": COMPILED["gemma4"],
    "glm_moe_dsa": {"num_hidden_layers": 1, "indexer_types": ["full"]},
    "deepseek_v4": {
        "num_hidden_layers": 1,
        "layer_types": ["compressed_sparse_attention"],
        "mlp_layer_types": ["moe"],
    },
}


@pytest.mark.parametrize("family", WRAPPED)
def test_restore_leaves_adapters_as_they_were(family: str) -> None:
    check_restored(with_adapters(decoder(family)), packed([7, 5]).batch, steps=1)


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "gemma4", "glm_moe_dsa"),
        pytest.param("deepseek_v4", marks=pytest.mark.deep),  # 20 s of graphs
    ],
)
def test_restore_leaves_compiled_models_as_they_were(family: str) -> None:
    model = torch.compile(decoder(family, **WRAPPED[family]), backend="eager")
    check_restored(model, packed([7, 5]).batch, steps=1)
