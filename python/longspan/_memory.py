"""How much memory a training step needs, before there is any: the model's own code runs on the
meta device, where tensors have sizes and no values, and what is alive is counted."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longspan import _C
from longspan._group import Group
from longspan._local_batch import LocalBatch
from longspan._models import (
    AttentionLayer,
    LocalAttention,
    Parallelized,
    find_state,
    set_up,
)
from longspan._tiles import shape_of_inputs
from longspan._twins import looked_through
from longspan._wrappings import local_part

#: Gigabytes of 10^9 bytes that a device has.
DEVICES = {"a100": 80, "h100": 80, "h200": 141, "b200": 180}
#: Numbers that an optimizer keeps for a parameter, in its type.
OPTIMIZERS = {"adamw": 2, "momentum": 1, "sgd": 0}

#: Of an operator's name and arguments: what it has while it runs, its results included.
Inside = dict[str, Callable[[Sequence[Any]], int]]
#: Of an operator's name: what runs in its place, where its own shapes ask for more than sizes.
Instead = dict[str, Callable[..., Any]]


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank for one training step. `peak` is of forward and backward, with the
    optimizer's states; the parts are what each is at its largest, which they are not together."""

    weights: int
    gradients: int
    optimizer: int
    kept: int  #: alive when forward has ended, without what the loss made
    attention: int  #: keys on their way, sums and results, of one layer at a time
    loss: int  #: logits, their copies and gradients
    peak: int

    def rows(self) -> list[tuple[str, int]]:
        names = {"kept": "kept activations", "attention": "attention buffers"}
        return [(names.get(key, key), value) for key, value in dataclasses.asdict(self).items()]


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, counts the bytes of tensors that were made and are alive. `inside` says what an
    operator has for itself while it runs."""

    def __init__(
        self,
        inside: Inside | None = None,
        known: Sequence[Tensor] = (),
        instead: Instead | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self.inside: dict[str, int] = {}  #: the most, by operator
        self._inside = inside or {}
        self._instead = instead or {}
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        self._known = known  # alive as long as we are

    def since(self) -> int:
        """The peak since the last time that somebody asked."""
        peak, self.peak = self.peak, self.live
        return peak

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        before = self.live
        name = func.name()
        out = self._instead.get(name, func)(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                self._meet(leaf.untyped_storage())
        if name in self._inside:
            inside = self._inside[name](args)
            self.inside[name] = max(self.inside.get(name, 0), inside)
            self.peak = max(self.peak, before + inside)
        self.peak = max(self.peak, self.live)
        return out

    def _meet(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.live += storage.nbytes()
        weakref.finalize(storage, self._part, key)

    def _part(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)


def _grouped_product(
    left: Tensor,
    right: Tensor,
    ends: Tensor | None = None,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The place of what torch's grouped product gives, whose own shapes without values are there
    for bfloat16 alone: rows of one side that belong to matrices of the other, in groups that end
    at `ends`."""
    groups = () if left.dim() + right.dim() == 5 else (len(left) if ends is None else len(ends),)
    return left.new_empty((*groups, left.shape[-2], right.shape[-1]), dtype=dtype)


def _on_paper(rank: int) -> Instead:
    """Where the tokens of all ranks come together, operators ask a group how many there are."""

    def gathered(x: Tensor, axis: int, sizes: Sequence[int], group: str) -> Tensor:
        return x.new_empty((*x.shape[:axis], sum(sizes), *x.shape[axis + 1 :]))

    def scattered(x: Tensor, axis: int, sizes: Sequence[int], group: str) -> Tensor:
        return x.new_empty((*x.shape[:axis], sizes[rank], *x.shape[axis + 1 :]))

    return {
        "aten::_grouped_mm": _grouped_product,
        "longspan::all_gather_tokens": gathered,
        "longspan::reduce_scatter_tokens": scattered,
    }


@dataclass(frozen=True)
class Wishes:
    """What a step will be like, as far as the model does not say."""

    strategy: Any
    dtype: torch.dtype | None = None
    optimizer: str = "adamw"
    shards: int = 1  #: ranks over which fully_shard spreads weights
    tiles: Any = None  #: what `parallelize` does in tiles
    on_host: bool = False  #: tiles of the loss are smaller on a CPU


