"""Gemma4's hooks: attention of one module goes over ranks, and nothing else does."""

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from compat_support import NEMO
from test_gemma4_attention_ring import BY_NAME, DOCUMENTS, GROUPS, PADS, TYPES, Inputs, Mesh, exact
from torch.nn.functional import scaled_dot_product_attention as imported_sdpa
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from longspan import Group, run_ranks

cpa = pytest.importorskip(NEMO + "models.gemma4_moe.cp_attention")


class Attention(torch.nn.Module):
    """As model code calls it, with a projection so that there is a parameter."""

    def __init__(self, window=None, inner=None, how=F.scaled_dot_product_attention):
        super().__init__()
        self.sliding_window = window
        self.config = SimpleNamespace(use_bidirectional_attention="vision")
        self.weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        self.inner = inner
        self.how = how
        self.got = None

    def forward(self, q, k, v, attention_mask=None, **kwargs):
        self.got = {"attention_mask": attention_mask, **kwargs}
        if self.inner is not None:
            self.inner(q, k, v)
        return self.how(q * self.weight, k, v, attention_mask, enable_gqa=q.shape[1] != k.shape[1])


def installed(group=None, **how):
    module = Attention(**how)
    cpa.attach_gemma4_cp_ring_attention(module)
    module.setup_cp_attention(Mesh(Group() if group is None else group))
    return module


