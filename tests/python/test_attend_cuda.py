"""The same promises on CUDA: one rank on the device, and ranks that share it. bfloat16
goes through our own kernel and through those of torch that ran before it."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import test_attend
import torch
import torch.multiprocessing
from layouts import ownerships
from oracle.dense_attention import Answer, dense_attention, dense_by_formula, visible_pairs
from test_attend import CASES, Case, Inputs, attend_on, complaints, joined, one

import longspan
from longspan import Group, Mask, Ownership, Packing

pytestmark = pytest.mark.cuda

#: Which kernel is asked first; those after it take what it cannot.
FIRST_KERNEL = "LONGSPAN_CUDA_KERNEL"

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
    Case("large_softcap", Packing.of([140, 90]), softcap=3.0, magnitude=4.0, heads=4, key_heads=2,
         dim=256, value_dim=256),
    Case("large_prefix", Packing.of([210, 60]), one(lambda p: Mask.causal(p).with_prefix([140, 9])),
         heads=2, key_heads=2, dim=64, value_dim=64),
]  # fmt: skip

#: Types, and for those of 16 bits the kernels that are asked first.
WAYS = [
    *(pytest.param(dtype, "", id=str(dtype).removeprefix("torch."))
      for dtype in (torch.float64, torch.float32)),
    *(pytest.param(dtype, first, id=f"{str(dtype).removeprefix('torch.')}-{first}")
      for dtype in (torch.float16, torch.bfloat16) for first in ("hopper", "cudnn", "blocked")),
]  # fmt: skip


@pytest.fixture(params=["hopper", "cudnn"])
def first_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Ours, and the old path."""
    monkeypatch.setenv(FIRST_KERNEL, request.param)
    return str(request.param)


