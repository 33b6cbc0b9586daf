"""Hooks, training contexts and the EAGLE-3 target."""

import contextlib

import pytest
import torch
from compat_support import Mesh, cp_utils
from torch import nn


class Attention(nn.Module):
    def forward(self, x, attention_mask="unset", **kwargs):
        self.seen = {"attention_mask": attention_mask, **kwargs}
        return x


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = Attention()
        self.cross_attn = Attention()
        self.my_self_attn = Attention()


def test_hooks_make_self_attention_causal_instead_of_masked():
    model = nn.Sequential(Block())
    assert cp_utils.attach_context_parallel_hooks(model) is None
    block = model[0]
    block.self_attn(1, attention_mask="mask", is_causal=False)
    assert block.self_attn.seen == {"attention_mask": None, "is_causal": True}
    block.self_attn(1, attention_mask=None)
    assert block.self_attn.seen == {"attention_mask": None, "is_causal": True}
    block.my_self_attn(1, attention_mask="mask")
    assert block.my_self_attn.seen["is_causal"] is True


def test_hooks_leave_everything_else_alone():
    model = nn.Sequential(Block())
    cp_utils.attach_context_parallel_hooks(model)
    cp_utils.attach_context_parallel_hooks(model)
    block = model[0]
    block.self_attn(1)
    assert block.self_attn.seen == {"attention_mask": "unset"}
    block.self_attn(1, "positional")
    assert block.self_attn.seen == {"attention_mask": "positional"}
    block.cross_attn(1, attention_mask="mask")
    assert block.cross_attn.seen == {"attention_mask": "mask"}


def test_hooks_run_before_others_and_never_on_the_root():
    attention = Attention()
    cp_utils.attach_context_parallel_hooks(attention)
    attention(1, attention_mask="mask")
    assert attention.seen == {"attention_mask": "mask"}
    model = Block()
    seen = []
    model.self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(dict(kwargs)), with_kwargs=True
    )
    cp_utils.attach_context_parallel_hooks(model)
    model.self_attn(1, attention_mask="mask")
    assert seen == [{"attention_mask": None, "is_causal": True}]


@pytest.fixture
def log(monkeypatch):
    log = []

    def named(name):
        @contextlib.contextmanager
        def context(*args):
            log.append(f"enter {name}")
            try:
                yield
            finally:
                log.append(f"exit {name}")

        return context

    import torch._dynamo.utils as dynamo

    monkeypatch.setattr(torch.distributed.tensor.parallel, "loss_parallel", named("loss"))
    monkeypatch.setattr(dynamo, "maybe_enable_compiled_autograd", named("autograd"))
    monkeypatch.setattr(torch.nn.attention, "sdpa_kernel", named("kernels"))
    log.append(named("cp"))
    return log


def test_train_context_enters_in_order_and_leaves_in_reverse(log):
    cp = log.pop()
    factory = cp_utils.get_train_context(True, True, cp())
    assert log == []
    with factory():
        log.append("body")
    names = ["loss", "autograd", "kernels", "cp"]
    assert log == [
        *(f"enter {name}" for name in names),
        "body",
        *(f"exit {name}" for name in reversed(names)),
    ]


def test_train_context_enters_only_what_is_asked(log):
    log.pop()
    with cp_utils.get_train_context(False, False)():
        pass
    assert log == []
    with cp_utils.get_train_context(
        enable_loss_parallel=True, **{"enable_compiled_autograd": False}
    )():
        pass
    assert log == ["enter loss", "exit loss"]


def test_train_context_unwinds_when_the_body_raises(log):
    cp = log.pop()
    with pytest.raises(RuntimeError), cp_utils.get_train_context(0, 0, cp())():
        raise RuntimeError
    assert log[-2:] == ["exit cp", "exit kernels"]


def test_train_context_really_restricts_the_kernels():
    flags = torch.backends.cuda
    before = flags.math_sdp_enabled()
    with cp_utils.get_train_context(True, True, contextlib.nullcontext())():
        assert not flags.math_sdp_enabled()
        assert flags.flash_sdp_enabled()
    assert flags.math_sdp_enabled() == before


# The target of EAGLE-3.


def test_target_pads_to_the_ranks_and_never_touches_the_callers_tensors():
    ids = torch.arange(1, 6)[None]
    context, padded, positions, length = cp_utils.make_target_cp_ctx(Mesh(2), ids)
    assert padded.tolist() == [[1, 2, 3, 4, 5, 0]]
    assert positions.tolist() == [[0, 1, 2, 3, 4, 0]]
    assert length == 5
    assert ids.shape == (1, 5)
    assert isinstance(context, contextlib.AbstractContextManager)


def test_target_clones_what_needs_no_padding():
    ids = torch.arange(8).view(4, 2).t()
    given = torch.arange(4)[None]
    _, out, positions, length = cp_utils.make_target_cp_ctx(Mesh(2), ids, given)
    assert out.data_ptr() != ids.data_ptr()
    assert positions.data_ptr() != given.data_ptr()
    assert out.is_contiguous()
    assert positions.is_contiguous()
    assert torch.equal(out, ids)
    assert positions.tolist() == [[0, 1, 2, 3]] * 2
    assert length == 4


def test_target_refuses_bad_shapes():
    make = cp_utils.make_target_cp_ctx
    with pytest.raises(ValueError, match="input_ids"):
        make(Mesh(2), torch.arange(4))
    with pytest.raises(ValueError, match="position_ids"):
        make(Mesh(2), torch.ones(1, 4).long(), torch.arange(3)[None])
    with pytest.raises(ValueError, match="position_ids"):
        make(Mesh(2), torch.ones(1, 4).long(), torch.ones(3, 1, 4).long())
    with pytest.raises(TypeError, match="input_ids"):
        make(Mesh(2), None)


def test_gather_of_one_rank_trims_and_cuts_the_gradient():
    tensors = [torch.arange(6.0).view(1, 6).requires_grad_(), torch.ones(2, 6, 3)]
    out = cp_utils.gather_cp_seq(Mesh(1), tensors, 1, 4)
    assert isinstance(out, list)
    assert out[0].tolist() == [[0, 1, 2, 3]]
    assert not out[0].requires_grad
    assert out[1].shape == (2, 4, 3)
    assert out[1].is_contiguous()
    with pytest.raises(ValueError, match="cannot keep 9"):
        cp_utils.gather_cp_seq(Mesh(1), tensors, 1, 9)
    with pytest.raises(ValueError, match="axis 5"):
        cp_utils.gather_cp_seq(Mesh(1), tensors, 5, 1)
    with pytest.raises(ValueError, match=r"cannot keep 13.* and 2 ranks"):
        cp_utils.gather_cp_seq(Mesh(2), tensors, 1, 13)
