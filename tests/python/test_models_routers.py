"""Models with experts over ranks: router losses are those of the whole batch."""

from __future__ import annotations

import copy
import dataclasses
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import longspan
from longspan import Group, run_ranks

pytest.importorskip("transformers")

import transformers
from oracle.tiny_decoders import CASES, IGNORED, Answer, decoder, gradients_of, packed
from oracle.whole_models import check

#: So large that a mistake in the router's part shows in every gradient.
OPTIONS = {"router_aux_loss_coef": 0.5}
FAMILIES = ("mixtral", "qwen2_moe", "gpt_oss", "deepseek_v4")
#: Hyper-connections add up over tokens in float32, in models of float64 too.
TOLERANCE = {"deepseek_v4": 5e-5}


def experts(family: str) -> Any:
    return decoder(family, **OPTIONS)


def one_rank(family: str, case: str) -> tuple[Answer, Tensor]:
    """Each document alone, and the family's own router loss of all their tokens; how many
    tokens each expert got."""
    model, whole = experts(family), CASES[case]()
    targets = whole.targets()
    count = targets.ne(IGNORED).sum()
    total: Any = 0.0
    routers: list[tuple[Tensor, ...]] = []
    logits = []
    for d in whole.documents:
        ids = whole.ids[d.row : d.row + 1, d.begin : d.end]
        out = model(
            input_ids=ids,
            labels=ids,
            shift_labels=targets[d.row : d.row + 1, d.begin : d.end],
            num_items_in_batch=count,
            use_cache=False,
            output_router_logits=True,
        )
        total = total + out.loss - OPTIONS["router_aux_loss_coef"] * out.aux_loss
        routers.append(out.router_logits)
        logits.append(out.logits[0].detach())
    layers = tuple(torch.cat(layer) for layer in zip(*routers, strict=True))
    function = sys.modules[type(model).__module__].load_balancing_loss_func  # type: ignore[attr-defined]
    k = model.num_experts_per_tok
    total = total + OPTIONS["router_aux_loss_coef"] * function(layers, model.num_experts, k)
    total.backward()
    chosen = torch.stack(
        [torch.bincount(one.topk(k).indices.flatten(), minlength=one.shape[-1]) for one in layers]
    )
    return Answer(total.item(), gradients_of(model), tuple(logits)), chosen


def over_ranks(
    family: str, case: str, ranks: int, how: str, **options: Any
) -> tuple[Answer, list[Tensor]]:
    """`how` the router loss is asked for. Where the loss is made in tiles there are no logits."""
    whole, model = CASES[case](), experts(family)
    if how == "before":
        model.config.output_router_logits = True

    def body(group: Group) -> tuple[float, dict[str, Tensor], Any, Tensor]:
        mine = longspan.parallelize(copy.deepcopy(model), group, **options)
        batch = dict(whole.batch) | ({"output_router_logits": True} if how == "batch" else {})
        if how == "after":
            mine.config.output_router_logits = True
        local = longspan.shard(batch, group, model=mine)
        out = mine(**local)
        out.loss.backward()
        tiled = options.get("loss_tile") is not None
        assert (out.logits is None) == tiled
        logits = None if tiled else longspan.unshard(out.logits.detach(), local)
        counts = longspan.expert_counts(out, local)
        return out.loss.item(), gradients_of(mine), logits, counts

    results = run_ranks(ranks, body)
    gradients = {
        name: sum(r[1].get(name, torch.zeros(())) for r in results) for name in results[0][1]
    }
    logits = results[0][2]
    rows = () if logits is None else [logits[d.row, d.begin : d.end] for d in whole.documents]
    answer = Answer(sum(r[0] for r in results), gradients, tuple(rows))
    return answer, [r[3] for r in results]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("case", ["rows", "left", "slots"])
@pytest.mark.parametrize("family", FAMILIES)
def test_router_losses_are_those_of_the_whole_batch(family: str, case: str, ranks: int) -> None:
    true, counts = one_rank(family, case)
    ours, counted = over_ranks(family, case, ranks, "batch")
    check(ours, true, TOLERANCE.get(family, 3e-6))
    for mine in counted:
        assert mine.equal(counts)


