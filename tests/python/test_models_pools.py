"""DeepSeek-V4 over ranks: windows whose keys come over borders, and pools that straddle
them, against each document alone."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import longspan
from longspan import Group, Ownership, comm, dsa, run_ranks
from longspan._local_batch import KEYWORD
from longspan._recipes.deepseek_v4 import _rotated

pytest.importorskip("transformers")

from oracle.all_double import AllDouble
from oracle.tiny_decoders import CASES, Answer, Case, decoder, gradients_of, packed
from oracle.whole_models import (
    check,
    check_restored,
    check_rounding,
    in_float64,
    over_ranks,
    parts_of,
    sees_no_future,
    sends_what_it_says,
)

pytestmark = pytest.mark.slow  # whole models over ranks

V4 = "deepseek_v4"
RANKS = (1, 2, 3, 4)
#: Longer ones: pools of a document on more than two ranks, and more of them than are chosen.
LONG: dict[str, Case] = {
    "long": packed([57]),
    "long_rows": packed([40, 1, 3, 13], [5, 52]),
}
EVERY = {**CASES, **{name: functools.partial(lambda case: case, c) for name, c in LONG.items()}}


@functools.cache
def alone(case: str) -> Answer:
    return in_float64(V4, EVERY[case]())


def exactly(case: str, ranks: int, **options: Any) -> None:
    found = over_ranks(V4, EVERY[case](), ranks, inside=AllDouble, **options)
    check(found, alone(case), tolerance=1e-12)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("case", EVERY)
def test_it_is_each_document_alone(case: str, ranks: int) -> None:
    exactly(case, ranks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_channels_turn_as_the_family_turns_them(dtype: torch.dtype) -> None:
    """The same bits, there and back; the derivative is rounded once, where theirs is more often."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

    torch.manual_seed(0)
    x, dout = torch.randn(2, 2, 7, 3, 12).to(dtype)
    angles = torch.randn(2, 7, 4)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    for inverse in (False, True):
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        turned = _rotated(ours, cos.unsqueeze(2), sin.unsqueeze(2), inverse)
        signed = -sin if inverse else sin
        expected = apply_rotary_pos_emb(theirs, cos, signed, unsqueeze_dim=2)
        torch.testing.assert_close(turned, expected, rtol=0, atol=0)
        turned.backward(dout)
        expected.backward(dout)
        exact = [t.double() for t in (dout, cos.unsqueeze(2), sin.unsqueeze(2))]
        true = _rotated(exact[0], exact[1], exact[2], not inverse)
        assert ours.grad is not None and theirs.grad is not None
        off = (ours.grad - true).abs().max()
        assert off <= (theirs.grad - true).abs().max() and off < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("layout", [layout.name for layout in longspan.values.named_layouts()])
def test_every_layout(layout: str) -> None:
    exactly("long_rows", 3, layout=layout)
    exactly("long_rows", 4, layout=layout)
    exactly("left", 2, layout=layout)


@pytest.mark.parametrize(
    "sizes",
    [[19, 1, 37], [2, 53, 2], [17, 20, 20], [57, 57, 3]],
    ids=["uneven", "ends", "askew", "a_rank_of_pads"],
)
def test_pools_that_straddle_ranks_anywhere(sizes: list[int]) -> None:
    exactly("long", 3, layout=Ownership.of_sizes(sizes))


def test_scattered_tokens() -> None:
    """Four tokens here, three there: no run is as long as a window or a pool."""
    pieces: list[list[tuple[int, int]]] = [[], [], []]
    at = 0
    for i, size in enumerate([4, 3] * 8 + [1]):
        pieces[(i * 2) % 3].insert(0, (at, at + size))
        at += size
    assert at == 57
    exactly("long", 3, layout=Ownership.of_ranges(pieces))


@pytest.mark.parametrize("ranks", [1, 3])
def test_its_rounding_is_that_of_the_family(ranks: int) -> None:
    check_rounding(V4, ranks)


def test_nobody_sees_another_document() -> None:
    case = packed([26, 8, 23], [55, 2])

    def body(group: Group) -> None:
        model = longspan.parallelize(decoder(V4), group)
        assert longspan.leak_probe(model, case.batch, group) == []

    run_ranks(2, body)


