"""Contexts over real ranks: shards in place, attention over the ranks, clean ends."""

import contextlib
import copy
import math
import threading

import batch_oracle as oracle
import pytest
import torch
import torch.nn.functional as F
from compat_support import (
    Mesh,
    RankDeviceMesh,
    RankMesh,
    cp_utils,
    example,
    row_batch,
)
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import longspan
from longspan import run_ranks
from longspan.compat.nemo import strict

llama = example("eagle3_target")
create = cp_utils.create_context_parallel_ctx
make = cp_utils.make_cp_batch_and_ctx
sdpa = F.scaled_dot_product_attention
RANKS = [2, 3, 4]


def plain_stack() -> bool:
    return torch._C._len_torch_function_stack() == 0


def dense(q, k, v, visible, scale=None):
    """Attention by the formula; a query without keys gets 0."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1).nan_to_num(0.0)
    return weights @ v


def visible_of(pads, causal=True):
    tokens = pads.shape[1]
    seen = torch.ones(tokens, tokens, dtype=torch.bool)
    seen = seen.tril() if causal else seen
    return (seen & ~pads[:, None] & ~pads[:, :, None])[:, None]


# Buffers.


@pytest.mark.parametrize("ranks", RANKS)
def test_buffers_become_shards_in_place_and_come_back(ranks):
    tokens = 4 * ranks

    def work(group):
        ids = torch.arange(2 * tokens).view(2, tokens)
        planes = torch.arange(3 * tokens).view(3, 1, tokens)
        full_ids, full_planes = ids.clone(), planes.clone()
        alias, view = ids, ids[:, 1:]
        before_view = view.clone()
        mine = oracle.head_tail(tokens, ranks, group.rank())
        with create(RankMesh(group), [ids, planes], [1, 2], {ids}) as entered:
            assert entered is None
            assert torch.equal(alias, full_ids[:, mine])
            assert torch.equal(planes, full_planes[..., mine])
            assert ids.is_contiguous()
            planes += 100  # what the body does to a shard is not kept
        assert torch.equal(ids, full_ids[:, mine])
        assert torch.equal(planes, full_planes)
        assert torch.equal(view, before_view)

    run_ranks(ranks, work)


def test_shifted_views_of_one_tensor_do_not_spoil_each_other():
    def work(group):
        tokens = torch.arange(9)[None]
        ids, labels = tokens[:, :-1], tokens[:, 1:]
        with create(RankMesh(group), [ids, labels], [1, 1], {ids, labels}):
            assert torch.equal(labels, ids + 1)
        assert torch.equal(tokens, torch.arange(9)[None])

    run_ranks(2, work)


def test_one_object_may_be_several_buffers():
    def work(group):
        ids, square = torch.arange(8)[None], torch.ones(8, 8)
        factory, batch = make(RankDeviceMesh(group), {"input_ids": ids, "labels": ids})
        with factory():
            assert batch["labels"] is batch["input_ids"]
            assert ids.tolist() == [oracle.head_tail(8, 2, group.rank())]
        context = create(RankMesh(group), [square, square], [1, 0], set())
        with pytest.raises(ValueError, match=r"buffer 1 is buffer 0 again, with axis 0"):
            context.__enter__()
        assert square.shape == (8, 8)

    run_ranks(2, work)


def test_contexts_of_one_rank_do_nothing_and_may_be_entered_again():
    ids = torch.arange(3)[None]
    context = create(Mesh(1), [ids], [1], {ids})
    for _ in range(2):
        with context:
            assert ids.shape == (1, 3)
            assert plain_stack()


def test_an_error_inside_restores_what_is_to_be_restored():
    def work(group):
        ids, positions = torch.arange(8)[None], torch.arange(8)[None]
        context = create(RankMesh(group), [ids, positions], [1, 1], {ids})
        with pytest.raises(RuntimeError, match=r"^mine$"), context:
            raise RuntimeError("mine")
        assert plain_stack()
        assert positions.tolist() == [list(range(8))]
        assert ids.shape == (1, 4)

    run_ranks(2, work)


def test_an_error_of_one_rank_inside_reaches_the_others_and_all_go_on():
    def work(group):
        said = []
        for step in range(3):
            ids = torch.arange(8)[None]
            x = torch.ones(1, 2, 4, 8)
            try:
                with create(RankMesh(group), [ids], [1], set()):
                    if step == 1 and group.rank() == 1:
                        raise KeyError("column")
                    sdpa(x, x, x, is_causal=True)
                said.append("")
            except (KeyError, ValueError) as error:
                said.append(f"{type(error).__name__}: {error}")
        return said

    heard, raised = run_ranks(2, work, timeout=60)
    assert raised == ["", "KeyError: 'column'", ""]
    assert heard[0] == heard[2] == ""
    assert "another rank raised: rank 1: KeyError: 'column'" in heard[1]


REFUSED_ON_ENTRY = {
    "odd": (lambda: [torch.ones(1, 9)], "9 tokens do not split over 2 ranks.*pad to 12"),
    "half": (lambda: [torch.ones(1, 6)], "6 tokens do not split.*pad to 8"),
    "lengths": (lambda: [torch.ones(1, 8), torch.ones(1, 4)], r"buffer 1 is \[1, 4\].*0 has 8"),
    "none": (lambda: [], "no buffers"),
    "gradient": (
        lambda: [torch.ones(1, 8), torch.ones(1, 8, requires_grad=True)],
        "buffer 1 requires gradients.*make_cp_batch_and_ctx",
    ),
}


@pytest.mark.parametrize("name", REFUSED_ON_ENTRY)
def test_entry_refuses_before_anything_changes(name):
    buffers, message = REFUSED_ON_ENTRY[name]

    def work(group):
        given = buffers()
        shapes = [buffer.shape for buffer in given]
        context = create(RankMesh(group), given, [1] * len(given), set())
        with pytest.raises(ValueError, match="^create_context_parallel_ctx: " + message):
            context.__enter__()
        assert [buffer.shape for buffer in given] == shapes
        assert plain_stack()

    run_ranks(2, work)


def test_a_context_is_entered_once():
    def work(group):
        ids = torch.arange(8)[None]
        context = create(RankMesh(group), [ids], [1], {ids})
        with context, pytest.raises(RuntimeError, match=r"entered before.*each batch"):
            context.__enter__()
        with pytest.raises(RuntimeError, match="entered before"):
            context.__enter__()
        assert plain_stack()

    run_ranks(2, work)


def test_a_mesh_must_be_as_large_as_its_group():
    def work(group):
        mesh = Mesh(3)
        mesh.group = group
        with pytest.raises(ValueError, match="mesh has 3 ranks but its group 2"):
            create(mesh, [torch.ones(1, 12)], [1], set()).__enter__()

    run_ranks(2, work)


# Attention.


def attend_in_context(group, full, pads, method=None, is_causal=True, target=False, **keywords):
    """Local outputs and gradients of a batch under a context."""
    tokens = pads.shape[1]
    if target:
        context, *_ = cp_utils.make_target_cp_ctx(RankMesh(group), torch.ones(1, tokens).long())
        mine = oracle.contiguous(tokens, group.size(), group.rank())
    else:
        buffer = torch.ones(1, tokens)
        context = create(RankMesh(group), [buffer], [1], {buffer}, method)
        mine = oracle.head_tail(tokens, group.size(), group.rank())
    context.hide(pads)
    q, k, v, upstream = (t[:, :, mine] for t in full)
    q, k, v = (t.clone().requires_grad_() for t in (q, k, v))
    with context:
        out = sdpa(q, k, v, is_causal=is_causal, **keywords)
        out.backward(upstream)
    return mine, [out.detach(), q.grad, k.grad, v.grad]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("method", [None, "allgather", "alltoall", "target", "target full"])
@pytest.mark.parametrize("padded", [False, True])
def test_attention_is_that_of_one_rank(ranks, method, padded):
    torch.manual_seed(ranks)
    tokens, scale = 6 * ranks, 0.3
    full = [torch.randn(3, heads, tokens, 8).double() for heads in (4, 2, 2, 4)]
    pads = torch.zeros(3, tokens, dtype=torch.bool)
    if padded:
        pads[0, :3] = pads[1, 2:5] = pads[1, -4:] = True
    causal = method != "target full"
    q, k, v = (t.clone().requires_grad_() for t in full[:3])
    dense(q, k, v, visible_of(pads, causal), scale).backward(full[3])
    expected = [dense(*full[:3], visible_of(pads, causal), scale), q.grad, k.grad, v.grad]

    def work(group):
        target = method is not None and method.startswith("target")
        return attend_in_context(
            group, full, pads, None if target else method, causal, target,
            scale=scale, enable_gqa=True,
        )  # fmt: skip

    for mine, got in run_ranks(ranks, work):
        for x, y in zip(got, expected, strict=True):
            torch.testing.assert_close(x, y[:, :, mine], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_lone_local_token_is_one_of_many_whatever_its_call_says(ranks, is_causal):
    """Models call a single query not causal (T = N)."""
    full = [torch.randn(2, 2, ranks, 4).double() for _ in range(4)]
    pads = torch.zeros(2, ranks, dtype=torch.bool)
    q, k, v = (t.clone().requires_grad_() for t in full[:3])
    out = dense(q, k, v, visible_of(pads))
    out.backward(full[3])
    expected = [out.detach(), q.grad, k.grad, v.grad]

    def work(group):
        return attend_in_context(group, full, pads, None, is_causal, target=True)

    for mine, got in run_ranks(ranks, work):
        for x, y in zip(got, expected, strict=True):
            torch.testing.assert_close(x, y[:, :, mine], rtol=1e-10, atol=1e-12)


def test_one_token_does_not_split_head_tail():
    """Refused for its length, and not for what the model calls it."""

    def work(group):
        model = nn.ModuleDict({"self_attn": llama.SelfAttention(8, 2, 2)})
        cp_utils.attach_cp_sdpa_hooks(model, RankMesh(group))
        with pytest.raises(ValueError, match="2 tokens do not split over 2 ranks"):
            model["self_attn"](torch.ones(1, 1, 8), torch.zeros(1, 1))

    run_ranks(2, work)


def test_rows_without_heads_are_attended_too():
    full = torch.randn(2, 8, 4).double()

    def work(group):
        buffer = torch.ones(1, 8)
        mine = oracle.head_tail(8, 2, group.rank())
        with create(RankMesh(group), [buffer], [1], {buffer}):
            return mine, sdpa(full[:, mine], full[:, mine], full[:, mine], is_causal=True)

    whole = sdpa(full, full, full, is_causal=True)
    for mine, out in run_ranks(2, work):
        torch.testing.assert_close(out, whole[:, mine])


@pytest.mark.parametrize("way", ["method", "function", "grad"])
def test_recomputation_in_backward_is_over_ranks_too(way):
    full = torch.randn(1, 2, 8, 4).double()
    x = full.clone().requires_grad_()
    dense(x, x, x, visible_of(torch.zeros(1, 8, dtype=torch.bool))).square().sum().backward()

    def work(group):
        buffer = torch.ones(1, 8)
        mine = oracle.head_tail(8, 2, group.rank())
        local = full[:, :, mine].clone().requires_grad_()
        with create(RankMesh(group), [buffer], [1], {buffer}):
            out = torch.utils.checkpoint.checkpoint(
                lambda t: sdpa(t, t, t, is_causal=True), local, use_reentrant=False
            )
            loss = out.square().sum()
            if way == "grad":
                return mine, torch.autograd.grad(loss, [local])[0]
            loss.backward() if way == "method" else torch.autograd.backward([loss])
        return mine, local.grad

    for mine, grad in run_ranks(2, work):
        torch.testing.assert_close(grad, x.grad[:, :, mine])


def checkpointed(group, use_reentrant=True, function=None):
    """A head-tail context, and a loss of a checkpointed attention that ran in it."""
    buffer = torch.ones(1, 8)
    mine = oracle.head_tail(8, 2, group.rank())
    seeded = torch.Generator().manual_seed(0)  # ranks are threads
    local = torch.randn(1, 2, 8, 4, generator=seeded).double()[:, :, mine].requires_grad_()
    context = create(RankMesh(group), [buffer], [1], {buffer})

    def attention(x):
        return sdpa(x, x, x, is_causal=True)

    def loss():
        out = torch.utils.checkpoint.checkpoint(
            function or attention, local, use_reentrant=use_reentrant
        )
        return out.square().sum()

    return context, local, loss


OUTSIDE = "recomputes it outside of the context.*call backward\\(\\) inside"


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_recompute_inside_the_context(use_reentrant):
    def work(group):
        context, local, loss = checkpointed(group, use_reentrant)
        with context:
            loss().backward()
        plain, expected, _ = checkpointed(group)
        with plain:
            sdpa(expected, expected, expected, is_causal=True).square().sum().backward()
        torch.testing.assert_close(local.grad, expected.grad)

    run_ranks(2, work)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_are_not_recomputed_outside_of_the_context(hooked, use_reentrant):
    def work(group):
        attention = nn.ModuleDict({"self_attn": Attention()})
        if hooked:  # it knows nothing of the context's pads
            cp_utils.attach_cp_sdpa_hooks(attention, RankMesh(group))
        context, local, loss = checkpointed(group, use_reentrant, attention["self_attn"])
        with context:
            value = loss()
        with pytest.raises(RuntimeError, match=OUTSIDE):
            value.backward()
        assert local.grad is None
        assert plain_stack()

    class Attention(nn.Module):
        def forward(self, x):
            return sdpa(x, x, x, is_causal=True)

    run_ranks(2, work)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_are_not_recomputed_in_another_context(use_reentrant):
    def work(group):
        context, local, loss = checkpointed(group, use_reentrant)
        with context:
            value = loss()
        other, *_ = checkpointed(group)
        with other, pytest.raises(RuntimeError, match=OUTSIDE):
            value.backward()
        assert local.grad is None

    run_ranks(2, work)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_without_attention_may_be_recomputed_anywhere(use_reentrant):
    def work(group):
        context, local, loss = checkpointed(group, use_reentrant, lambda x: x * x)
        with context:
            value = loss()
        value.backward()
        torch.testing.assert_close(local.grad, 4 * local.detach() ** 3)

    run_ranks(2, work)


def test_graph_breaks_inside_a_context_change_no_answer():
    """Torch then compiles what the context runs for each call by itself."""

    def facts(x):
        torch._dynamo.graph_break()
        return x.requires_grad, x.dim()

    def around(x):
        y = x * 2
        before = facts(x)
        torch._dynamo.graph_break()
        return y, (before, facts(x))

    def work(group):
        if group.rank() > 0:  # torch.compile is not for threads, and nobody is talked to
            return
        torch._dynamo.reset()
        compiled = torch.compile(around, backend="eager")
        buffer = torch.ones(1, 8)
        x = torch.randn(1, 2, 4, 4, requires_grad=True)
        with create(RankMesh(group), [buffer], [1], {buffer}):
            for _ in range(2):
                assert compiled(x)[1] == ((True, 4), (True, 4))

    run_ranks(2, work)


FLEX = {
    "eager": lambda: flex_attention,
    "compiled": lambda: torch.compile(flex_attention, backend="eager"),
    "in a graph": lambda: torch.compile(
        lambda q, k, v: flex_attention(q * 2, k, v) * 2, backend="eager", fullgraph=True
    ),
}


@pytest.mark.parametrize("way", FLEX)
@pytest.mark.parametrize("where", ["head-tail", "target", "hook"])
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_is_refused_instead_of_seeing_one_rank(way, where):
    class Attention(nn.Module):
        def forward(self, x, is_causal=True):
            return flex(x, x, x)

    flex = FLEX[way]()
    x = torch.randn(1, 2, 4, 8)

    def work(group):
        if group.rank() > 0:  # torch.compile is not for threads, and nobody is talked to
            return
        mesh = RankMesh(group)
        refused = pytest.raises(NotImplementedError, match=r"^flex_attention: 4 queries inside")
        if where == "hook":
            model = nn.ModuleDict({"self_attn": Attention()})
            cp_utils.attach_cp_sdpa_hooks(model, mesh)
            with refused:
                model["self_attn"](x)
        else:
            buffer = torch.ones(1, 8).long()
            context = create(mesh, [buffer], [1], {buffer})
            if where == "target":
                context, *_ = cp_utils.make_target_cp_ctx(mesh, buffer)
            with context, refused:
                flex(x, x, x)
        assert plain_stack()

    run_ranks(2, work)
    assert flex(x, x, x).shape == x.shape


REFUSED_INSIDE = {
    "not causal": (ValueError, "Load balancing requires is_causal=True", {"is_causal": False}),
    "mask": (
        NotImplementedError,
        r"attn_mask is \[4, 4\].*attach_context_parallel_hooks",
        {"attn_mask": torch.ones(4, 4), "is_causal": False},
    ),
    "dropout": (NotImplementedError, "dropout_p is 0.1", {"dropout_p": 0.1}),
    "heads": (ValueError, "2 query heads but 1 key heads; pass enable_gqa", {"k": (1, 1, 4, 4)}),
    "causal of full length": (ValueError, "8 queries and 8 keys", {"q": 8, "k": (1, 2, 8, 4)}),
    "cross": (ValueError, "4 queries and 8 keys", {"k": (1, 2, 8, 4), "is_causal": False}),
    "cross back": (ValueError, "8 queries and 4 keys", {"q": 8, "is_causal": False}),
    "rank 2": (ValueError, r"`query` is \[4, 4\]", {"q": (4, 4), "k": (4, 4)}),
    "rows": (ValueError, "3 rows inside a context that knows the pads of 2", {
        "q": (3, 2, 4, 4), "k": (3, 2, 4, 4), "pads": torch.tensor([[0] * 8, [1] + [0] * 7]),
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_INSIDE)
def test_attention_refuses_by_name(name):
    error, message, change = REFUSED_INSIDE[name]
    change = {"is_causal": True, "q": 4, "k": (1, 2, 4, 4), "pads": None, **change}

    def work(group):
        arguments = dict(change)
        length = arguments.pop("q")
        q = torch.ones((1, 2, length, 4) if isinstance(length, int) else length)
        k = torch.ones(arguments.pop("k"))
        buffer = torch.ones(1, 8)
        context = create(RankMesh(group), [buffer], [1], {buffer})
        context.hide(arguments.pop("pads"))
        with (
            pytest.raises(error, match="^scaled_dot_product_attention: .*" + message),
            context,
        ):
            sdpa(q, k, k, **arguments)
        assert plain_stack()

    run_ranks(2, work)


def test_attention_of_other_lengths_that_is_not_causal_goes_to_torch():
    image, queries = torch.randn(3, 2, 5, 4), torch.randn(3, 2, 7, 4)
    mask = torch.rand(7, 5) > 0.3

    def work(group):
        buffer = torch.ones(1, 8)
        with create(RankMesh(group), [buffer], [1], {buffer}):
            return sdpa(image, image, image), sdpa(queries, image, image, attn_mask=mask, scale=0.1)

    for tower, resampled in run_ranks(2, work):
        torch.testing.assert_close(tower, sdpa(image, image, image))
        expected = sdpa(queries, image, image, attn_mask=mask, scale=0.1)
        torch.testing.assert_close(resampled, expected)


def test_target_contexts_refuse_other_lengths():
    def work(group):
        context, *_ = cp_utils.make_target_cp_ctx(RankMesh(group), torch.ones(1, 4).long())
        x = torch.ones(1, 1, 3, 2)
        with context, pytest.raises(ValueError, match=r"3 queries.*hold 2 tokens each"):
            sdpa(x, x, x)

    run_ranks(2, work)


def test_torchs_own_multi_head_attention_is_refused_instead_of_seeing_one_rank():
    module = nn.MultiheadAttention(4, 2, batch_first=True)

    def work(group):
        buffer = torch.ones(1, 8)
        with create(RankMesh(group), [buffer], [1], {buffer}):
            x = torch.ones(1, 4, 4)
            with pytest.raises(NotImplementedError, match="4 local tokens would see their own"):
                module(x, x, x)
            image = torch.ones(1, 7, 4)
            module(image, image, image)

    run_ranks(2, work)


# One inside the other, one beside the other.


def test_contexts_nest():
    short, long = torch.randn(1, 1, 4, 4).double(), torch.randn(1, 1, 8, 4).double()

    def work(group):
        mesh, outs = RankMesh(group), []

        def step(full):
            mine = oracle.head_tail(full.shape[2], 2, group.rank())
            x = full[:, :, mine]
            outs.append((sdpa(x, x, x, is_causal=True), mine))

        outer, inner = torch.ones(1, 8), torch.ones(1, 4)
        with create(mesh, [outer], [1], {outer}):
            step(long)
            with (
                pytest.raises(KeyError),
                create(mesh, [inner], [1], {inner}, "alltoall"),
            ):
                step(short)
                raise KeyError
            step(long)
        return outs

    for outs in run_ranks(2, work):
        for (out, mine), full in zip(outs, (long, short, long), strict=True):
            whole = sdpa(full, full, full, is_causal=True)
            torch.testing.assert_close(out, whole[:, :, mine])


def test_contexts_may_end_in_any_order():
    def work(group):
        one, other = torch.ones(1, 8), torch.ones(1, 4)
        first = create(RankMesh(group), [one], [1], set())
        second = create(RankMesh(group), [other], [1], set())
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert one.shape == (1, 8) and other.shape == (1, 2)
        x = torch.ones(1, 1, 2, 2)
        sdpa(x, x, x, is_causal=True)
        second.__exit__(None, None, None)
        assert other.shape == (1, 4)
        assert plain_stack()

    run_ranks(2, work)


def test_threads_do_not_see_each_others_contexts():
    """Two groups with contexts of different lengths at once, and a bystander."""
    full = {tokens: torch.randn(1, 1, tokens, 4).double() for tokens in (8, 16)}
    entered = threading.Barrier(5)
    wrong = []

    def ranks_of(tokens):
        def work(group):
            buffer = torch.ones(1, tokens)
            mine = oracle.head_tail(tokens, 2, group.rank())
            x = full[tokens][:, :, mine]
            with create(RankMesh(group), [buffer], [1], {buffer}):
                entered.wait(30)
                outs = [sdpa(x, x, x, is_causal=True) for _ in range(5)]
                entered.wait(30)
            whole = sdpa(full[tokens], full[tokens], full[tokens], is_causal=True)
            for out in outs:
                torch.testing.assert_close(out, whole[:, :, mine])

        try:
            run_ranks(2, work)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=ranks_of, args=(tokens,)) for tokens in full]
    for thread in threads:
        thread.start()
    entered.wait(30)
    bystander = torch.randn(1, 1, 8, 4)
    assert plain_stack()
    assert not sdpa(bystander, bystander, bystander).isnan().any()
    entered.wait(30)
    for thread in threads:
        thread.join()
    assert not wrong, wrong


# The default path, from batch to gradients.


def training_batch(tokens):
    """Three rows: pads on the left, in the middle and on the right; none; on the right."""
    torch.manual_seed(tokens)
    ids = torch.randint(1, 64, (3, tokens))
    pads = torch.zeros(3, tokens, dtype=torch.bool)
    pads[0, :2] = pads[0, 5:7] = pads[0, -1:] = pads[2, -3:] = True
    labels = torch.randint(64, (3, tokens)).masked_fill(pads, -100)
    return ids, labels, pads


def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


torch.manual_seed(0)
MODEL = llama.TinyLlama(layers=2, width=16).double()


def model_of():
    """The same for every rank: threads share one random generator."""
    return copy.deepcopy(MODEL)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("tokens", [12, 17])
@pytest.mark.parametrize("given", ["attention_mask", "padding_mask", None])
def test_loss_and_summed_gradients_are_those_of_one_rank(ranks, tokens, given):
    ids, labels, pads = training_batch(tokens)
    mask = None if given is None else llama.causal_mask(pads)
    whole = model_of()
    expected = loss_of(whole(ids, attention_mask=mask), labels)
    expected.backward()

    def work(group):
        model = model_of()
        cp_utils.attach_context_parallel_hooks(model)
        batch = {"input_ids": ids.clone(), "labels": labels.clone()}
        if given is not None:
            batch[given] = pads.clone() if given == "padding_mask" else (~pads).long()
        factory, batch = make(RankDeviceMesh(group), batch)
        length = tokens + -tokens % (2 * ranks)
        assert batch["input_ids"].shape == (3, length)
        with factory():
            assert batch["input_ids"].shape == (3, length // ranks)
            logits = model(batch["input_ids"], batch["position_ids"])
            loss = loss_of(logits, batch["labels"])
            loss.backward()
        assert batch["position_ids"].shape == (3, length)
        assert plain_stack()
        return loss.detach(), [p.grad for p in model.parameters()]

    losses, gradients = zip(*run_ranks(ranks, work), strict=True)
    torch.testing.assert_close(sum(losses), expected.detach())
    for got, parameter in zip(zip(*gradients, strict=True), whole.parameters(), strict=True):
        torch.testing.assert_close(sum(got), parameter.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("tokens", [12, 17])
def test_embeddings_that_require_gradients_are_shared_differentiably(tokens):
    ids, labels, pads = training_batch(tokens)
    whole = model_of()
    embeds = whole.embed_tokens(ids).detach().requires_grad_()
    loss_of(whole(inputs_embeds=embeds, attention_mask=llama.causal_mask(pads)), labels).backward()

    def work(group):
        model = model_of()
        mine = embeds.detach().clone().requires_grad_()
        batch = {"inputs_embeds": mine, "labels": labels.clone(), "padding_mask": pads.clone()}
        factory, batch = make(RankDeviceMesh(group), batch)
        full = batch["inputs_embeds"].shape[1]
        with factory():
            assert batch["inputs_embeds"].shape[1] == full // 2
            inputs = {key: batch[key] for key in ("inputs_embeds", "position_ids")}
            loss_of(model(**inputs), batch["labels"]).backward()
        assert mine.shape == embeds.shape
        return mine.grad

    torch.testing.assert_close(sum(run_ranks(2, work)), embeds.grad, rtol=1e-9, atol=1e-11)


def test_embeddings_replaced_before_entry_are_refused():
    def work(group):
        embeds = torch.ones(1, 8, 2, requires_grad=True)
        batch = {"inputs_embeds": embeds, "labels": torch.ones(1, 8).long()}
        factory, batch = make(RankDeviceMesh(group), batch)
        batch["inputs_embeds"] = embeds * 2
        with pytest.raises(ValueError, match="buffer 0 requires gradients"), factory():
            pass
        assert batch["labels"].shape == (1, 8)

    run_ranks(2, work)


def test_strict_refuses_them_as_the_reference_does():
    def work(group):
        embeds = torch.ones(1, 8, 2, requires_grad=True)
        batch = {"inputs_embeds": embeds, "labels": torch.ones(1, 8).long()}
        with strict():
            factory, batch = make(RankDeviceMesh(group), batch)
        with pytest.raises(ValueError, match="buffer 0 requires gradients"), factory():
            pass

    run_ranks(2, work)


def test_strict_attends_to_pads():
    """Left pads change the answer in the reference, and only there."""
    ids, labels, pads = training_batch(12)
    expected = {
        True: model_of()(ids),
        False: model_of()(ids, attention_mask=llama.causal_mask(pads)),
    }

    def work(group):
        outs = {}
        for rule in (True, False):
            batch = {"input_ids": ids.clone(), "labels": labels.clone()}
            batch["padding_mask"] = pads.clone()
            with strict() if rule else contextlib.nullcontext():
                factory, batch = make(RankDeviceMesh(group), batch)
            with factory(), torch.no_grad():
                outs[rule] = model_of()(batch["input_ids"], batch["position_ids"])
        return oracle.head_tail(12, 2, group.rank()), outs

    for mine, outs in run_ranks(2, work):
        for rule, out in outs.items():
            keep = ~pads[:, mine]
            torch.testing.assert_close(out[keep], expected[rule][:, mine][keep])
        assert not torch.allclose(outs[True], outs[False])


def test_all_of_a_rank_may_be_pads():
    ids, labels, _ = training_batch(16)
    pads = torch.ones(3, 16, dtype=torch.bool)
    pads[:, :2] = False
    labels = labels.masked_fill(pads, -100)

    def work(group):
        model = model_of()
        batch = {"input_ids": ids.clone(), "labels": labels.clone(), "padding_mask": pads.clone()}
        factory, batch = make(RankDeviceMesh(group), batch)
        with factory():
            loss = loss_of(model(batch["input_ids"], batch["position_ids"]), batch["labels"])
            loss.backward()
        gradients = [p.grad for p in model.parameters()]
        assert all(g.isfinite().all() for g in gradients)
        return loss.detach()

    short = loss_of(model_of()(ids[:, :2]), labels[:, :2]).detach()
    torch.testing.assert_close(sum(run_ranks(4, work)), short)


def test_flat_padding_masks_only():
    batch = row_batch(length=4, padding_mask=torch.zeros(1, 4, 1).bool())
    with pytest.raises(ValueError, match=r"padding_mask. is \[1, 4, 1\]; expected \[rows, tokens"):
        make(RankDeviceMesh(FakeGroup()), batch)


class FakeGroup:
    """Two ranks that nobody may talk to."""

    def size(self):
        return 2

    def rank(self):
        return 0


# Modules that attend over ranks by themselves.


@pytest.mark.parametrize("ranks", RANKS)
def test_hooked_modules_attend_over_ranks_without_a_context(ranks):
    tokens = 4 * ranks
    ids, _, _ = training_batch(tokens)
    whole = model_of()(ids)

    def work(group):
        model = model_of()
        for _ in range(2):  # again changes nothing
            cp_utils.attach_cp_sdpa_hooks(model, RankMesh(group))
        copied = copy.deepcopy(model)
        mine = torch.tensor(oracle.head_tail(tokens, ranks, group.rank()))
        out = model(ids[:, mine], mine[None])
        assert torch.equal(copied(ids[:, mine], mine[None]), out)
        with torch.no_grad():
            copied.layers[0].self_attn.o.weight.zero_()
        assert torch.equal(model(ids[:, mine], mine[None]), out)
        assert not torch.equal(copied(ids[:, mine], mine[None]), out)
        assert plain_stack()
        return mine, out

    for mine, out in run_ranks(ranks, work):
        torch.testing.assert_close(out, whole[:, mine])


def test_hooked_modules_take_layout_and_pads_from_the_context():
    ids, labels, pads = training_batch(12)
    whole = model_of()(ids, attention_mask=llama.causal_mask(pads))

    def work(group):
        model = model_of()
        cp_utils.attach_context_parallel_hooks(model)
        cp_utils.attach_cp_sdpa_hooks(model, RankMesh(group))
        batch = {"input_ids": ids.clone(), "labels": labels.clone(), "padding_mask": pads.clone()}
        factory, batch = make(RankDeviceMesh(group), batch)
        with factory():
            return oracle.head_tail(12, 2, group.rank()), model(
                batch["input_ids"], batch["position_ids"]
            )

    for mine, out in run_ranks(2, work):
        keep = ~pads[:, mine]
        torch.testing.assert_close(out[keep], whole[:, mine][keep])


def test_hooks_reach_inside_activation_checkpoints():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    ids, labels, _ = training_batch(8)
    whole = model_of()
    loss_of(whole(ids), labels).backward()

    def work(group):
        model = model_of()
        for layer in model.layers:
            layer.self_attn = checkpoint_wrapper(layer.self_attn)
        cp_utils.attach_cp_sdpa_hooks(model, RankMesh(group))
        mine = torch.tensor(oracle.head_tail(8, 2, group.rank()))
        loss_of(model(ids[:, mine], mine[None]), labels[:, mine]).backward()
        return [p.grad for p in model.parameters()]

    for got, parameter in zip(
        zip(*run_ranks(2, work), strict=True), whole.parameters(), strict=True
    ):
        torch.testing.assert_close(sum(got), parameter.grad, rtol=1e-9, atol=1e-11)


def test_hooked_modules_end_their_mode_on_errors_and_keep_a_forward_of_their_own():
    class Attention(nn.Module):
        def forward(self, x):
            raise KeyError("own")

    def work(group):
        model = nn.ModuleDict({"self_attn": Attention(), "other": Attention()})
        cp_utils.attach_cp_sdpa_hooks(model, RankMesh(group))
        with pytest.raises(KeyError, match="own"):
            model["self_attn"](1)
        assert plain_stack()
        assert "forward" not in vars(model["other"])

        patched = nn.ModuleDict({"self_attn": Attention()})
        patched["self_attn"].forward = lambda x: (x, len_of_stack())
        for _ in range(2):
            cp_utils.attach_cp_sdpa_hooks(patched, RankMesh(group))
        assert patched["self_attn"](7) == (7, 1)

    def len_of_stack():
        return torch._C._len_torch_function_stack()

    run_ranks(2, work)


def test_hooks_refuse_what_no_head_tail_ring_can_do():
    model = nn.ModuleDict({"self_attn": llama.SelfAttention(8, 2, 2)})
    cp_utils.attach_cp_sdpa_hooks(model, Mesh(1))
    assert "forward" not in vars(model["self_attn"])

    def work(group):
        mine = copy.deepcopy(model)
        cp_utils.attach_cp_sdpa_hooks(mine, RankMesh(group))
        attention, positions = mine["self_attn"], torch.arange(4)[None]
        with pytest.raises(ValueError, match="Load balancing requires is_causal=True"):
            attention(torch.ones(1, 4, 8), positions, is_causal=False)
        with pytest.raises(NotImplementedError, match="attn_mask"):
            attention(torch.ones(1, 4, 8), positions, torch.ones(4, 4).bool())
        with pytest.raises(ValueError, match="do not split over 2 ranks"):
            attention(torch.ones(1, 3, 8), positions[:, :3])

    run_ranks(2, work)


class SizeAlone:
    """A mesh axis of two ranks that knows nothing else."""

    def size(self):
        return 2


def test_meshes_are_asked_for_their_group_when_something_is_exchanged():
    mesh = SizeAlone()
    model = nn.ModuleDict({"self_attn": llama.SelfAttention(8, 2, 2)})
    cp_utils.attach_cp_sdpa_hooks(model, mesh)
    assert cp_utils.gather_cp_seq(mesh, [], 1, 4) == []
    with pytest.raises(ValueError, match="cannot keep 9 tokens"):
        cp_utils.gather_cp_seq(mesh, [torch.ones(1, 4)], 1, 9)
    context, ids, _, length = cp_utils.make_target_cp_ctx(mesh, torch.ones(1, 3).long())
    assert (ids.shape, length) == ((1, 4), 3)
    for exchange in (
        lambda: model["self_attn"](torch.ones(1, 4, 8), torch.arange(4)[None]),
        lambda: cp_utils.gather_cp_seq(mesh, [torch.ones(1, 4)], 1, 8),
        context.__enter__,
    ):
        with pytest.raises(AttributeError, match="get_group"):
            exchange()
    assert ids.shape == (1, 4)
    assert plain_stack()


def test_groups_that_do_not_exist_are_named():
    model = nn.ModuleDict({"self_attn": llama.SelfAttention(8, 2, 2)})
    cp_utils.attach_cp_sdpa_hooks(model, Mesh(2))
    with pytest.raises(ValueError, match="no process group named 'group of 2'"):
        model["self_attn"](torch.ones(1, 4, 8), torch.arange(4)[None])
    assert longspan.Group().size() == 1
