"""Multi-token prediction over ranks: the losses and gradients of each document alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("transformers.modeling_layers")

import transformers
from oracle.tiny_decoders import Case, decoder, packed, padded
from transformers import modeling_layers

import longspan
from longspan import Group, run_ranks
from longspan._rulers import AllDouble, gradients_of, loss_of

if not hasattr(modeling_layers, "MtpModel"):
    pytest.skip("this transformers has no MtpModel", allow_module_level=True)

DEPTHS = 3
_SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "pad_token_id": 0,
}


def bailing_hybrid() -> Any:
    """Layers with states below, and plain attention ahead: transformers runs no others there."""
    pytest.importorskip("transformers.models.bailing_hybrid")
    model = decoder(
        "bailing_hybrid",
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        num_mtp_layers=DEPTHS,
        mtp_layer_types=["full_attention"] * DEPTHS,
        mtp_mlp_layer_types=["sparse"] * DEPTHS,
    )
    return model.config


def model_of(family: str) -> Any:
    """Float64, with random weights, in evaluation."""
    made = {
        "deepseek_v3": lambda: transformers.DeepseekV3Config(
            **_SIZES,
            **{"q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8},
            **{"qk_rope_head_dim": 4, "head_dim": 4, "v_head_dim": 10},
            num_mtp_layers=DEPTHS,
        ),
        "glm4_moe": lambda: transformers.Glm4MoeConfig(**_SIZES, head_dim=8, num_mtp_layers=DEPTHS),
        "bailing_hybrid": bailing_hybrid,
    }[family]()
    made._experts_implementation = "eager"
    torch.manual_seed(0)
    return randomized(transformers.AutoModelForCausalLM.from_config(made))


def randomized(model: Any) -> Any:
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=random))
    return model.double().eval()


def mtp_of(model: Any) -> Any:
    torch.manual_seed(2)
    made = modeling_layers.MtpModel(model, DEPTHS)
    shared = {id(p) for p in model.parameters()}
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            if id(parameter) not in shared:
                parameter.data = 0.2 * torch.randn(
                    parameter.shape, generator=random, dtype=torch.float64
                )
    return made.double().eval()


def added(losses: list[torch.Tensor]) -> torch.Tensor:
    """With weights of their own, so that no two can be exchanged."""
    return sum((1.0 + depth) * loss for depth, loss in enumerate(losses))  # type: ignore[return-value]


def alone(model: Any, case: Case) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Every document by itself and without tokens that look beyond its end."""
    mtp = mtp_of(model)
    labels = case.batch["labels"]
    counts = [0] * (DEPTHS + 1)
    for d in case.documents:
        inside = labels[d.row, d.begin : d.end]
        for depth in range(DEPTHS + 1):
            counts[depth] += int(inside[depth + 1 :].ne(-100).sum())
    parts = [0.0] * (DEPTHS + 1)
    for d in case.documents:
        ids = case.ids[d.row : d.row + 1, d.begin : d.end]
        wanted = labels[d.row : d.row + 1, d.begin : d.end]
        length = ids.shape[1]
        last = model.config.num_hidden_layers - 1
        out = model(input_ids=ids, use_cache=False, output_hidden_states=[last])
        losses = [loss_of(out.logits[:, :-1], wanted[:, 1:], counts[0])]
        states = out.hidden_states[-1]
        for depth in range(DEPTHS):
            kept = length - depth - 1
            if kept < 1:
                break
            states = mtp.forward_layer(
                depth,
                states[:, :kept],
                torch.arange(depth + 1, length)[None],
                None,
                input_ids=ids[:, depth + 1 :],
            )
            if kept > 1:
                logits = mtp._project_to_logits(states[:, :-1])
                losses.append(loss_of(logits, wanted[:, depth + 2 :], counts[depth + 1]))
        added(losses).backward()
        for depth, loss in enumerate(losses):
            parts[depth] += float(loss.detach())
    return parts, gradients_of(model) | gradients_of(mtp)


def over(family: str, case: Case, ranks: int, layout: str) -> Any:
    batch = dict(case.batch)
    for d in case.documents:  # what ends a document is not foretold
        batch["labels"] = batch["labels"].clone()
        batch["labels"][d.row, d.begin] = -100
    models = [model_of(family) for _ in range(ranks)]

    def body(group: Group) -> Any:
        with AllDouble():
            model = longspan.parallelize(models[group.rank()], group, layout=layout)
            mtp = mtp_of(model)
            local = longspan.shard(batch, group, model=model)
            found = longspan.mtp_losses(model, mtp, local)
            losses = [found.loss, *found.depths]
            added(losses).backward()
            # Both, since they share embeddings and the head.
            longspan.sum_gradients(torch.nn.ModuleList([model, mtp]), group)
            totals = [float(longspan.total_loss(loss, group)) for loss in losses]
        return totals, gradients_of(model) | gradients_of(mtp)

    return run_ranks(ranks, body, timeout=60)[0]


