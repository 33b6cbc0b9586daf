"""Torch's attention, sent to `longspan.attend` over the ranks of a group.

A `TorchFunctionMode` does it: it holds for this thread and for backward passes
started in it, nests, ends with its block whatever happens, and torch.compile
traces it without a graph break. No function of torch is replaced.
"""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.flex_attention import flex_attention as _FLEX
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

import longspan
from longspan import _C
from longspan._group import Group
from longspan.compat.nemo import _nemo
from longspan.compat.nemo._batch import mesh_size, shape_of

_SDPA = torch._C._nn.scaled_dot_product_attention
_BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
_SET_GRAD_ENABLED = torch._C._set_grad_enabled
_CHECKPOINT_FORWARD: Any = CheckpointFunction.forward.__code__
_DROPS_SAVED_TENSORS = "_checkpoint_hook.__init__.<locals>.pack_hook"
_WHO = "scaled_dot_product_attention"

#: What torch calls its ways to rotate keys and values.
STRATEGIES = {"allgather": "gathered", "alltoall": "ring", None: "ring"}


def group_of(who: str, mesh: Any) -> Group:
    """The ranks of a mesh."""
    group = Group.of(mesh.get_group())
    if group.size() != mesh_size(mesh):
        raise ValueError(
            f"{who}: the mesh has {mesh_size(mesh)} ranks but its group {group.size()}; "
            "build the mesh over that group"
        )
    return group