@pytest.mark.parametrize("how", ["before", "after"])
def test_it_may_be_asked_for_in_the_configuration(how: str) -> None:
    true, _ = one_rank("mixtral", "rows")
    check(over_ranks("mixtral", "rows", 2, how)[0], true)


@pytest.mark.parametrize("how", ["batch", "before", "after"])
def test_it_is_added_to_a_loss_in_tiles(how: str) -> None:
    true, counts = one_rank("mixtral", "rows")
    ours, counted = over_ranks("mixtral", "rows", 3, how, loss_tile=5)
    check(ours, dataclasses.replace(true, logits=()))
    assert all(mine.equal(counts) for mine in counted)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "deepseek_v4"])
def test_it_is_added_to_a_loss_in_tiles_of(family: str) -> None:
    true, _ = one_rank(family, "left")
    ours, _ = over_ranks(family, "left", 2, "before", loss_tile=5)
    check(ours, dataclasses.replace(true, logits=()), TOLERANCE.get(family, 3e-6))


def test_it_is_not_asked_for_by_default() -> None:
    model = longspan.parallelize(experts("mixtral"))
    local = longspan.shard(packed([7, 5]).batch, model=model)
    out = model(**local)
    assert out.aux_loss is None and out.router_logits is None
    with pytest.raises(ValueError, match="does not say which experts were chosen; call the"):
        longspan.expert_counts(out, local)


def test_counts_follow_what_routers_choose_not_their_logits() -> None:
    """GLM adds a bias to what it chooses by, and has no router loss."""
    model = decoder("glm_moe_dsa")
    bias = torch.tensor([100.0, 100.0, 0.0, 0.0])
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias.copy_(bias)
    case = packed([6, 8, 9])

    def body(group: Group) -> Tensor:
        mine = longspan.parallelize(copy.deepcopy(model), group)
        local = longspan.shard(dict(case.batch) | {"output_router_logits": True}, group, model=mine)
        out = mine(**local)
        assert out.aux_loss is None
        return longspan.expert_counts(out, local)

    for counts in run_ranks(3, body):
        assert counts.tolist() == [[23, 23, 0, 0]] * 2  # two layers have experts


def test_checkpoints_keep_the_gradient_of_routers_or_say_so() -> None:
    model = longspan.parallelize(experts("mixtral")).train()
    batch = dict(packed([7, 5]).batch) | {"output_router_logits": True}
    local = longspan.shard(batch, model=model)
    model(**local).loss.backward()
    plain = gradients_of(model)
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(**local).loss.backward()
    for name, gradient in gradients_of(model).items():
        torch.testing.assert_close(gradient, plain[name])
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="router logits carry no gradient"):
        model(**local)


def test_the_signature_of_forward_stays() -> None:
    """Trainers drop the columns that it does not name."""
    import inspect

    model = experts("mixtral")
    before = inspect.signature(model.forward)
    assert inspect.signature(longspan.parallelize(model).forward) == before
    longspan.restore(model)
    assert "forward" not in vars(model)


# ---- Bad input.


def test_router_logits_of_a_model_without_experts() -> None:
    model = longspan.parallelize(decoder("llama"))
    batch = dict(packed([7, 5]).batch) | {"output_router_logits": True}
    with pytest.raises(ValueError, match="shard: output_router_logits is set, but LlamaFor"):
        longspan.shard(batch, model=model)


def test_noise_of_routers_in_training() -> None:
    model = longspan.parallelize(decoder("mixtral", router_jitter_noise=0.1))
    batch = packed([7, 5]).batch
    local = longspan.shard(batch, model=model.eval())
    assert model(**local).loss.isfinite()
    message = r"MixtralForCausalLM multiplies .* \(router_jitter_noise is 0.1\)"
    with pytest.raises(NotImplementedError, match="shard: " + message):
        longspan.shard(batch, model=model.train())
    with pytest.raises(NotImplementedError, match="MixtralForCausalLM: " + message):
        model(**local)