def test_nobody_sees_the_future() -> None:
    """Bit for bit: pools and the windows that made them end before they are seen."""
    case = packed([57])

    def body(group: Group) -> None:
        model = longspan.parallelize(decoder(V4), group)
        sees_no_future(model, case, group, (0, 15, 16, 39, 40, 56))

    run_ranks(3, body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_sends_what_explain_says(dtype: torch.dtype) -> None:
    case = LONG["long_rows"]

    def body(group: Group) -> list[str]:
        model = longspan.parallelize(decoder(V4, dtype), group)
        said, _ = sends_what_it_says(model, case.batch, group)
        return [cost.strategy for cost in said.layers]

    strategies = run_ranks(3, body)[0]
    assert strategies == ["borders", *["borders and pools"] * 3]


def test_explain_counts_pairs() -> None:
    said = longspan.explain(decoder(V4), packed([20, 9]).batch)
    lengths = (20, 9)
    window = sum(min(at + 1, 5) for n in lengths for at in range(n))
    chosen = sum(min((at + 1) // 4, 2) for n in lengths for at in range(n))
    ended = sum((at + 1) // 6 for n in lengths for at in range(n))
    pairs = [window, window + chosen, window + ended, window + chosen]
    assert [cost.pairs for cost in said.layers] == pairs
    assert "window 5, 2 pools of 4 sink" in str(said) and "window 5, pools of 6 sink" in str(said)


@pytest.mark.parametrize("layer", [pytest.param(1, marks=pytest.mark.deep), 2])
def test_one_graph_for_changing_lengths(layer: int) -> None:
    """The attention of a layer with pools, whole; experts break the model's graph."""
    torch._dynamo.reset()
    model = longspan.parallelize(decoder(V4))
    attention, rotary = model.model.layers[layer].self_attn, model.model.rotary_emb
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(attention, backend=backend, fullgraph=True, dynamic=True)
    for lengths in ([46, 8, 3], [30, 1, 40], [70]):
        local = longspan.shard(packed(lengths).batch, model=model)
        tokens = local["input_ids"].shape[1]
        answers = []
        for call in (compiled, attention):
            x = torch.linspace(-1, 1, tokens * 32, dtype=torch.float64).view(1, tokens, 32)
            x = x.sin().requires_grad_()
            positions = local["position_ids"]
            turned = {kind: rotary(x, positions, layer_type=kind) for kind in ("main", "compress")}
            out, _ = call(
                hidden_states=x,
                position_embeddings=turned,
                position_ids=positions,
                attention_mask=None,
                **{KEYWORD: local[KEYWORD]},
            )
            attention.zero_grad()
            out.square().sum().backward()
            answers.append([out.detach(), x.grad, *gradients_of(attention).values()])
        for mine, plain in zip(*answers, strict=True):
            torch.testing.assert_close(mine, plain, rtol=1e-9, atol=1e-9)
        if lengths[0] == 46:
            first = len(graphs)
    assert len(graphs) == first, "a new length made a new graph"


@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_layers_send_a_fraction_of_what_they_read(ranks: int, layout: str) -> None:
    """DeepSeek-V4-Flash with 1024 tokens a rank, bfloat16: against all rows of keys, all
    pools and, where windows overlap, the float32 tensors that pools are made of."""
    here, key, index_key = 1024, 512, 128
    owners = getattr(Ownership, layout)(here * ranks, ranks)
    attention = longspan.AttentionLayout(owners)
    # Two ranks: docs/models.md shows that none can send less than 127 rows and 8 pools.
    bounds = {None: 8, 4: 20, 128: 1032 / 135 if ranks == 2 else 8}

    def body(group: Group) -> dict[int | None, float]:
        found = {}
        for ratio in bounds:
            sent = comm.HaloPlan(attention, 127, group=group).sent_bytes(
                "forward", bytes_per_token=2 * key
            )
            read = here * key * 2
            if ratio is not None:
                plan = dsa.PoolPlan(attention, ratio, overlap=ratio == 4, group=group)
                for channels in (key, index_key) if ratio == 4 else (key,):
                    sent += plan.sent_bytes("forward", channels=channels)
                    sent += plan.gathered_bytes("forward", bytes_per_pool=2 * channels)
                    read += here // ratio * channels * 2
                    read += 2 * here * 2 * channels * 4 if ratio == 4 else 0
            found[ratio] = read * (ranks - 1) / sent if sent else float("inf")
        return found

    for fractions in run_ranks(ranks, body):
        assert all(fractions[ratio] >= least for ratio, least in bounds.items()), fractions


# ---- What stays untouched, and what is refused.


def test_restore_undoes_it() -> None:
    check_restored(decoder(V4), packed([17, 5]).batch)


def test_a_refused_model_stays_as_it_was() -> None:
    """The last layer is to blame, when the others have been redirected."""
    model = decoder(V4)
    attention = model.model.layers[3].self_attn
    attention.forward = attention.forward
    before = parts_of(model)
    message = "`forward` of 'model.layers.3.self_attn' was replaced already"
    with pytest.raises(NotImplementedError, match=message):
        longspan.parallelize(model)
    assert parts_of(model) == before


def test_embeddings_have_no_ids_for_hash_routing() -> None:
    model = longspan.parallelize(decoder(V4))
    embeds = {"inputs_embeds": torch.randn(1, 12, 32, dtype=torch.float64)}
    message = "shard: 'model.layers.0.mlp.gate' chooses experts by token id"
    with pytest.raises(ValueError, match=message):
        longspan.shard(embeds, model=model)


@pytest.mark.parametrize("case", ["packed", "long_rows"])
def test_embeddings_where_nothing_is_hashed(case: str) -> None:
    config = {"mlp_layer_types": ["moe"] * 4}
    true = in_float64(V4, EVERY[case](), embeds=True, config=config)
    found = over_ranks(V4, EVERY[case](), 3, embeds=True, config=config, inside=AllDouble)
    check(found, true, tolerance=1e-12)


def test_without_a_sharded_batch() -> None:
    model = longspan.parallelize(decoder(V4))
    with pytest.raises(ValueError, match="without a sharded batch"):
        model(input_ids=torch.ones(1, 5, dtype=torch.long), use_cache=False)


def test_a_cache_is_refused() -> None:
    model = longspan.parallelize(decoder(V4))
    local = longspan.shard(packed([17, 5]).batch, model=model)
    with pytest.raises(NotImplementedError, match="DeepseekV4ForCausalLM: got `use_cache`"):
        model(**{**local, "use_cache": True})


def test_dropout_is_refused() -> None:
    model = longspan.parallelize(decoder(V4, attention_dropout=0.1)).train()
    with pytest.raises(
        NotImplementedError, match=r"DeepseekV4Attention: drops 0.1 of its attention"
    ):
        model(**longspan.shard(packed([7, 5]).batch, model=model))
