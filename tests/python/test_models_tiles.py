"""Models whose logits, feed-forward modules and layer inputs exist in parts: the same losses
and gradients as whole."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import longspan
from longspan import Group, _tiles, run_ranks

pytest.importorskip("transformers")

import transformers
from oracle.tiny_decoders import CASES, VOCABULARY, decoder, gradients_of, packed
from oracle.whole_models import parts_of
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

#: What is done to logits: nothing, a scale, a cap, a bias, tied embeddings.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "granite": {"logits_scaling": 3.0},
    "gemma2": {"final_logit_softcapping": 2.0},
    "gemma4": {"final_logit_softcapping": 1.5},
    "gpt2": {},
    "mixtral": {},
    "glm_moe_dsa": {},
    "deepseek_v4": {},
}


def whole_and_tiled(
    family: str, ranks: int = 2, case: str = "packed", **tiles: Any
) -> Iterator[tuple[float, dict[str, Tensor]]]:
    """The summed loss and gradients without and with tiles."""
    model = decoder(family, **FAMILIES.get(family, {}))
    batch = CASES[case]().batch

    def body(options: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
        def run(group: Group) -> tuple[float, dict[str, Tensor]]:
            mine = longspan.parallelize(copy.deepcopy(model), group, **options)
            out = mine(**longspan.shard(batch, group, model=mine))
            out.loss.backward()
            tiled = options["loss_tile"] is not None
            assert (out.logits is None) == tiled
            return out.loss.item(), gradients_of(mine)

        losses, gradients = zip(*run_ranks(ranks, run), strict=True)
        names = gradients[0].keys()
        return sum(losses), {n: sum(g[n] for g in gradients) for n in names}  # type: ignore[misc]

    yield body({"loss_tile": None})
    yield body({"loss_tile": None} | tiles)


def check_same(
    plain: tuple[float, dict[str, Tensor]], tiled: tuple[float, dict[str, Tensor]]
) -> None:
    """The loss of transformers is float32."""
    assert tiled[0] == pytest.approx(plain[0], rel=1e-6)
    assert tiled[1].keys() == plain[1].keys()
    largest = max(float(g.abs().max()) for g in plain[1].values())
    for name, gradient in plain[1].items():
        error = float((tiled[1][name] - gradient).abs().max())
        assert error <= 2e-6 * max(float(gradient.abs().max()), 1e-2 * largest), name


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_loss_in_tiles_is_the_models_own(family: str) -> None:
    check_same(*whole_and_tiled(family, loss_tile=7))


@pytest.mark.parametrize("tile", [1, 5, 1000])
def test_any_tile(tile: int) -> None:
    check_same(*whole_and_tiled("llama", 1, loss_tile=tile))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma4", "gpt2", "mixtral", "deepseek_v3"])
def test_feed_forwards_in_tiles(family: str) -> None:
    check_same(*whole_and_tiled(family, mlp_tile=3))


def test_everything_at_once() -> None:
    check_same(*whole_and_tiled("llama", 3, "left", loss_tile=4, mlp_tile=5))


def test_logits_are_there_when_asked_for() -> None:
    model = longspan.parallelize(decoder("llama"), loss_tile=4)
    local = longspan.shard(packed([7, 5]).batch, model=model)
    tiled, whole = model(**local), model(**local, output_logits=True)
    assert tiled.logits is None and whole.logits.shape[-1] == VOCABULARY
    assert tiled.loss.item() == pytest.approx(whole.loss.item(), rel=1e-6)
    unlabelled = {k: v for k, v in local.items() if k not in ("labels", "shift_labels")}
    assert model(**unlabelled).logits is not None
    with pytest.raises(TypeError, match="output_logits=True"):
        longspan.unshard(tiled.logits, local)


def test_auto_leaves_small_logits_whole() -> None:
    model = longspan.parallelize(decoder("llama"))
    out = model(**longspan.shard(packed([7, 5]).batch, model=model))
    assert out.logits is not None and out.loss is not None


def test_auto_makes_large_logits_in_tiles() -> None:
    """1024 tokens of 70000 words are 273 MiB."""
    model = decoder("llama", torch.float32, vocab_size=70_000, num_hidden_layers=1)
    ids = torch.randint(3, 70_000, (1, 1024), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    plain = model(**batch).loss
    longspan.parallelize(model)
    out = model(**longspan.shard(batch, model=model))
    assert out.logits is None
    assert out.loss.item() == pytest.approx(plain.item(), rel=1e-5)


def test_restore_and_pause_undo_it() -> None:
    model, batch = decoder("gemma2"), packed([7, 5]).batch
    before = parts_of(model)
    plain = model(input_ids=batch["input_ids"]).logits
    longspan.parallelize(model, loss_tile=3, mlp_tile=2, offload="hidden")
    with longspan.paused(model):
        assert model(input_ids=batch["input_ids"]).logits.equal(plain)
    longspan.restore(model)
    assert parts_of(model) == before
    assert model(input_ids=batch["input_ids"]).logits.equal(plain)


class _ShiftedForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    """Adds something of its own to the logits."""

    def forward(self, input_ids: Any = None, labels: Any = None, **options: Any) -> Any:
        hidden = self.model(input_ids=input_ids, **options).last_hidden_state
        logits = self.lm_head(hidden)
        logits = logits + torch.linspace(0, 1, logits.shape[-1])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.vocab_size, **options)
        return CausalLMOutput(loss=loss, logits=logits)


def test_what_else_is_done_to_logits_is_noticed() -> None:
    made = decoder("llama")
    other = _ShiftedForCausalLM(made.config).double()
    with pytest.raises(
        NotImplementedError, match="cannot be made in tiles: _ShiftedForCausalLM does more"
    ):
        longspan.parallelize(other, loss_tile=4)
    longspan.parallelize(other)  # "auto": whole logits


HOOKS: dict[str, Any] = {
    "forward": lambda head, hook: head.register_forward_hook(hook),
    "backward": lambda head, hook: head.register_full_backward_hook(hook),
    "before_backward": lambda head, hook: head.register_full_backward_pre_hook(hook),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_on_the_output_layer_of_a_loss_in_tiles(kind: str) -> None:
    def look(*_: Any) -> None: ...

    model = longspan.parallelize(decoder("llama"), loss_tile=4)
    local = longspan.shard(packed([7, 5]).batch, model=model)
    handle = HOOKS[kind](model.lm_head, look)
    with pytest.raises(
        NotImplementedError, match=r"LlamaForCausalLM: 'lm_head' has the hook .*look"
    ):
        model(**local)
    assert model(**local, output_logits=True).logits is not None
    handle.remove()
    assert model(**local).logits is None


def test_a_number_for_logits_that_a_model_keeps() -> None:
    """Cohere scales logits by its own copy of what its configuration said."""
    config = decoder("llama").config
    small = {k: getattr(config, k) for k in ("hidden_size", "vocab_size", "num_attention_heads")}
    made = transformers.CohereForCausalLM(
        transformers.CohereConfig(**small, num_hidden_layers=1, logit_scale=0.25)
    )
    batch = packed([7, 5]).batch
    model = longspan.parallelize(copy.deepcopy(made), loss_tile=4)
    local = longspan.shard(batch, model=model)
    assert model(**local).logits is None
    model.logit_scale = 0.5
    with pytest.raises(
        NotImplementedError,
        match=r"CohereForCausalLM: `logit_scale` of CohereForCausalLM is 0.5, and its "
        "configuration made it 0.25, so loss_tile=4 would give another loss",
    ):
        model(**local)
    made.logit_scale = 0.5
    with pytest.raises(NotImplementedError, match="cannot be made in tiles: `logit_scale` of"):
        longspan.parallelize(made, loss_tile=4)
    longspan.parallelize(made)  # "auto": whole logits


def test_hooks_before_the_output_layer_see_what_they_always_do() -> None:
    model = longspan.parallelize(decoder("llama"), loss_tile=4)
    local = longspan.shard(packed([7, 5]).batch, model=model)
    seen: list[Any] = []
    model.lm_head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    tiled, whole = model(**local), model(**local, output_logits=True)
    assert tiled.logits is None and tiled.loss.item() == pytest.approx(whole.loss.item(), rel=1e-6)
    assert len(seen) == 2 and seen[0].equal(seen[1])


def test_auto_makes_logits_for_a_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tiles, "_WORTH_TILES", 0)
    model = longspan.parallelize(decoder("llama"))
    local = longspan.shard(packed([7, 5]).batch, model=model)
    assert model(**local).logits is None
    seen = []
    model.lm_head.register_forward_hook(lambda *given: seen.append(given[-1].shape[-1]))
    assert model(**local).logits is not None and seen == [VOCABULARY]


def test_a_hook_on_the_output_layer_keeps_logits_whole() -> None:
    model = decoder("llama")
    model.lm_head.register_forward_hook(lambda *_: None)
    with pytest.raises(NotImplementedError, match="somebody looks into the output layer"):
        longspan.parallelize(model, loss_tile=4)


def test_without_a_twin_nobody_knows_the_logits() -> None:
    with pytest.raises(NotImplementedError, match="proof=False"):
        longspan.parallelize(decoder("llama"), loss_tile=4, proof=False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"loss_tile": 0}, "`loss_tile` is 0"),
        ({"loss_tile": "all"}, "`loss_tile` is a str"),
        ({"mlp_tile": 0}, "`mlp_tile` is 0"),
        ({"mlp_tile": "auto"}, "`mlp_tile` is a str"),
        ({"offload": "weights"}, "`offload` is 'weights'"),
    ],
)
def test_bad_wishes(given: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        longspan.parallelize(decoder("llama"), **given)


def test_offload_wants_checkpoints() -> None:
    model = longspan.parallelize(decoder("llama").train(), offload="hidden")
    local = longspan.shard(packed([7, 5]).batch, model=model)
    with pytest.raises(ValueError, match="gradient_checkpointing_enable"):
        model(**local)


ON_CUDA = [
    pytest.param(family, "cuda", reentrant, marks=pytest.mark.cuda)
    for family in ("llama", "gemma4", "deepseek_v4", "mixtral")
    for reentrant in (False, True)
    # Reentrant checkpoints lose the gradient of shared keys by themselves.
    if not (family == "gemma4" and reentrant)
]


@pytest.mark.parametrize(
    ("family", "device", "reentrant"), [("llama", "cpu", False), ("llama", "cpu", True), *ON_CUDA]
)
def test_offload_changes_no_gradient(
    family: str, device: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = []

    class Counted(_tiles._Away):
        def __init__(self, number: int, *given: Any) -> None:
            moved.append(number)
            super().__init__(number, *given)

    monkeypatch.setattr(_tiles, "_Away", Counted)
    model = decoder(family).train().to(device)
    batch = {key: value.to(device) for key, value in packed([9, 14]).batch.items()}
    found = []
    for offload in (None, "hidden"):
        mine = longspan.parallelize(copy.deepcopy(model), offload=offload, mlp_tile=5)
        mine.gradient_checkpointing_enable({"use_reentrant": reentrant})
        local = longspan.shard(batch, model=mine)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(2):  # the second adds up
                mine(**local).loss.backward()
        found.append(gradients_of(mine))
    plain, away = found
    assert bool(moved) == (device == "cuda")
    assert plain.keys() == away.keys() and len(plain) > 4
    for name, gradient in plain.items():
        torch.testing.assert_close(away[name], gradient, rtol=1e-12, atol=1e-14, msg=name)


def test_offload_does_nothing_on_the_host_and_says_so_once() -> None:
    _tiles._say_once.cache_clear()
    for expected in (1, 0):
        model = longspan.parallelize(decoder("llama").train(), offload="hidden")
        model.gradient_checkpointing_enable({"use_reentrant": False})
        local = longspan.shard(packed([7, 5]).batch, model=model)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model(**local).loss.backward()
            model(**local).loss.backward()
        about = [str(one.message) for one in said if "offload" in str(one.message)]
        assert len(about) == expected
        assert all("does nothing here: the tensors are on the host already" in a for a in about)


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpoints(reentrant: bool) -> None:
    model, batch = decoder("llama").train(), packed([9, 14]).batch
    plain = longspan.parallelize(copy.deepcopy(model), loss_tile=None)
    plain(**longspan.shard(batch, model=plain)).loss.backward()
    longspan.parallelize(model, loss_tile=5, mlp_tile=4)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model(**longspan.shard(batch, model=model)).loss.backward()
    check_same((0.0, gradients_of(plain)), (0.0, gradients_of(model)))


def test_dropout_in_tiles_is_drawn_once() -> None:
    """Recomputed with the numbers of forward: on the CPU, where tiles draw what the whole
    would have drawn, gradients are those of the whole."""

    def gradients(tile: int | None) -> dict[str, Tensor]:
        model = decoder("llama").train()
        for layer in model.model.layers:
            layer.mlp.act_fn = nn.Sequential(layer.mlp.act_fn, nn.Dropout(0.5))
        longspan.parallelize(model, mlp_tile=tile, proof=False)
        local = longspan.shard(packed([9, 14]).batch, model=model)
        torch.manual_seed(1)
        model(**local).loss.backward()
        return gradients_of(model)

    check_same((0.0, gradients(None)), (0.0, gradients(4)))


@pytest.mark.slow
def test_compiles() -> None:
    model, batch = decoder("llama", torch.float32), packed([9, 14]).batch
    longspan.parallelize(model, loss_tile=5)
    local = longspan.shard(batch, model=model)
    want = model(**local).loss
    compiled = torch.compile(model, backend="aot_eager")
    got = compiled(**local).loss
    assert got.item() == pytest.approx(want.item(), rel=1e-6)
    got.backward()