def test_noise_that_modules_keep() -> None:
    """They copy it from the configuration that they were made with."""
    model = longspan.parallelize(decoder("mixtral", router_jitter_noise=0.1)).train()
    batch = packed([7, 5]).batch
    model.config.router_jitter_noise = 0.0
    message = r"\(jitter_noise of 'model.layers.0.mlp' is 0.1\), .*; set it to 0, in every module"
    with pytest.raises(NotImplementedError, match="shard: MixtralForCausalLM .* " + message):
        longspan.shard(batch, model=model)
    for layer in model.model.layers:
        layer.mlp.jitter_noise = 0.0
    local = longspan.shard(batch, model=model)
    assert model(**local).loss.isfinite()
    model.model.layers[1].mlp.jitter_noise = 0.5
    with pytest.raises(NotImplementedError, match=r"jitter_noise of 'model.layers.1.mlp' is 0.5"):
        model(**local)


def test_noise_in_a_configuration_inside() -> None:
    options = {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4}}
    config = transformers.DbrxConfig(
        d_model=32, n_heads=4, n_layers=1, vocab_size=61, **options,
        ffn_config={"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_jitter_eps": 0.1},
    )  # fmt: skip
    config._experts_implementation = "eager"
    model = longspan.parallelize(transformers.DbrxForCausalLM(config).double().train(), proof=False)
    with pytest.raises(NotImplementedError, match=r"\(moe_jitter_eps is 0.1\)"):
        longspan.shard(packed([7, 5]).batch, model=model)


def test_noise_of_a_model_without_a_head() -> None:
    model = longspan.parallelize(decoder("mixtral", router_jitter_noise=0.1).model)
    batch = packed([7, 5]).batch
    local = longspan.shard(batch, model=model.eval())
    model(**local)
    with pytest.raises(NotImplementedError, match="MixtralModel: MixtralModel multiplies"):
        model.train()(**local)


def test_routers_that_draw_whom_they_choose() -> None:
    """Its router_jitter_noise is a threshold, and the noise on what routers see another number."""
    model = longspan.parallelize(decoder("phimoe"))
    assert model.config.router_jitter_noise > 0 == model.config.input_jitter_noise
    batch = packed([7, 5]).batch
    local = longspan.shard(batch, model=model)
    wanted = model(**local).logits
    message = (
        r"'model.layers.0.mlp.router' \(PhimoeTopKRouter\) draws its experts at random in training "
        r"\(sparsemixer\), .*; put every router of"
    )
    with pytest.raises(NotImplementedError, match="^shard: " + message):
        longspan.shard(batch, model=model.train())
    with pytest.raises(NotImplementedError, match="^PhimoeForCausalLM: " + message):
        model(**local)
    for layer in model.model.layers:
        layer.mlp.router.eval()
    local = longspan.shard(batch, model=model)
    assert model(**local).logits.equal(wanted)
    model.config.input_jitter_noise = 0.1
    with pytest.raises(NotImplementedError, match=r"\(input_jitter_noise is 0.1\)"):
        longspan.shard(batch, model=model)


def test_a_router_loss_that_is_another() -> None:
    """It is the function that is tried, not its name."""
    from longspan import _routers

    def other(logits: Any, experts: int, k: int, mask: Any = None) -> Tensor:
        return torch.stack(logits).softmax(-1).square().mean()

    assert not _routers._is_balance_loss(other)
    mixtral = sys.modules[type(experts("mixtral")).__module__]
    assert _routers._is_balance_loss(mixtral.load_balancing_loss_func)  # type: ignore[attr-defined]


def test_answers_without_names() -> None:
    model = longspan.parallelize(experts("mixtral"))
    batch = dict(packed([7, 5]).batch) | {"output_router_logits": True, "return_dict": False}
    with pytest.raises(ValueError, match="output_router_logits with return_dict=False"):
        model(**longspan.shard(batch, model=model))
