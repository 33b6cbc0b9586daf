"""The same promises on CUDA: one rank on the device, and ranks that share it."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import tempfile
from typing import Any

import pytest
import test_attend
import torch
import torch.multiprocessing
from oracle.dense_attention import Answer, dense_by_formula
from test_attend import CASES, Case, Inputs, attend_on, complaints, joined, one, ownerships

import longspan
from longspan import Group, Mask, Ownership, Packing

pytestmark = pytest.mark.cuda

LARGE = [
    Case("large_causal", Packing.single(300), rows=2, heads=8, key_heads=2, dim=64, value_dim=64),
    Case("many_documents", Packing.of([37, 100, 1, 64, 5, 80], [40, 100, 2, 64, 5, 81]),
         heads=4, key_heads=4, dim=128, value_dim=128, packed=True),
    Case("large_window", Packing.of([200, 90]), one(lambda p: Mask.sliding(p, 33)),
         heads=4, key_heads=1, dim=64, value_dim=64),
    Case("large_band", Packing.of([150, 90]), one(lambda p: Mask.banded(p, 20, 9)),
         heads=2, key_heads=2, dim=32, value_dim=32),
    Case("large_groups", Packing.of([256]), test_attend.groups_across_borders,
         heads=2, key_heads=2, dim=64, value_dim=64),
    Case("large_sink", Packing.of([120, 100]), sink="usual", heads=4, key_heads=2,
         dim=64, value_dim=64),
    Case("different_dims", Packing.single(200), heads=4, key_heads=2, dim=192, value_dim=128),
    Case("large_torn", Packing.of([130, 70]), test_attend.torn, heads=2, key_heads=1,
         dim=64, value_dim=64),
]  # fmt: skip


def on_cuda(inputs: Inputs) -> Inputs:
    return dataclasses.replace(
        inputs,
        **{
            name: value.cuda()
            for name in ("q", "k", "v", "dout", "sink")
            if (value := getattr(inputs, name)) is not None
        },
    )


def attend_on_cuda(
    group: Group, inputs: Inputs, owners: Ownership, strategy: tuple[str, int]
) -> Answer:
    """This rank's part of the answer, brought back."""
    answer = attend_on(group, inputs, owners, strategy)
    return Answer(*(None if part is None else part.cpu() for part in answer))


def plain_answers(inputs: Inputs, dtype: torch.dtype) -> list[Answer]:
    return [
        inputs.answer(dtype),
        *(
            inputs.answer(dtype, functools.partial(dense_by_formula, seed=seed))
            for seed in range(3)
        ),
    ]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=lambda case: case.name)
def test_one_rank_gives_the_oracles_answer(case: Case, dtype: torch.dtype) -> None:
    packing = case.fitted(2)
    inputs = Inputs.of(case, packing, dtype)
    if case.magnitude > 1e3 and dtype in (torch.bfloat16, torch.float16):
        pytest.skip("scores of 1e4 leave nothing of half types in torch's kernels")
    got = attend_on_cuda(
        Group(), on_cuda(inputs), Ownership.contiguous(packing.tokens, 1), ("ring", 0)
    )
    floor = 1e-12 if dtype == torch.float64 else torch.finfo(torch.float32).eps
    wrong = complaints(got, inputs.answer(torch.float64), plain_answers(inputs, dtype), floor)
    q, k, v = (t.cuda() for t in (inputs.q, inputs.k, inputs.v))
    kernel = longspan.which_kernel(q, k, v, softcap=case.softcap)
    assert not wrong, "\n".join([kernel, *wrong])


def test_flash_runs_where_it_can() -> None:
    def which(dtype: torch.dtype, dim: int = 64, value_dim: int = 64, **options: Any) -> str:
        q = torch.zeros(1, 2, 32, dim, dtype=dtype, device="cuda")
        v = torch.zeros(1, 2, 32, value_dim, dtype=dtype, device="cuda")
        return longspan.which_kernel(q, q, v, **options)

    assert which(torch.bfloat16) == "flash"
    assert which(torch.float16, 256, 256) == "flash"
    no = "blocked, not flash: "
    assert which(torch.float32) == no + "it has no float32 and no float64"
    assert which(torch.bfloat16, 192, 128) == no + "keys have 192 channels but values 128"
    assert which(torch.bfloat16, 12, 12) == no + "12 channels; it has multiples of 8 up to 256"
    assert which(torch.bfloat16, softcap=3.0) == no + "it has no softcap"


RUNS = [
    ("large_causal", torch.bfloat16),
    ("many_documents", torch.bfloat16),
    ("large_sink", torch.float16),
    ("documents", torch.float32),
    ("torn_documents", torch.float64),
]


def case_named(name: str) -> Case:
    return next(case for case in [*CASES, *LARGE] if case.name == name)


def rank_main(rank: int, ranks: int, folder: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    group = Group.from_environment()
    answers = []
    for name, dtype in RUNS:
        case = case_named(name)
        packing = case.fitted(2 * ranks)
        inputs = on_cuda(Inputs.of(case, packing, dtype))
        for owners in ownerships(packing, ranks).values():
            for strategy in test_attend.strategies(ranks):
                answers.append(tuple(attend_on_cuda(group, inputs, owners, strategy)))
    torch.save(answers, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_share_a_device_give_the_one_rank_answer(ranks: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (ranks, folder), nprocs=ranks)
        parts = [torch.load(pathlib.Path(folder) / f"{rank}.pt") for rank in range(ranks)]
    wrong = []
    i = 0
    for name, dtype in RUNS:
        case = case_named(name)
        packing = case.fitted(2 * ranks)
        inputs = Inputs.of(case, packing, dtype)
        truth, plain = inputs.answer(torch.float64), plain_answers(inputs, dtype)
        floor = 1e-12 if dtype == torch.float64 else torch.finfo(torch.float32).eps
        for owned, owners in ownerships(packing, ranks).items():
            for strategy in test_attend.strategies(ranks):
                got = joined([Answer(*part[i]) for part in parts], owners)
                i += 1
                for complaint in complaints(got, truth, plain, floor):
                    wrong.append(f"{name} {strategy} over {owned}: {complaint}")
    assert not wrong, "\n".join(wrong)


def test_merging_on_the_device_equals_merging_by_operators() -> None:
    random = torch.Generator().manual_seed(3)
    out = torch.randn(2, 3, 5, 4, 7, generator=random)
    lse = torch.randn(2, 3, 5, 4, generator=random) * 5
    lse[0, 0, :2] = float("-inf")
    lse[1, 0, 1:3] = float("-inf")
    out[lse == float("-inf")] = 0
    expected = longspan.merge(out[0], lse[0], out[1], lse[1])
    got = longspan.merge(*(t.cuda() for t in (out[0], lse[0], out[1], lse[1])))
    for x, t in zip(got, expected, strict=True):
        torch.testing.assert_close(x.cpu(), t)


def test_attending_on_the_device_reads_nothing_back() -> None:
    q = torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layout = longspan.attention_layout(Ownership.contiguous(256, 1))
    longspan.attend(q, q, q, layout=layout).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        longspan.attend(q, q, q, layout=layout).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
