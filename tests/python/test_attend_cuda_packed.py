"""Dense attention on CUDA where packed training lives: documents of all lengths, windows,
channels, and bits that stay the same. In bfloat16, through our own kernel and through
those of torch where both can."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import test_attend_cuda
import torch
from oracle.dense_attention import Answer, dense_attention, dense_by_formula, visible_pairs
from test_attend import Case, Inputs, complaints, one
from test_attend_cuda import answer_on_cuda, attend_on_cuda, needs_hopper, on_cuda, plain_answers

import longspan
from longspan import AttentionLayout, Group, Mask, Ownership, Packing

pytestmark = pytest.mark.cuda
# Its fixtures.
first_kernel = test_attend_cuda.first_kernel
our_kernel = test_attend_cuda.our_kernel
deterministic = test_attend_cuda.deterministic

EPSILON = torch.finfo(torch.float32).eps


def normal(*sizes: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*sizes, generator=random, device="cuda").bfloat16()


def drawn(
    tokens: int, heads: int = 2, key_heads: int = 1, dim: int = 64, value_dim: int = 64
) -> list[torch.Tensor]:
    """q, k, v and dout, [1, heads, tokens, channels]."""
    sizes = ((heads, dim), (key_heads, dim), (key_heads, value_dim), (heads, value_dim))
    return [normal(1, h, tokens, d, seed=i) for i, (h, d) in enumerate(sizes)]


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        out, lse = longspan.attend(q, k, v, mask=mask, return_lse=True)
    return out, lse


def both_directions(tensors: Sequence[torch.Tensor], mask: Mask) -> Answer:
    leaves = [t.detach().requires_grad_() for t in tensors[:3]]
    out, lse = longspan.attend(*leaves, mask=mask, return_lse=True)
    out.backward(tensors[3])
    dq, dk, dv = (t.grad for t in leaves)
    assert dq is not None and dk is not None and dv is not None
    return Answer(out.detach(), lse, dq, dk, dv, None)


def answer_by_document(
    tensors: Sequence[torch.Tensor],
    lengths: Sequence[int],
    dtype: torch.dtype,
    how: Callable[..., Answer] = dense_attention,
) -> Answer:
    """The oracle of causal documents: those of one length at a time, as rows."""
    length_of = torch.tensor(lengths, device="cuda")
    first_of = length_of.cumsum(0) - length_of
    whole: list[torch.Tensor] | None = None
    for length in sorted(set(lengths)):
        own = first_of[length_of == length].unsqueeze(1)
        tokens = own + torch.arange(length, device="cuda")  # [documents, length]
        rows = [t[0][:, tokens].transpose(0, 1) for t in tensors]
        visible = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()
        found = how(*rows, visible[None, None], scale=tensors[0].shape[3] ** -0.5, dtype=dtype)
        if whole is None:
            whole = [
                torch.empty(1, part.shape[1], sum(lengths), *part.shape[3:], dtype=part.dtype,
                            device="cuda")
                for part in found[:5] if part is not None
            ]  # fmt: skip
        for all_of_it, part in zip(whole, found, strict=False):
            assert part is not None
            all_of_it[0][:, tokens] = part.transpose(0, 1)
    assert whole is not None
    return Answer(*whole, None)


def check_documents(lengths: Sequence[int], **sizes: int) -> None:
    tensors = drawn(sum(lengths), **sizes)
    mask = Mask.causal(Packing.of(list(lengths)))
    got = both_directions(tensors, mask)
    truth = answer_by_document(tensors, lengths, torch.float64)
    plain = [
        answer_by_document(tensors, lengths, torch.bfloat16, how)
        for how in (dense_attention, functools.partial(dense_by_formula, seed=0))
    ]
    wrong = complaints(got, truth, plain, EPSILON)
    assert not wrong, "\n".join(wrong)
    if longspan.which_kernel(*tensors[:3], mask=mask) == "hopper":
        assert (got.lse - truth.lse).norm() <= 1e-6 * truth.lse.norm()


# ---- Documents.


@pytest.mark.usefixtures("first_kernel")
def test_documents_of_every_length_up_to_300() -> None:
    check_documents(range(1, 301))


@needs_hopper
@pytest.mark.usefixtures("our_kernel")
@pytest.mark.parametrize(("dim", "value_dim"), [(128, 128), (192, 128), (256, 256), (512, 512)])
def test_documents_of_every_third_length_and_all_channels(dim: int, value_dim: int) -> None:
    order = torch.randperm(100, generator=torch.Generator().manual_seed(1))
    lengths = [1 + 3 * i for i in order.tolist()]
    check_documents(lengths, heads=3, key_heads=3, dim=dim, value_dim=value_dim)


@pytest.mark.usefixtures("first_kernel")
def test_ten_thousand_documents() -> None:
    random = torch.Generator().manual_seed(2)
    check_documents(torch.randint(1, 25, (10_000,), generator=random).tolist())


# ---- Windows, channels, holes.


def window_of(width: int) -> Callable[[Packing], list[Mask]]:
    return one(lambda packing: Mask.sliding(packing, width))


def holes(packing: Packing) -> list[Mask]:
    """Inside of a document, across the ends of blocks, and whole blocks of them."""
    hidden = [(0, 3), (50, 51), (120, 140), (200, 201), (256, 400), (511, 513)]
    return [Mask.causal(packing).with_hidden(hidden)]


def case_of(
    name: str,
    lengths: list[int],
    masks: Callable[[Packing], list[Mask]],
    dims: tuple[int, int] = (64, 64),
    rows: int = 1,
    softcap: float = 0.0,
) -> Case:
    return Case(name, Packing.of(lengths), masks, rows=rows, softcap=softcap,
                dim=dims[0], value_dim=dims[1])  # fmt: skip


HARD = [
    *(case_of(f"window_{w}", [301, 77, 213], window_of(w)) for w in (1, 2, 127, 128, 129)),
    *(case_of(f"dims_{d}_{e}", [131, 190], one(Mask.causal), (d, e))
      for d, e in ((96, 96), (72, 40), (40, 72), (8, 8), (128, 128), (192, 128), (256, 256),
                   (328, 264), (512, 512))),
    case_of("odd_tokens", [1021], one(Mask.causal), (128, 128)),
    case_of("odd_rows", [467], one(Mask.full), rows=3),
    case_of("holes", [600, 90], holes),
    case_of("holes_256", [600, 90], holes, (256, 256)),
    case_of("holes_in_full", [600], lambda p: [Mask.full(p).with_hidden([(3, 9), (250, 390)])]),
    case_of("holes_512", [600, 90], holes, (512, 512)),
    case_of("window_and_softcap", [333, 180], window_of(100), (256, 256), softcap=2.0),
    case_of("window_and_softcap_512", [333, 180], window_of(100), (512, 512), softcap=2.0),
]  # fmt: skip


@pytest.mark.usefixtures("first_kernel")
@pytest.mark.parametrize("case", HARD, ids=lambda case: case.name)
def test_hard_cases_give_the_oracles_answer(case: Case) -> None:
    inputs = Inputs.of(case, case.packing, torch.bfloat16)
    owners = Ownership.contiguous(case.packing.tokens, 1)
    got = attend_on_cuda(Group(), on_cuda(inputs), owners, ("ring", 0))
    truth = answer_on_cuda(inputs, torch.float64)
    plain = plain_answers(inputs, torch.bfloat16, answer_on_cuda)
    wrong = complaints(got, truth, plain, EPSILON)
    q, k, v = (t.cuda() for t in (inputs.q, inputs.k, inputs.v))
    kernel = longspan.which_kernel(q, k, v, mask=inputs.masks, softcap=case.softcap)
    assert not wrong, "\n".join([kernel, *wrong])


@needs_hopper
@pytest.mark.usefixtures("our_kernel")
def test_offsets_past_two_to_the_31() -> None:
    length, documents, heads, dim = 1032, 128, 128, 128
    tokens = length * documents
    assert tokens * heads * dim > 2**31
    q, k, v, dout = drawn(tokens, heads, 1, dim, dim)
    mask = Mask.causal(Packing.rows(documents, length))
    got = both_directions([q, k, v, dout], mask)
    visible = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()[None, None]
    for document, head in itertools.product((0, documents - 1), (0, heads - 1)):
        part = slice(document * length, (document + 1) * length)
        some = [t[:, h : h + 1, part] for t, h in ((q, head), (k, 0), (v, 0), (dout, head))]
        truth = dense_attention(*some, visible, scale=dim**-0.5)
        for name, x, t in (("out", got.out, truth.out), ("dq", got.dq, truth.dq)):
            found = x[:, head : head + 1, part].double()
            off = (found - t).norm() / t.norm()
            assert off < 1e-2, f"{name} of document {document}, head {head}: {off:.1e}"


# ---- NaN and infinity.


@needs_hopper
@pytest.mark.usefixtures("our_kernel")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("dim", "value_dim"), [(64, 64), (128, 128), (192, 128), (256, 256), (512, 512)]
)
@pytest.mark.parametrize("window", [None, 40])
def test_values_that_are_not_finite_reach_who_sees_them_and_nobody_elses_bits(
    window: int | None, dim: int, value_dim: int, dtype: torch.dtype
) -> None:
    packing = Packing.of([700, 70, 1, 130])  # the first is for wide blocks, without a window
    mask = Mask.causal(packing) if window is None else Mask.sliding(packing, window)
    tensors = drawn(packing.tokens, 8, 2, dim, value_dim)[:3]
    q, k, v = (t.to(dtype) for t in tensors)
    seen = torch.zeros(mask.queries, mask.keys, dtype=torch.bool)
    for query in range(mask.queries):
        for keys in mask.key_ranges_of(query):
            seen[query, keys.begin : keys.end] = True
    out, lse = forward(q, k, v, mask)
    for token in (137, 699, 700, 769, 771, 800):
        for value in (math.nan, math.inf, -math.inf):
            spoiled = v.clone()
            spoiled[0, 1, token, value_dim - 3] = value
            expected = out.clone()
            expected[0, 4:, :, value_dim - 3].masked_fill_(seen[:, token].cuda(), value)
            got, got_lse = forward(q, k, spoiled, mask)
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(got_lse, lse)


# ---- Bits.


@needs_hopper
@pytest.mark.usefixtures("our_kernel")
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
def test_a_hundred_repeats_have_the_same_bits(dim: int) -> None:
    lengths = [700, 3, 40, 129, 1, 1, 300, 64]
    mask = Mask.causal(Packing.of(lengths))
    tensors = drawn(sum(lengths), 8, 2, dim, dim)[:3]
    out, lse = forward(*tensors, mask)
    for _ in range(100):
        again = forward(*tensors, mask)
        assert torch.equal(again[0], out) and torch.equal(again[1], lse)


@needs_hopper
@pytest.mark.usefixtures("our_kernel", "deterministic")
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
def test_a_hundred_derivatives_have_the_same_bits(dim: int) -> None:
    lengths = [700, 3, 40, 129, 1, 1, 300, 64]
    mask = Mask.causal(Packing.of(lengths))
    tensors = drawn(sum(lengths), 8, 2, dim, dim)
    first = both_directions(tensors, mask)
    for _ in range(100):
        again = both_directions(tensors, mask)
        for name, x, t in zip(Answer._fields[:5], again, first, strict=False):
            assert x is not None and t is not None and torch.equal(x, t), name


def whole_mask(kind: str, lengths: Sequence[int], prefix: dict[int, int]) -> Mask:
    packing = Packing.of(list(lengths))
    if kind == "prefix":
        return Mask.causal(packing).with_prefix([prefix.get(i, 0) for i in range(len(lengths))])
    return Mask.sliding(packing, 100) if kind == "window" else Mask.causal(packing)


@needs_hopper
@pytest.mark.usefixtures("our_kernel", "deterministic")
@pytest.mark.parametrize(
    "fields", [("out", "lse"), ("dq", "dk", "dv")], ids=["forward", "backward"]
)
@pytest.mark.parametrize("kind", ["causal", "window", "prefix"])
@pytest.mark.parametrize("seed", range(4))
def test_a_document_has_the_same_bits_whatever_is_packed_around_it(
    fields: tuple[str, ...], kind: str, seed: int
) -> None:
    """From 128 tokens on; shorter ones share blocks of queries."""
    random = torch.Generator().manual_seed(seed)

    def number(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=random))

    long = [128, 129, number(128, 400), number(400, 900)]
    parts = [drawn(length, 4, 2, 128, 128) for length in long]
    alone = [
        both_directions(part, whole_mask(kind, [length], {0: length // 2}))
        for length, part in zip(long, parts, strict=True)
    ]
    # The same documents in another order, among others.
    lengths: list[int] = []
    pieces: list[list[torch.Tensor]] = []
    places: dict[int, int] = {}
    for i in torch.randperm(len(long), generator=random).tolist():
        for _ in range(number(0, 4)):
            lengths.append(number(1, 200))
            pieces.append(drawn(lengths[-1], 4, 2, 128, 128))
        places[i] = len(lengths)
        lengths.append(long[i])
        pieces.append(parts[i])
    stream = [torch.cat(column, 2) for column in zip(*pieces, strict=True)]
    prefix = {place: long[i] // 2 for i, place in places.items()}
    among = both_directions(stream, whole_mask(kind, lengths, prefix))
    for i, place in places.items():
        begin = sum(lengths[:place])
        own = slice(begin, begin + long[i])
        for name in fields:
            found, wanted = getattr(among, name)[:, :, own], getattr(alone[i], name)
            assert torch.equal(found, wanted), f"{name} of {long[i]} tokens in {lengths}"


# ---- NaNs and infinities.


@needs_hopper
@pytest.mark.usefixtures("our_kernel")
@pytest.mark.parametrize("fixed_order", [False, True], ids=["any_order", "fixed_order"])
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
@pytest.mark.parametrize("where", ["q", "k", "v", "dout"])
def test_spoiled_elements_reach_derivatives_of_who_sees_them(
    where: str, dim: int, fixed_order: bool, request: pytest.FixtureRequest
) -> None:
    if fixed_order:
        request.getfixturevalue("deterministic")
    lengths = [150, 30, 100]
    mask = Mask.sliding(Packing.of(lengths), 40)
    visible = visible_pairs([mask], 1)[0, 0].cuda()
    tensors = drawn(sum(lengths), 1, 1, dim, dim)
    clean = both_directions(tensors, mask)
    for token, value in itertools.product((149, 160, 200), (math.nan, math.inf)):
        spoiled = [t.clone() for t in tensors]
        spoiled[("q", "k", "v", "dout").index(where)][0, 0, token, 7] = value
        got = both_directions(spoiled, mask)
        here = torch.arange(sum(lengths), device="cuda") == token
        queries = here if where in ("q", "dout") else visible[:, token]
        keys = visible[queries].any(0)
        for name, reached in (("dq", queries), ("dk", keys), ("dv", keys)):
            found, wanted = (getattr(a, name)[0, 0][~reached] for a in (got, clean))
            # Beside spoiled keys some of dq is summed another way.
            if fixed_order and (name, where) != ("dq", "k"):
                assert torch.equal(found, wanted), f"{name} of others, {value} at {token}"
            else:
                torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
        if math.isnan(value):
            assert not got.dq[0, 0][queries].isfinite().any()


# ---- Graphs and streams.


@needs_hopper
@pytest.mark.usefixtures("our_kernel")
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "both"])
def test_a_graph_captures_packed_documents(backward: bool) -> None:
    lengths = [300, 5, 1, 700, 18]
    tokens = sum(lengths)
    layout = AttentionLayout(Ownership.contiguous(tokens, 1), Mask.causal(Packing.of(lengths)))
    *inputs, dout = drawn(tokens, 4, 2, 128, 128)
    leaves = [t.requires_grad_(backward) for t in inputs]

    def layer() -> list[torch.Tensor]:
        out = longspan.attend(*leaves, attention=layout)
        assert isinstance(out, torch.Tensor)
        if not backward:
            return [out]
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            layer()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer()
    for seed in (5, 6):
        with torch.no_grad():
            for i, leaf in enumerate(leaves):
                leaf.copy_(normal(*leaf.shape, seed=seed + 10 * i))
        graph.replay()
        torch.cuda.synchronize()
        expected = layer()
        assert torch.equal(captured[0], expected[0])
        for x, t in zip(captured[1:], expected[1:], strict=True):  # added in any order
            torch.testing.assert_close(x, t, rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("first_kernel")
def test_attention_runs_on_the_stream_of_its_caller() -> None:
    lengths = [300, 5, 1, 700, 18]
    mask = Mask.causal(Packing.of(lengths))
    q, k, v, _ = drawn(sum(lengths), 4, 2, 128, 128)
    expected = forward(q, k, v, mask)
    late = [torch.zeros_like(t) for t in (q, k, v)]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # tens of milliseconds
        for to, t in zip(late, (q, k, v), strict=True):
            to.copy_(t)
        out, lse = forward(*late, mask)
    stream.synchronize()
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