def plain(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def tensors(tokens=6):
    random = torch.Generator().manual_seed(1)
    return [torch.randn(1, 2, tokens, 4, generator=random, dtype=torch.float64) for _ in range(3)]


def test_attach_marks_a_module_and_gives_it_entry_points():
    for module in (torch.nn.Linear(1, 1), SimpleNamespace()):
        assert cpa.attach_gemma4_cp_ring_attention(module) is None
        assert module._cp_manual_metadata_keys == (TYPES, DOCUMENTS, PADS, GROUPS)
        assert module._cp_manual_metadata_seq_dims == dict.fromkeys(
            module._cp_manual_metadata_keys, 1
        )
        assert callable(module.setup_cp_attention)
        assert callable(module.run_cp_manual_attention)
        assert module._gemma4_cp_use_ffpa is False
    cpa.attach_gemma4_cp_ring_attention(module, use_ffpa=True)
    assert module._gemma4_cp_use_ffpa is True
    with pytest.raises(TypeError, match="hooks need a Module"):
        module.setup_cp_attention(Mesh(Group()))


def test_callers_name_their_arguments():
    q, k, v = tensors()
    module = Attention()
    cpa.attach_gemma4_cp_ring_attention(attention_module=module, use_ffpa=False)
    how = dict(cp_mesh=Mesh(Group()), attn_mask=None, dropout_p=0.0, is_causal=True)
    how |= dict(scale=None, enable_gqa=False, kwargs={})
    out = module.run_cp_manual_attention(query=q, key=k, value=v, **how)
    torch.testing.assert_close(out, plain(q, k, v))
    by_name = cpa._gemma4_cp_manual_attention(
        attention_module=module, query=q, key=k, value=v, **how
    )
    assert torch.equal(by_name, out)
    module.setup_cp_attention(cp_mesh=Mesh(Group()))
    torch.testing.assert_close(module(q, k, v), plain(q, k, v))


def test_attach_alone_changes_no_result():
    q, k, v = tensors()
    module = Attention()
    cpa.attach_gemma4_cp_ring_attention(module)
    assert torch.equal(module(q, k, v), F.scaled_dot_product_attention(q, k, v))


NAMES = [
    "images_documents_and_pads",
    "images_from_types",
    "documents_made_of_pads",
    "all_in_pieces",
]


@pytest.mark.parametrize("stashed", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_module_attends_over_ranks(name, ranks, stashed):
    case = BY_NAME[name]
    inputs = Inputs.of(case, torch.float64)

    def rank(group):
        module = installed(group, window=case.window)
        local = inputs.q.shape[2] // group.size()
        begin = group.rank() * local
        q, k, v, dout = (
            t.narrow(2, begin, local).clone().requires_grad_()
            for t in (inputs.q, inputs.k, inputs.v, inputs.dout)
        )
        metadata = {
            key: None if t is None else t.narrow(1, begin, local)
            for key, t in case.metadata().items()
        }
        if stashed:
            module._cp_dense_metadata = metadata
            metadata = {}
        mask = torch.zeros(local, local, dtype=torch.bool)
        out = module(q, k, v, attention_mask=mask, other=5, **metadata)
        assert module.got == {"attention_mask": None, "is_causal": True, "other": 5}
        assert module._cp_manual_metadata == {}
        out.backward(dout.detach())
        return out.detach(), q.grad, k.grad, v.grad, module.weight.grad

    parts = run_ranks(ranks, rank, timeout=20)
    truth = exact(name)
    for at, (part, expected) in enumerate(
        zip(("out", "dq", "dk", "dv"), (truth.out, truth.dq, truth.dk, truth.dv), strict=True)
    ):
        whole = torch.cat([p[at] for p in parts], dim=2)
        assert (whole - expected).abs().max() < 1e-12, part
    # Parameter gradients add up over the ranks.
    full = (truth.dq * inputs.q).sum()
    assert (sum(p[4] for p in parts) - full).abs() < 1e-10


def test_one_token_on_a_rank_is_causal_too():
    q, k, v = tensors(4)

    def rank(group):
        share = (t.narrow(2, group.rank(), 1) for t in (q, k, v))
        return installed(group)(*share)

    torch.testing.assert_close(torch.cat(run_ranks(4, rank), dim=2), plain(q, k, v))


def test_only_inside_the_module_whatever_the_function_is_called():
    q, k, v = tensors()
    original = F.scaled_dot_product_attention
    for how in (
        F.scaled_dot_product_attention,
        imported_sdpa,
        torch._C._nn.scaled_dot_product_attention,
    ):
        module = installed(how=how)
        torch.testing.assert_close(module(q, k, v), plain(q, k, v))
        assert F.scaled_dot_product_attention is original
        full = F.scaled_dot_product_attention(q, k, v)
        assert (full - plain(q, k, v)).abs().max() > 0.1
    assert _get_current_function_mode_stack() == []


def test_errors_leave_nothing_behind():
    q, k, v = tensors()
    module = installed()
    for bad in (q[..., :1, :], q[:, :, :, :2]):
        with pytest.raises((ValueError, RuntimeError)):
            module(q, bad, v)
        assert _get_current_function_mode_stack() == []
        assert module._cp_manual_metadata == {}
    module.how = lambda *args, **kw: 1 / 0
    with pytest.raises(ZeroDivisionError):
        module(q, k, v)
    assert _get_current_function_mode_stack() == []
    module.how = F.scaled_dot_product_attention
    torch.testing.assert_close(module(q, k, v), plain(q, k, v))


def test_another_hook_that_fails_first_leaves_nothing_behind():
    q, k, v = tensors()
    module = installed()

    def fail(*_):
        raise KeyError("before")

    for prepend in (True, False):
        handle = module.register_forward_pre_hook(fail, prepend=prepend)
        with pytest.raises(KeyError):
            module(q, k, v)
        handle.remove()
        assert _get_current_function_mode_stack() == []


def test_dropout_is_refused():
    q, k, v = tensors()

    def how(q, k, v, mask, enable_gqa):
        return F.scaled_dot_product_attention(q, k, v, mask, 0.25)

    with pytest.raises(NotImplementedError, match=r"dropout_p is 0\.25"):
        installed(how=how)(q, k, v)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_is_refused_instead_of_seeing_one_rank():
    from torch.nn.attention.flex_attention import flex_attention

    def how(q, k, v, mask, enable_gqa):
        return flex_attention(q.detach().float(), k.float(), v.float())

    with pytest.raises(NotImplementedError, match=r"^flex_attention: 6 queries inside"):
        installed(how=how)(*tensors())


def test_modules_nest():
    q, k, v = tensors()
    inner, outer = installed(window=2), installed()
    outer.inner = inner
    inner.register_forward_hook(lambda m, a, out: setattr(inner, "out", out))
    torch.testing.assert_close(outer(q, k, v), plain(q, k, v))
    near = torch.ones(6, 6).tril().triu(-1).bool()
    torch.testing.assert_close(inner.out, F.scaled_dot_product_attention(q, k, v, near))
    assert _get_current_function_mode_stack() == []


def test_other_modes_see_what_they_saw():
    seen = []

    class Listen(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    q, k, v = tensors()
    module = installed()
    with Listen():
        torch.testing.assert_close(module(q, k, v), plain(q, k, v))
    assert torch.Tensor.mul in seen


def test_setup_again_takes_the_place_of_the_first():
    q, k, v = tensors()
    module = installed()
    asked = []
    mesh = SimpleNamespace(size=lambda: asked.append(1) or 1, get_group=lambda: None)
    module.setup_cp_attention(mesh)
    torch.testing.assert_close(module(q, k, v), plain(q, k, v))
    assert asked == [1]
    assert len(module._forward_pre_hooks) == len(module._forward_hooks) == 1


def test_the_attention_is_looked_up_when_called(monkeypatch):
    q, k, v = tensors()
    module = installed()
    types = torch.tensor([[1, 0, 1, 0, 0, 0]])
    seen = {}

    def fake(module, q, k, v, *, cp_mesh, is_causal, **others):
        assert list(others) == ["attn_mask", "dropout_p", "scale", "enable_gqa", "kwargs"]
        seen.update(module._cp_manual_metadata)
        seen.update(causal=is_causal, hooked=module._cp_uses_attention_hook)
        return torch.zeros_like(q)

    monkeypatch.setattr(cpa, "_gemma4_cp_manual_attention", fake)
    assert (module(q, k, v, mm_token_type_ids=types) == 0).all()
    assert seen[TYPES] is types
    assert seen["causal"] is True and seen["hooked"] is True
    assert module._cp_manual_metadata == {}


def test_modules_without_those_arguments_work_too():
    class Bare(torch.nn.Module):
        sliding_window = None

        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v)

    q, k, v = tensors()
    module = Bare()
    cpa.attach_gemma4_cp_ring_attention(module)
    module.setup_cp_attention(Mesh(Group()))
    ids = torch.ones(1, 6, dtype=torch.int64)
    torch.testing.assert_close(module(q, k, v, _packed_seq_ids=ids), plain(q, k, v))


def test_two_threads_in_one_module_at_once():
    q, k, v = tensors()
    module = installed()
    both = threading.Barrier(2, timeout=20)
    out = {}

    def wait(*args, **kw):
        both.wait()
        return F.scaled_dot_product_attention(*args, **kw)

    module.how = wait
    rows = {
        "one": torch.tensor([[1, 1, 1, 2, 2, 2]]),
        "other": torch.tensor([[1, 2, 2, 2, 2, 0]]),
    }

    def work(name):
        for _ in range(5):
            out[name] = module(q, k, v, _packed_seq_ids=rows[name])
        both.wait()

    threads = [threading.Thread(target=work, args=(name,)) for name in rows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, ids in rows.items():
        mask = torch.ones(6, 6).tril().bool() & (ids[0][:, None] == ids[0][None])
        expected = F.scaled_dot_product_attention(q, k, v, mask)
        expected = expected.masked_fill((ids <= 0)[:, None, :, None], 0)
        torch.testing.assert_close(out[name], expected)


def test_other_threads_are_not_routed():
    q, k, v = tensors()
    module = installed()
    full = F.scaled_dot_product_attention(q, k, v)
    seen = []

    def how(*args, **kw):
        thread = threading.Thread(
            target=lambda: seen.append(torch.equal(F.scaled_dot_product_attention(q, k, v), full))
        )
        thread.start()
        thread.join()
        return F.scaled_dot_product_attention(*args, **kw)

    module.how = how
    torch.testing.assert_close(module(q, k, v), plain(q, k, v))
    assert seen == [True]


def test_autocast_holds_as_for_torchs_own_attention():
    q, k, v = (t.float() for t in tensors())
    module = installed().float()
    with torch.autocast("cpu", torch.bfloat16):
        out = module(q, k, v)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), plain(q, k, v), rtol=0.02, atol=0.02)


def test_recomputation_in_backward_finds_its_metadata():
    q, k, v = tensors()
    ids = torch.tensor([[1, 1, 2, 2, 2, 0]])
    grads = []
    for use in (contextlib.nullcontext, torch.utils.checkpoint.checkpoint):
        module = installed()
        query = q.clone().requires_grad_()
        if use is contextlib.nullcontext:
            out = module(query, k, v, _packed_seq_ids=ids)
        else:
            out = use(module, query, k, v, use_reentrant=False, _packed_seq_ids=ids)
        out.square().sum().backward()
        grads.append(query.grad)
    assert torch.equal(*grads)
