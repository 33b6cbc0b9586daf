"""A layout is a name or an Ownership wherever one is taken; how layers attend, and
how attention runs over the ranks, are values."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import longspan
from longspan import (
    AttentionLayout,
    Group,
    Mask,
    Ownership,
    Packing,
    Strategy,
    _estimating,
    _train_command,
    _verify_command,
)
from longspan.values import named_layouts

PACKING = Packing.of([7, 13, 4], [8, 16, 8])
LAYOUTS = [layout.name for layout in named_layouts()]


def inputs(tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, 2, 4, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_name_is_the_ownership_of_the_masks_packing(layout: str) -> None:
    kind = next(known.kind for known in named_layouts() if known.name == layout)
    owners = Ownership.of(kind, PACKING, 2)
    mask = Mask.causal(PACKING)
    whole = inputs(PACKING.tokens)

    def body(group: Group) -> bool:
        local = [t[owners.tokens_of(group.rank())] for t in whole]
        answers = [
            longspan.attend(*local, mask=mask, layout=which, group=group)
            for which in (layout, owners)
        ]
        found = [
            longspan.dsa.select_keys(
                local[0], local[1][:, 0], torch.ones(len(local[0]), 2), slots=3, mask=mask,
                layout=which, group=group,
            )
            for which in (layout, owners)
        ]  # fmt: skip
        return torch.equal(*answers) and torch.equal(*found)

    assert all(longspan.run_ranks(2, body))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_rank_needs_no_mask_for_a_name(layout: str) -> None:
    q, k, v = inputs(6)
    assert torch.equal(longspan.attend(q, k, v, layout=layout), longspan.attend(q, k, v))


@pytest.mark.parametrize("form", ["rows", "stream"])
def test_pad_fits_a_batch_to_an_ownership(form: str) -> None:
    packed = longspan.values.pack({"input_ids": torch.arange(10).view(2, 5)}, form=form)
    longer = Ownership.of_sizes([packed.tokens, 0, 3])
    assert longspan.values.pad(packed, layout=longer).tokens == packed.tokens + 3
    fitting = Ownership.contiguous(packed.tokens, 1)
    assert longspan.values.pad(packed, layout=fitting).tokens == packed.tokens
    with pytest.raises(ValueError, match="says how many ranks and tokens there are"):
        longspan.values.pad(packed, layout=longer, ranks=2)
    with pytest.raises(ValueError, match=r"pad: the ownership has 4 tokens but the batch \d+, and"):
        longspan.values.pad(packed, layout=Ownership.contiguous(4, 1))


def test_an_attention_layout_is_a_value() -> None:
    owners = Ownership.per_document_head_tail(PACKING, 2)
    masks = [Mask.sliding(PACKING, 3), Mask.causal(PACKING)]
    made = AttentionLayout(owners, masks)
    again = pickle.loads(pickle.dumps(made))
    assert torch.equal(again.tensor, made.tensor)
    assert made.tensor.dtype == torch.int64 and made.tensor.device.type == "cpu"
    assert again.ownership == owners
    assert list(map(repr, again.masks)) == list(map(repr, masks))
    assert repr(made) == repr(AttentionLayout.of_tensor(made.tensor))
    assert repr(owners) in repr(made)
    assert repr(AttentionLayout.of_tensor(torch.arange(3))) == "AttentionLayout((3,))"


@pytest.mark.parametrize("reentrant", [False, True])
def test_an_attention_layout_goes_through_checkpoints(reentrant: bool) -> None:
    layout = AttentionLayout(Ownership.contiguous(PACKING.tokens, 1), Mask.causal(PACKING))
    leaves = [t.requires_grad_() for t in inputs(PACKING.tokens)]

    def attention(q, k, v, layout):  # type: ignore[no-untyped-def]
        return longspan.attend(q, k, v, attention=layout).square().sum()

    plain = torch.autograd.grad(attention(*leaves, layout), leaves)
    attention_again = checkpoint(attention, *leaves, layout, use_reentrant=reentrant)
    attention_again.backward()
    for leaf, gradient in zip(leaves, plain, strict=True):
        assert torch.equal(leaf.grad, gradient)


def test_names_parse_to_strategies() -> None:
    for name in Strategy.names():
        strategy = Strategy.of(name)
        assert strategy == Strategy(name) == pickle.loads(pickle.dumps(strategy))
        assert hash(strategy) == hash(Strategy(name))
        assert strategy.name == name and repr(strategy) == f"Strategy('{name}')"
        owners = Ownership.head_tail(24, 4)
        by_name = longspan.plan(owners, strategy=name, key_heads=4)
        by_value = longspan.plan(owners, strategy=strategy, key_heads=4)
        assert repr(by_name) == repr(by_value)
        assert by_name.strategy == by_value.strategy
    assert Strategy("ring") != Strategy("gathered")
    assert [Strategy(name).head_ranks for name in Strategy.names()] == [1, 1, 1, None, None]


def test_teams_are_part_of_a_strategy() -> None:
    teams = Strategy("head_parallel_ring", head_ranks=2)
    assert (teams.name, teams.head_ranks) == ("head_parallel_ring", 2)
    assert repr(teams) == "Strategy('head_parallel_ring', head_ranks=2)"
    planned = longspan.plan(Ownership.head_tail(24, 4), strategy=teams, key_heads=4)
    assert planned.strategy == teams
    alone = Strategy("head_parallel_ring", head_ranks=1)
    assert alone == Strategy("ring") and alone.name == "ring"
    with pytest.raises(ValueError, match="'head_parallel' is one team, but head_ranks is 2"):
        Strategy("head_parallel", head_ranks=2)
    with pytest.raises(ValueError, match="'spiral' is not one of ring, gathered"):
        Strategy("spiral")
    with pytest.raises(TypeError, match=r"expected one of ring, .* got int"):
        Strategy.of(3)  # type: ignore[arg-type]


# ---- Words of commands.

COMMANDS = {
    "estimate": (_estimating, ["--model", "nowhere", "--tokens", "64"]),
    "train": (_train_command, ["llama", "--text", "nowhere"]),
    "verify": (_verify_command, ["llama"]),
}
WORDS = [
    ("--strategy", "ulysses", "head_parallel"),
    ("--strategy", "head-parallel", "head_parallel"),
    ("--strategy", "USP", "head_parallel_ring"),
    ("--strategy", "rings", "ring"),
    ("--strategy", "spiral", None),
    ("--layout", "zigzag", "head-tail"),
    ("--layout", "zig-zag", "head-tail"),
    ("--layout", "Zig_Zag_varlen", "per-document-head-tail"),
    ("--layout", "Auto", "auto"),
    ("--layout", "contiguous", "contiguous-rows"),
    ("--layout", "\udc80", None),
    ("--dtype", "fp32", "float32"),
    ("--dtype", "int3", None),
]


@pytest.mark.parametrize(("flag", "word", "meant"), WORDS)
@pytest.mark.parametrize("command", COMMANDS)
def test_words_of_other_libraries_get_ours(command: str, flag: str, word: str, meant: Any) -> None:
    module, arguments = COMMANDS[command]
    with pytest.raises(_estimating.Refusal) as refusal:
        module._parser().parse_args([*arguments, flag, word])
    said = str(refusal.value)
    assert said.startswith(f"{flag} is '{word}'; expected ")
    assert said.partition("; did you mean ")[2] == (f"{meant}?" if meant else "")
    if meant:
        given = module._parser().parse_args([*arguments, flag, meant])
        assert getattr(given, flag[2:]) == meant


@pytest.mark.parametrize("command", COMMANDS)
def test_a_refused_word_is_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    module, arguments = COMMANDS[command]
    assert module.main([*arguments, "--strategy", "ulysses"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == (
        f"longspan {command}: --strategy is 'ulysses'; expected {', '.join(Strategy.names())}; did "
        f"you mean head_parallel?\n"
    )