@pytest.fixture
def our_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where cuDNN would be chosen."""
    monkeypatch.setenv(FIRST_KERNEL, "hopper")


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def old_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FIRST_KERNEL, "cudnn")


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


def plain_answers(
    inputs: Inputs, dtype: torch.dtype, answer: Callable[..., Answer] = Inputs.answer
) -> list[Answer]:
    return [
        answer(inputs, dtype),
        *(
            answer(inputs, dtype, functools.partial(dense_by_formula, seed=seed))
            for seed in range(3)
        ),
    ]


@pytest.mark.parametrize(("dtype", "first"), WAYS)
@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=lambda case: case.name)
def test_one_rank_gives_the_oracles_answer(
    case: Case, dtype: torch.dtype, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FIRST_KERNEL, first)
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
    kernel = longspan.which_kernel(q, k, v, mask=inputs.masks, softcap=case.softcap)
    assert not wrong, "\n".join([kernel, *wrong])


HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not HOPPER, reason="only Hopper has ours, and uses cuDNN")


def which(
    dtype: torch.dtype, dim: int = 64, value_dim: int = 64, tokens: int = 32, **options: Any
) -> str:
    q = torch.zeros(1, 2, tokens, dim, dtype=dtype, device="cuda")
    v = torch.zeros(1, 2, tokens, value_dim, dtype=dtype, device="cuda")
    return longspan.which_kernel(q, q, v, **options)


@needs_hopper
def test_our_kernel_runs_where_it_can() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for dims in ((64, 64), (8, 8), (72, 40), (96, 96), (192, 128), (512, 512)):
            assert which(dtype, *dims) == "hopper"
    documents = Mask.causal(Packing.of([5, 1, 26]))
    for mask in (documents, Mask.sliding(Packing.single(32), 3), documents.with_hidden([(2, 3)])):
        assert which(torch.bfloat16, mask=mask) == "hopper"
    assert which(torch.bfloat16, softcap=3.0) == "hopper"
    for dtype in (torch.float32, torch.float64):
        assert "hopper" not in which(dtype).split(",")[0]
    assert "hopper" not in which(torch.bfloat16, 12, 12).split(",")[0]


def test_the_environment_says_which_kernel_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = "LONGSPAN_CUDA_KERNEL asks for "
    monkeypatch.setenv(FIRST_KERNEL, "flash")
    assert which(torch.bfloat16, tokens=1024) == f"flash, not cudnn: {asked}flash"
    assert which(torch.bfloat16, softcap=3.0) == "blocked, not flash: it has no softcap"
    monkeypatch.setenv(FIRST_KERNEL, "blocked")
    assert which(torch.bfloat16) == f"blocked, not flash: {asked}blocked"
    monkeypatch.setenv(FIRST_KERNEL, "hopper")
    assert not HOPPER or which(torch.bfloat16, tokens=2048) == "hopper"  # though cuDNN could
    assert which(torch.float32) == "blocked, not flash: it has no float32 and no float64"
    monkeypatch.setenv(FIRST_KERNEL, "best")
    with pytest.raises(ValueError, match="LONGSPAN_CUDA_KERNEL is best; expected hopper, cudnn"):
        which(torch.bfloat16)


@pytest.mark.usefixtures("old_path")
def test_flash_runs_where_it_can() -> None:
    assert which(torch.bfloat16).startswith("flash, not cudnn: ")
    assert which(torch.float16, 256, 256).startswith("flash, not cudnn: ")
    no = "blocked, not flash: "
    assert which(torch.float32) == no + "it has no float32 and no float64"
    assert which(torch.bfloat16, 192, 128) == no + "keys have 192 channels but values 128"
    assert which(torch.bfloat16, 12, 12) == no + "12 channels; it has multiples of 8 up to 256"
    assert which(torch.bfloat16, softcap=3.0) == no + "it has no softcap"


@needs_hopper
@pytest.mark.usefixtures("old_path")
def test_cudnn_runs_where_it_can() -> None:
    long = functools.partial(which, torch.bfloat16, tokens=2048)
    stream = Packing.single(2048)
    assert long() == "cudnn"
    assert long(mask=Mask.full(stream)) == "cudnn"
    assert long(192, 128) == "cudnn"
    assert which(torch.float16, 128, 128, 1024) == "cudnn"
    no = "flash, not cudnn: "
    assert long(mask=Mask.sliding(stream, 100)) == no + "it takes no windows"
    assert which(torch.bfloat16, tokens=2000) == (
        no + "2000 queries and 2000 keys; it is used for multiples of 128 from 1024 on"
    )
    assert long(256, 256) == "cudnn"
    assert long(160, 160) == (
        no + "160 and 160 channels; it has multiples of 8 up to 128, 256, and 192 with 128"
    )
    assert long(mask=Mask.causal(Packing.of([1024, 700, 324]))) == (
        "cudnn, and flash for 2 of 3 parts: "
        "700 queries and 700 keys; it is used for multiples of 128 from 1024 on"
    )
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        assert long() == no + "it is off in torch.backends.cuda"
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    torch.use_deterministic_algorithms(True)
    try:
        assert long() == no + "its gradients are not deterministic"
    finally:
        torch.use_deterministic_algorithms(False)


CUDNN = [
    Case("cudnn_causal", Packing.single(4096), heads=4, key_heads=1, dim=128, value_dim=128),
    Case("cudnn_full", Packing.single(2048), one(Mask.full), rows=2, heads=4, key_heads=4,
         dim=64, value_dim=64),
    Case("cudnn_packed", Packing.single(4096), heads=4, key_heads=2, dim=128, value_dim=128,
         sink="usual", packed=True),
    Case("cudnn_rows", Packing.single(2048), lambda p: [Mask.causal(p), Mask.full(p)], rows=2,
         heads=2, key_heads=2, dim=96, value_dim=96),
    Case("cudnn_different_dims", Packing.single(2048), heads=4, key_heads=2, dim=192,
         value_dim=128),
    Case("cudnn_and_flash", Packing.of([1280, 300, 1024], [1280, 768, 1024]), heads=4,
         key_heads=2, dim=128, value_dim=128),
]  # fmt: skip


def answer_on_cuda(
    inputs: Inputs, dtype: torch.dtype, how: Callable[..., Answer] = dense_attention
) -> Answer:
    """The oracle where it is fast; its answer is brought back."""
    there = on_cuda(inputs)
    visible = visible_pairs(inputs.masks, inputs.case.rows).cuda()
    answer = how(
        there.q, there.k, there.v, there.dout, visible,
        scale=there.scale, softcap=there.case.softcap, sink=there.sink, dtype=dtype,
    )  # fmt: skip
    return Answer(*(None if part is None else part.cpu() for part in answer))


@needs_hopper
@pytest.mark.parametrize(
    ("dtype", "first"),
    [
        *(
            pytest.param(torch.float16, first, id=f"float16-{first}")
            for first in ("hopper", "cudnn")
        ),
        *(
            pytest.param(torch.bfloat16, first, id=f"bfloat16-{first}")
            for first in ("hopper", "cudnn", "flash")
        ),
    ],
)
@pytest.mark.parametrize("case", CUDNN, ids=lambda case: case.name)
def test_long_streams_give_the_oracles_answer(
    case: Case, dtype: torch.dtype, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FIRST_KERNEL, first)
    inputs = Inputs.of(case, case.packing, dtype)
    q, k, v = (t.cuda() for t in (inputs.q, inputs.k, inputs.v))
    kernel = longspan.which_kernel(q, k, v, mask=inputs.masks)
    if first == "cudnn" and case.name == "cudnn_and_flash":
        assert kernel.startswith("cudnn, and flash")
    elif case.dim == case.value_dim or first != "flash":
        assert kernel.split(",")[0] == first
    owners = Ownership.contiguous(case.packing.tokens, 1)
    got = attend_on_cuda(Group(), on_cuda(inputs), owners, ("ring", 0))
    truth = answer_on_cuda(inputs, torch.float64)
    plain = plain_answers(inputs, dtype, answer_on_cuda)
    wrong = complaints(got, truth, plain, torch.finfo(torch.float32).eps)
    assert not wrong, "\n".join([kernel, *wrong])


@needs_hopper
@pytest.mark.usefixtures("first_kernel")
def test_tensors_may_lie_in_memory_in_any_way() -> None:
    """cuDNN's plans are kept by the strides of q, k and v: those of others must not
    matter. One plan after another, in one thread."""
    torch.manual_seed(0)
    tokens, heads, dim = 1024, 4, 64
    base = [torch.randn(1, heads, tokens, dim, device="cuda").bfloat16() for _ in range(4)]

    def tokens_first(t: torch.Tensor) -> torch.Tensor:
        return t.transpose(1, 2).contiguous().transpose(1, 2)

    def inside(t: torch.Tensor) -> torch.Tensor:
        return torch.cat([t, t, t], 3)[..., dim : 2 * dim]

    def shifted(t: torch.Tensor) -> torch.Tensor:
        return torch.cat([t.new_zeros(3), t.flatten()])[3:].view(t.shape)

    def run(ways: list[Callable[[torch.Tensor], torch.Tensor]]) -> list[torch.Tensor]:
        q, k, v, dout = (way(t) for way, t in zip(ways, base, strict=True))
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = longspan.attend(*leaves)
        assert isinstance(out, torch.Tensor)
        out.backward(dout)
        return [out.detach(), *(t.grad for t in leaves if t.grad is not None)]

    def plain(t: torch.Tensor) -> torch.Tensor:
        return t

    expected = run([plain] * 4)
    for ways in (
        [tokens_first] * 4, [plain, plain, plain, tokens_first],
        [tokens_first, tokens_first, tokens_first, plain], [inside] * 4, [shifted] * 4,
        [plain, inside, tokens_first, shifted], [plain] * 4,
    ):  # fmt: skip
        for got, truth in zip(run(ways), expected, strict=True):
            apart = (got.float() - truth.float()).norm() / truth.float().norm()
            assert apart < 5e-3, [way.__name__ for way in ways]


RUNS = [
    ("large_causal", torch.bfloat16),
    ("many_documents", torch.bfloat16),
    ("large_window", torch.bfloat16),
    ("large_torn", torch.bfloat16),
    ("large_sink", torch.float16),
    ("documents", torch.float32),
    ("torn_documents", torch.float64),
]


def case_named(name: str) -> Case:
    return next(case for case in [*CASES, *LARGE, *CUDNN] if case.name == name)


LONG_RUNS = [("cudnn_causal", torch.bfloat16), ("cudnn_packed", torch.float16)]


def plans(packing: Packing, ranks: int, long: bool) -> list[tuple[str, Ownership, tuple[str, int]]]:
    owned = ownerships(packing, ranks)
    return [
        (name, owners, strategy)
        for name, owners in owned.items()
        for strategy in test_attend.strategies(ranks)
        if not long or name in ("contiguous", "head-tail")
    ]


def rank_main(rank: int, ranks: int, folder: str, long: bool) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    group = Group.from_environment()
    answers = []
    for name, dtype in LONG_RUNS if long else RUNS:
        case = case_named(name)
        packing = case.fitted(2 * ranks)
        inputs = on_cuda(Inputs.of(case, packing, dtype))
        for _, owners, strategy in plans(packing, ranks, long):
            answers.append(tuple(attend_on_cuda(group, inputs, owners, strategy)))
    torch.save(answers, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("ranks", "long", "first"),
    [
        *((ranks, False, first) for ranks in (2, 3) for first in ("hopper", "cudnn")),
        *(pytest.param(2, True, first, marks=needs_hopper) for first in ("hopper", "cudnn")),
        pytest.param(4, False, "hopper", marks=needs_hopper),
        pytest.param(7, False, "hopper", marks=[needs_hopper, pytest.mark.slow]),
    ],
)
def test_ranks_that_share_a_device_give_the_one_rank_answer(
    ranks: int, long: bool, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FIRST_KERNEL, first)  # ranks inherit it
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (ranks, folder, long), nprocs=ranks)
        parts = [torch.load(pathlib.Path(folder) / f"{rank}.pt") for rank in range(ranks)]
    wrong = []
    i = 0
    for name, dtype in LONG_RUNS if long else RUNS:
        case = case_named(name)
        packing = case.fitted(2 * ranks)
        inputs = Inputs.of(case, packing, dtype)
        answer = answer_on_cuda if long else Inputs.answer
        truth = answer(inputs, torch.float64)
        plain = plain_answers(inputs, dtype, answer)
        floor = 1e-12 if dtype == torch.float64 else torch.finfo(torch.float32).eps
        for owned, owners, strategy in plans(packing, ranks, long):
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
    expected = longspan.testing.merge(out[0], lse[0], out[1], lse[1])
    got = longspan.testing.merge(*(t.cuda() for t in (out[0], lse[0], out[1], lse[1])))
    for x, t in zip(got, expected, strict=True):
        torch.testing.assert_close(x.cpu(), t)


@pytest.mark.usefixtures("first_kernel")
@pytest.mark.parametrize("tokens", [256, 1024])
def test_attending_on_the_device_reads_nothing_back(tokens: int) -> None:
    q = torch.randn(2, 4, tokens, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layout = longspan.AttentionLayout(Ownership.contiguous(tokens, 1))
    longspan.attend(q, q, q, attention=layout).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        longspan.attend(q, q, q, attention=layout).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