CASES = {
    "packed": packed([4, 9, 1, 11, 2]),
    "rows": packed([6, 8, 9], [21, 2]),
    "left": padded([13, 5, 17], 17, "left"),
}


@pytest.mark.parametrize(
    ("family", "case", "ranks", "layout"),
    [
        ("deepseek_v3", "packed", 1, "head-tail"),
        ("deepseek_v3", "packed", 3, "per-document-head-tail"),
        ("deepseek_v3", "rows", 4, "head-tail"),
        ("deepseek_v3", "left", 2, "contiguous-rows"),
        ("glm4_moe", "packed", 2, "contiguous-stream"),
        ("bailing_hybrid", "packed", 2, "head-tail"),
    ],
)
def test_every_depth_is_that_of_each_document_alone(
    family: str, case: str, ranks: int, layout: str
) -> None:
    plain = model_of(family)  # outside: its rotary frequencies are float32 numbers
    with AllDouble():
        losses, gradients = alone(plain, CASES[case])
    ours, found = over(family, CASES[case], ranks, layout)
    assert ours == pytest.approx(losses, rel=1e-12)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        size = float(gradient.abs().max()) or 1.0
        assert float((found[name] - gradient).abs().max()) <= 1e-11 * size, name


def test_every_depth_has_the_positions_of_its_tokens() -> None:
    """Rotations do not show a shift that all tokens have; other positions would."""
    model = longspan.parallelize(model_of("glm4_moe"))
    mtp, told = mtp_of(model), []
    forward = mtp.forward_layer

    def heard(depth: int, states: Any, positions: Any, *rest: Any, **more: Any) -> Any:
        told.append(positions[0].tolist())
        return forward(depth, states, positions, *rest, **more)

    mtp.forward_layer = heard
    longspan.mtp_losses(model, mtp, longspan.shard(packed([3, 5]).batch, model=model))
    assert told == [[p + d for p in (0, 1, 2, 0, 1, 2, 3, 4)] for d in (1, 2, 3)]


# ---- Refusals.


def refusal(batch: Any = None, mtp: Any = None, **changes: Any) -> str:
    """What is said of a parallelized DeepSeek-V3 on one rank."""
    model = longspan.parallelize(model_of("deepseek_v3"))
    local = longspan.shard(batch or CASES["packed"].batch, model=model)
    made = mtp_of(model) if mtp is None else mtp
    with pytest.raises((ValueError, TypeError, NotImplementedError)) as error:
        longspan.mtp_losses(model, made, changes.get("local", local))
    return str(error.value)


def test_layers_deeper_than_every_document_are_refused() -> None:
    assert refusal(dict(packed([3, 2, 3]).batch)) == (
        "mtp_losses: layer 2 foretells the token 4 ahead, and the longest document has 3 tokens; "
        "give longer documents or fewer layers"
    )
    model = longspan.parallelize(model_of("deepseek_v3"))
    local = longspan.shard(packed([5, 2]).batch, model=model)
    assert len(longspan.mtp_losses(model, mtp_of(model), local).depths) == DEPTHS


def test_what_is_not_for_these_ranks_is_refused() -> None:
    plain = model_of("deepseek_v3")
    assert "attends to this rank's tokens alone; make the MtpModel after" in refusal(
        mtp=mtp_of(plain)
    )
    assert "expected a transformers.modeling_layers.MtpModel" in refusal(mtp=torch.nn.Linear(1, 1))
    assert "expected what shard(batch, group, model=model) made" in refusal(local={})
    unlabelled = {k: v for k, v in CASES["packed"].batch.items() if k != "labels"}
    assert "of a batch with labels" in refusal(unlabelled)
    with pytest.raises(ValueError, match="mtp_losses: this DeepseekV3ForCausalLM is not paral"):
        longspan.mtp_losses(plain, mtp_of(plain), {})  # type: ignore[arg-type]


def test_layers_that_transformers_does_not_run_are_refused() -> None:
    hybrid = model_of("bailing_hybrid")
    hybrid.config.mtp_layer_types = ["linear_attention"] * DEPTHS
    assert "is a layer of Bailing hybrid, and transformers runs plain attention alone" in refusal(
        mtp=mtp_of(longspan.parallelize(hybrid))
    )