class AttentionOverRanks(TorchFunctionMode):
    """While entered, `F.scaled_dot_product_attention` runs over the ranks."""

    def __init__(self, group_name: str, strategy: str) -> None:
        super().__init__()
        self.group_name = group_name
        self.strategy = strategy

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _SDPA:
            return self._attend(*args, **(kwargs or {}))
        # Torch switches the mode off while these run, but what they call may attend:
        # activation checkpoints recompute in backward.
        if func in _BACKWARD:
            with self:
                return _unasked(func)(*args, **(kwargs or {}))
        if func is _FLEX:
            return refused_flex(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            self._check_other(args[0] if args else (kwargs or {})["query"])
        if func is _SET_GRAD_ENABLED:
            self._watch_checkpoint()
        if func is Tensor.unflatten:  # torch.compile knows the method, not the function
            return args[0].unflatten(*args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def is_local(self, query: Tensor, key: Tensor, is_causal: bool) -> bool:
        """Whether the call is about the tokens that are cut over the ranks."""
        raise NotImplementedError

    def layout(self, query: Tensor, is_causal: bool) -> Tensor:
        """What `attend` takes."""
        raise NotImplementedError

    def _check_other(self, query: Tensor) -> None:
        raise NotImplementedError

    def _watch_checkpoint(self) -> None:
        """A module that attends over ranks does so when it is recomputed, too."""

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if not self.is_local(query, key, is_causal):
            return _SDPA(
                query, key, value, attn_mask, dropout_p, is_causal,
                scale=scale, enable_gqa=enable_gqa,
            )  # fmt: skip
        if attn_mask is not None:
            raise NotImplementedError(
                f"{_WHO}: attn_mask is {shape_of(attn_mask)}, but a mask of local tokens cannot "
                "say who sees whom on other ranks; pass None with is_causal=True "
                "(attach_context_parallel_hooks does); pads go into the batch's padding_mask"
            )
        if dropout_p != 0.0:
            raise NotImplementedError(
                f"{_WHO}: dropout_p is {dropout_p}; attention over ranks has no dropout, "
                "set the model's attention dropout to 0"
            )
        if query.dim() not in (3, 4) or key.dim() != query.dim() or value.dim() != query.dim():
            raise ValueError(
                f"{_WHO}: `query` is {shape_of(query)} and `key` {shape_of(key)}; over ranks "
                "they are [rows, heads, tokens, width] or [rows, tokens, width]"
            )
        if query.shape[-2] != key.shape[-2]:
            raise ValueError(
                f"{_WHO}: {query.shape[-2]} queries but {key.shape[-2]} keys; over ranks "
                "both are the local tokens"
            )
        if query.dim() == 4 and query.shape[1] != key.shape[1] and not enable_gqa:
            raise ValueError(
                f"{_WHO}: {query.shape[1]} query heads but {key.shape[1]} key heads; "
                "pass enable_gqa=True"
            )
        layout = self.layout(query, is_causal)
        if query.dim() == 3:
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
            return self._over_ranks(query, key, value, layout, scale).squeeze(1)
        return self._over_ranks(query, key, value, layout, scale)

    def _over_ranks(
        self, query: Tensor, key: Tensor, value: Tensor, layout: Tensor, scale: float | None
    ) -> Tensor:
        # The operator, which takes the tensor that _causal_head_tail makes in compiled code.
        scale = 1.0 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale
        out: Tensor = torch.ops.longspan.attend(
            query, key, value, None, layout, scale, 0.0, self.strategy, 0, self.group_name
        )[0]
        return out


class AttentionInContext(AttentionOverRanks):
    """Attention of the tokens that a context has cut.

    Calls of other lengths are not about them. In the head-tail layout, whose own
    calls are causal, those without `is_causal` (a vision tower) go to torch; a
    causal one, or one with only one side of the local length, is refused.
    """

    def __init__(
        self,
        group: Group,
        strategy: str,
        ownership: _C.Ownership,
        hidden: Sequence[Sequence[tuple[int, int]]],
    ) -> None:
        super().__init__(group.name, strategy)
        self.group = group
        self.ownership = ownership
        self.head_tail = ownership.kind == "head-tail"
        self.local_tokens = ownership.local_tokens(group.rank())
        self.rows = len(hidden)
        packing = _C.Packing.single(ownership.tokens)
        # Both are made here: compiled code takes them as they are.
        self.causal = _layout(ownership, _C.Mask.causal(packing), hidden)
        self.full = None
        if not self.head_tail:
            self.full = _layout(ownership, _C.Mask.full(packing), hidden)

    def is_local(self, query: Tensor, key: Tensor, is_causal: bool) -> bool:
        lengths = (query.shape[-2], key.shape[-2])
        if lengths == (self.local_tokens, self.local_tokens):
            return True
        if is_causal or self.local_tokens in lengths or not self.head_tail:
            raise ValueError(
                f"{_WHO}: {lengths[0]} queries and {lengths[1]} keys inside a context whose "
                f"ranks hold {self.local_tokens} tokens each; pass the context's shards, or "
                "leave the context for attention to anything else"
            )
        return False

    def layout(self, query: Tensor, is_causal: bool) -> Tensor:
        if self.rows > 1 and query.shape[0] != self.rows:
            raise ValueError(
                f"{_WHO}: {query.shape[0]} rows inside a context that knows the pads of "
                f"{self.rows}; pass all rows of the batch"
            )
        if not torch.compiler.is_dynamo_compiling():
            self._watch_saved_tensors()
        # Models call a lone query not causal, since it sees all keys that they know of.
        # Here it is one token of many.
        if is_causal or self.local_tokens == 1:
            return self.causal
        if self.full is None:
            raise ValueError(f"{_WHO}: Load balancing requires is_causal=True")
        return self.full

    def _check_other(self, query: Tensor) -> None:
        if query.shape[0] == self.local_tokens:
            _refuse_multi_head(query)

    def _watch_checkpoint(self) -> None:
        """Torch's reentrant checkpoint switches gradients off to run. What it recomputes
        outside of this context must not attend."""
        if torch.compiler.is_dynamo_compiling():
            return
        frame: types.FrameType | None = sys._getframe(2)
        for _ in range(4):
            if frame is None:
                return
            if frame.f_code is _CHECKPOINT_FORWARD:
                node = frame.f_locals["ctx"]
                if not isinstance(node.run_function, _Recomputed):
                    node.run_function = _Recomputed(node.run_function, self)
                return
            frame = frame.f_back

    def _watch_saved_tensors(self) -> None:
        """The same for the other checkpoint, which keeps its function behind the hook
        that drops saved tensors. Torch would only notice that they are not the same."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is None or getattr(hooks[0], "__qualname__", "") != _DROPS_SAVED_TENSORS:
            return
        for cell in hooks[0].__closure__ or ():
            function = getattr(cell.cell_contents, "recompute_fn", None)
            if function is not None and not isinstance(function, _Recomputed):
                cell.cell_contents.recompute_fn = _Recomputed(function, self)


class _Recomputed:
    """What a checkpoint runs again in backward."""

    def __init__(self, function: Any, context: AttentionInContext) -> None:
        self.function = function
        self.context = context

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _is_inside(self.context):
            return self.function(*args, **kwargs)
        with AttentionAfterContext(self.context):
            return self.function(*args, **kwargs)


class AttentionAfterContext(AttentionInContext):
    """While entered, attention is recomputed for a context that is over, or not the
    innermost one: what it saw is gone, so it is refused."""

    def __init__(self, context: AttentionInContext) -> None:
        TorchFunctionMode.__init__(self)
        self.__dict__.update(context.__dict__)

    def is_local(self, query: Tensor, key: Tensor, is_causal: bool) -> bool:
        raise RuntimeError(
            f"{_WHO}: an activation checkpoint recomputes it outside of the context that it "
            "ran in, where it would see its own rank only; call backward() inside the context"
        )

    def _watch_checkpoint(self) -> None:
        """Attention inside is refused already."""


class AttentionOfShards(AttentionOverRanks):
    """Causal attention of head-tail shards of whatever length they come in."""

    def __init__(self, group_name: str, ranks: int, words: int) -> None:
        super().__init__(group_name, "ring")
        self.ranks = ranks
        self.words = words

    def is_local(self, query: Tensor, key: Tensor, is_causal: bool) -> bool:
        return True

    def layout(self, query: Tensor, is_causal: bool) -> Tensor:
        if not is_causal and query.shape[-2] > 1:
            raise ValueError(f"{_WHO}: Load balancing requires is_causal=True")
        tokens = query.shape[-2] * self.ranks
        layout: Tensor = _causal_head_tail(tokens, self.ranks, self.words)
        return layout

    def _check_other(self, query: Tensor) -> None:
        _refuse_multi_head(query)


def _unasked(function: Any) -> Any:
    """A function of torch that does not ask first whether a mode wants to handle it."""
    names = dict.fromkeys(("has_torch_function", "has_torch_function_unary"), lambda *_: False)
    copy = types.FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _refuse_multi_head(query: Tensor) -> None:
    raise NotImplementedError(
        f"multi_head_attention_forward: {query.shape[0]} local tokens would see their own rank "
        f"only; use a module that calls F.{_WHO}"
    )


# An operator, so that compiled code, which flex_attention always is, raises it as it is.
@torch.library.custom_op("longspan_nemo::refuse_flex_attention", mutates_args=())
def _refuse_flex(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError(
        f"flex_attention: {query.shape[-2]} queries inside a context over ranks would see their "
        f"own rank only; use F.{_WHO} (transformers: attn_implementation='sdpa'), or leave "
        "the context for attention to anything else"
    )


@_refuse_flex.register_fake
def _(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
    return query.new_empty((*query.shape[:-1], value.shape[-1])), sums, torch.empty_like(sums)


def _no_gradient(ctx: Any, *grads: Any) -> Any:
    return None, None


_refuse_flex.register_autograd(_no_gradient)


def refused_flex(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
    """What flex_attention inside a context comes to."""
    return _refuse_flex(query, value)


def _layout(
    ownership: _C.Ownership, mask: _C.Mask, hidden: Sequence[Sequence[tuple[int, int]]]
) -> Tensor:
    masks = [mask.with_hidden(list(ranges)) if ranges else mask for ranges in hidden]
    return longspan.AttentionLayout(ownership, masks or mask).tensor


# An operator, so that compiled code makes it for any length. Its size depends on
# neither length nor ranks.
@torch.library.custom_op("longspan_nemo::causal_head_tail", mutates_args=())
def _causal_head_tail(tokens: int, ranks: int, words: int) -> Tensor:
    return longspan.AttentionLayout(_C.Ownership.head_tail(tokens, ranks)).tensor


@_causal_head_tail.register_fake
def _(tokens: int, ranks: int, words: int) -> Tensor:
    return torch.empty(words, dtype=torch.int64)


def inside() -> AttentionInContext | None:
    """The innermost context that this thread is in."""
    for at in reversed(range(torch._C._len_torch_function_stack())):
        mode = torch._C._get_function_stack_at(at)
        if isinstance(mode, AttentionInContext):
            return mode
    return None


def _is_inside(context: AttentionInContext) -> bool:
    """Whether this thread is in that very context."""
    count = torch._C._len_torch_function_stack()
    return any(torch._C._get_function_stack_at(at) is context for at in range(count))


def leave(mode: AttentionOverRanks) -> None:
    """Ends a mode also if blocks end in another order, or in another thread."""
    above = []
    while torch._C._len_torch_function_stack() > 0:
        top = torch._C._pop_torch_function_stack()
        if top is mode:
            break
        above.append(top)
    for other in reversed(above):
        torch._C._push_on_torch_function_stack(other)


# Modules whose attention runs over ranks by itself.

_HELD = "_longspan_ranks"
_OWN = "_longspan_own_forward"  # if one stood in place of its class's


class _Held:
    """What a module remembers; copies of the module share it. The mesh is asked for
    its group when the module first attends by itself."""

    def __init__(self, who: str, mesh: Any) -> None:
        self.who = who
        self.mesh = mesh
        self.which = str(id(mesh))
        self.ranks = mesh_size(mesh)
        self.group: Group | None = None
        tokens = 1 + _nemo.pads_for("head-tail", 1, self.ranks)
        owners = _C.Ownership.head_tail(tokens, self.ranks)
        self.words = longspan.AttentionLayout(owners).tensor.numel()

    # Compiled code asks once for each mesh, when it is traced: it compares `which`.
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def group_name(self, which: str) -> str:
        if self.group is None:
            self.group = group_of(self.who, self.mesh)
        return self.group.name

    def __deepcopy__(self, memo: dict[int, Any]) -> _Held:
        return self


def attach(who: str, module: nn.Module, mesh: Any) -> None:
    """From now on attention inside the module's forward runs over the mesh: with the
    layout of the context that it is called in, or as causal head-tail shards."""
    if _HELD not in module.__dict__:
        module.__dict__[_OWN] = module.__dict__.get("forward")
        module.__dict__["forward"] = types.MethodType(_forward_over_ranks, module)
    module.__dict__[_HELD] = _Held(who, mesh)


def _forward_over_ranks(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if inside() is not None:
        return _own_forward(module, args, kwargs)
    held = module.__dict__[_HELD]
    with AttentionOfShards(held.group_name(held.which), held.ranks, held.words):
        return _own_forward(module, args, kwargs)


def _own_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
    own = module.__dict__[_OWN]
    if own is not None:
        return own(*args, **kwargs)
    return type(module).forward(module, *args, **kwargs)