class _OnPaper(Group):
    """A rank of a group that is not there: plans are made for it, while operators, which have
    nothing to send without values, know one rank alone."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self._rank, self._size = rank, ranks


def estimate(
    model: nn.Module, local: LocalBatch, layers: Sequence[AttentionLayer], wishes: Wishes
) -> Memory:
    """The memory of one training step with this share of a batch. The model is not changed."""
    weights, trained = _weights(model)
    twin = _twin(model, wishes.dtype)
    place = _OnPaper(local.cut.rank, local.cut.ranks)
    state = Parallelized(place, wishes.strategy, "head-tail", list(layers))
    offloads = wishes.tiles is not None and wishes.tiles.offload is not None
    if wishes.tiles is not None:  # what waits on the host is left out below
        state.tiles = dataclasses.replace(wishes.tiles, offload=None)
    set_up(twin, state)
    twin.train()
    attention = LocalAttention(local.cut, state.group, state.strategy, state.sights)
    inputs: dict[str, Any] = {
        key: value.to("meta") if isinstance(value, Tensor) else value
        for key, value in local.items()
    }
    inputs.update(state.inputs_of(attention))
    known = [*twin.parameters(), *twin.buffers()]
    if wishes.shards > 1:  # those of a block go as soon as they are there; shards are added below
        learned: list[Any] = list(twin.parameters())
        for parameter in learned:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_forget)
    of_attention, of_loss = _attention_bytes(attention, layers), _loss_bytes(wishes.on_host)
    live = LiveBytes({**of_attention, **of_loss}, known, _on_paper(local.cut.rank))
    marks: dict[str, int] = {}
    with _around_head(twin, live, marks), live:
        with _on_the_host(twin, inputs) if offloads else contextlib.nullcontext():
            out = twin(**inputs)
        loss = _number_of(out)
        del out
        has_head = "head" in marks
        marks.setdefault("head", live.live)
        ended = live.live
        loss.backward()  # type: ignore[no-untyped-call]
        last = live.since()
        marks["peak"] = max(marks.get("peak", 0), last)
    # Below a head that learns alone no gradient says where the loss has ended.
    made = marks.get("loss", last if has_head else 0)
    states = OPTIMIZERS[wishes.optimizer] * trained
    if wishes.shards > 1:
        beside = _gathered(model, wishes) + trained // wishes.shards
    else:  # gradients have the type of parameters, which wrappers cast
        beside = trained - _weights(twin)[1]
    return Memory(
        weights=weights // wishes.shards,
        gradients=trained // wishes.shards,
        optimizer=states // wishes.shards,
        kept=min(marks["head"], ended),
        attention=max(live.inside.get(name, 0) for name in of_attention),
        loss=max(0, made - marks["head"]),
        peak=(weights + states) // wishes.shards + marks["peak"] + beside,
    )


def _number_of(out: Any) -> Tensor:
    """What backward begins with. Of a decoder without a head nobody knows the loss, and the sum
    of its hidden states takes nothing."""
    for name in ("loss", "logits", "last_hidden_state"):
        found: Tensor | None = getattr(out, name, None)
        if found is not None:
            return found.float().sum() if name == "logits" else found.sum()
    raise ValueError(f"{type(out).__name__} has no loss, logits or hidden states")


def learns(model: nn.Module, local: LocalBatch) -> bool:
    """Whether a step with this batch has a backward."""
    given = [value for value in local.values() if isinstance(value, Tensor)]
    return any(one.requires_grad for one in (*model.parameters(), *given))


def _forget(parameter: Tensor) -> None:
    parameter.grad = None


def _weights(model: nn.Module) -> tuple[int, int]:
    """Bytes of parameters and buffers here, and of those parameters that learn."""
    everything = [*model.parameters(), *model.buffers()]
    learning = [p for p in model.parameters() if p.requires_grad]
    return sum(map(_size, everything)), sum(map(_size, learning))


def _size(tensor: Tensor) -> int:
    here = local_part(tensor.detach())
    return here.numel() * here.element_size()


def _gathered(model: nn.Module, wishes: Wishes) -> int:
    """Whole weights of two blocks, one that runs and the next, and the gradients of one."""
    blocks = [
        sum(p.numel() for p in block.parameters())
        for stack in model.modules()
        if isinstance(stack, nn.ModuleList)
        for block in stack
    ]
    dtype = wishes.dtype or next(model.parameters()).dtype
    return 3 * max(blocks, default=0) * dtype.itemsize


def _twin(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """The same modules with weights that take no memory."""
    model = getattr(model, "module", model) if _is_ddp(model) else looked_through(model)
    swapped: dict[int, Any] = {}
    for one in (*model.parameters(), *model.buffers()):
        kind = dtype if dtype is not None and one.is_floating_point() else one.dtype
        here = torch.empty(one.shape, dtype=kind, device="meta")
        if isinstance(one, nn.Parameter):
            here = nn.Parameter(here, requires_grad=one.requires_grad)
        swapped[id(one)] = here
    state = find_state(model)
    with contextlib.nullcontext() if state is None else state.put_aside():
        twin = copy.deepcopy(model, swapped)
    _experts_side_by_side(twin)
    return twin


def _experts_side_by_side(twin: nn.Module) -> None:
    """Experts that look for their tokens one after the other need values to find them. As one
    product of all, they keep as many rows of the same widths."""
    for module in twin.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "_experts_implementation", None) == "eager":
            config._experts_implementation = "grouped_mm"


def _is_ddp(model: nn.Module) -> bool:
    return isinstance(model, nn.parallel.DistributedDataParallel)


@contextlib.contextmanager
def _around_head(twin: Any, live: LiveBytes, marks: dict[str, int]) -> Iterator[None]:
    """Notes what is alive before the head makes logits, and the peak until its gradient is
    there."""
    head = twin.get_output_embeddings() if hasattr(twin, "get_output_embeddings") else None
    if not isinstance(head, nn.Module):
        yield
        return

    def before(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        marks["peak"] = max(marks.get("peak", 0), live.since())
        marks["head"] = live.live
        hidden: Any = inputs[0] if inputs else None
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            watched: Any = hidden
            watched.register_hook(after)

    def after(_: Tensor) -> None:
        marks["loss"] = live.since()
        marks["peak"] = max(marks.get("peak", 0), marks["loss"])

    handle = head.register_forward_pre_hook(before)
    try:
        yield
    finally:
        handle.remove()


# ---- What attention has for itself, as longspan/attention/passes.cpp makes it.


def _attention_bytes(attention: LocalAttention, layers: Sequence[AttentionLayer]) -> Inside:
    cut = attention.cut
    others = ("selects", "pools", "recurrence")
    plain = [one for one in layers if all(getattr(one, other) is None for other in others)]
    kinds = {(one.window, one.key_heads): one for one in plain}
    plans = [one.plan(cut, attention.strategy) for one in kinds.values()]
    trades = attention.strategy.name.startswith("head_parallel") and cut.ranks > 1

    def inside(args: Sequence[Any], forward: bool) -> int:
        q, k, v = _qkv(args[:3] if forward else args[1:4])
        own = q.element_size()
        sums = max(own, 4)
        answer = q.numel() // max(q.shape[-1], 1) * v.shape[-1]
        row = (k.numel() + v.numel()) // max(k.shape[2], 1)  # keys and values of a token
        moves = row * max(
            (
                held * own + (0 if forward else found * sums)
                for made in plans
                for held, found in _moments(made)
            ),
            default=0,
        )
        gradients = q.numel() + k.numel() + v.numel()
        if forward:
            if not moves and not trades:
                return answer * sums
            return moves + 2 * answer * sums + (gradients + answer) * own * trades
        traded = (gradients + 2 * answer) * own + gradients * sums
        if own < sums:
            traded += gradients * own
        return moves + gradients * sums + traded * trades

    #: Rows of the whole stream for one of this rank, where they are gathered.
    spread = cut.ownership.tokens / max(cut.local_tokens, 1) if cut.ranks > 1 else 0

    def copies(args: Sequence[Any], layout: int) -> float:
        """0 where the caller brought the rows of other ranks itself."""
        return spread if len(args) > layout and args[layout] is not None else 0

    def selecting(args: Sequence[Any]) -> int:
        k = args[1]
        return int(_size(k) * copies(args, 8))

    def selected(args: Sequence[Any]) -> int:
        q: Tensor = args[0]
        kv: Tensor = args[1]
        heads = q.numel() // max(q.shape[-1], 1)
        channels = int(args[5]) or kv.shape[-1]
        return int(_size(kv) * copies(args, 6)) + heads * (channels * q.element_size() + 4)

    def selected_backward(args: Sequence[Any]) -> int:
        q, kv = args[1:3]
        sums = kv.numel() * max(kv.element_size(), 4)
        held = copies(args, 10)
        rows = (_size(kv) + sums) * held if held else sums
        return int(rows) + _size(q) + _size(kv)

    return {
        "longspan::attend": functools.partial(inside, forward=True),
        "longspan::attend_backward": functools.partial(inside, forward=False),
        "longspan::select_keys": selecting,
        "longspan::attend_selected": selected,
        "longspan::attend_selected_backward": selected_backward,
    }


def _qkv(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = tensors
    return q, k, v


def _moments(made: _C.Plan) -> Iterator[tuple[int, int]]:
    """Of every moment of a pass: tokens whose keys are here, this step's and the next one's,
    and tokens whose gradients are, those found and those that come home."""
    keys = [_tokens(step.keys) for step in made.steps]
    if len(keys) < 2:
        return
    homecomings = [sum(_tokens(ranges) for _, ranges in step.homecomings) for step in made.steps]
    under_way = 0
    for i, here in enumerate(keys):
        held = here + (keys[i + 1] if i + 1 < len(keys) else 0)
        found = here if i else 0
        yield held, found + under_way
        under_way = found + homecomings[i]
        yield held, under_way


def _tokens(ranges: Sequence[Any]) -> int:
    return sum(one.end - one.begin for one in ranges)


# ---- A loss in tiles, as longspan/ops/linear_cross_entropy.cpp makes it.

#: Bytes of the logits of a tile, where nobody says how many tokens it has.
_HOST_TILE, _DEVICE_TILE = 18 << 20, 2 << 30


def _loss_bytes(on_host: bool) -> Inside:
    def inside(args: Sequence[Any]) -> int:
        hidden, weight, asked = args[0], args[1], args[9]
        own = hidden.element_size()
        sums = max(own, 4)
        tokens, words = hidden.shape[0], weight.shape[0]
        most = _HOST_TILE if on_host else _DEVICE_TILE
        tile = min(tokens, asked or max(1, most // (words * sums)))
        half = own < sums
        logits = tile * words * (sums + own * half)
        # Half types of a CPU have their products beside the sums.
        spare = (tile * words + weight.numel()) * own * (half and on_host)
        return int(logits + weight.numel() * (sums + own * half) + hidden.nbytes + spare)

    return {"longspan::linear_cross_entropy": inside}


@contextlib.contextmanager
def _on_the_host(twin: Any, inputs: dict[str, Any]) -> Iterator[None]:
    """What layers take waits for backward elsewhere, as offload="hidden" does it."""
    shape = shape_of_inputs(twin, inputs)

    def away(tensor: Tensor) -> Any:
        there = tensor.shape == shape and tensor.is_floating_point()
        return tensor.dtype if there else tensor

    def back(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        return torch.empty(shape, dtype=kept, device="meta")

    with torch.autograd.graph.saved_tensors_hooks(away, back):
        yield


def fits_in(memory: Memory, device: str) -> str:
    """ "fits in 141 GB: yes, 71", or "" where nobody knows the device's memory."""
    total = DEVICES.get(device)
    if total is None:
        return ""
    needed = memory.peak / 1e9
    return f"fits in {total} GB: {'yes' if needed <= total else 'no'}, {needed:.0f}"
