"""Tiles along the sequence: what a model makes of its tokens one by one need not exist for
all of them at once.

`loss_tile`: the logits. The output layer makes losses from hidden states, tile by tile,
and logits never leave it. What a family does to its logits before the loss is seen on
the twin that let the model in: numbers in place of logits come out as their multiple, capped
or not.

`mlp_tile`: what lies inside of feed-forward modules. A layer's modules beside attention act
on tokens one by one (the proof's *isolation*), so they can be called with some tokens after
others, and again in backward.

`offload="hidden"`: the inputs of layers, which gradient checkpointing keeps, wait for backward
in memory of the host.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longspan._arguments import check_whole, is_whole, wrong
from longspan._cross_entropy import linear_cross_entropy
from longspan._hooks import guests_of, home_of, name_of
from longspan._local_batch import KEYWORD
from longspan._models import LocalAttention, Parallelized
from longspan._twins import kind_of
from longspan._walking import walked
from longspan._wrappings import is_fully_sharded, is_sharded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Logits in float32 from which on "auto" makes them in tiles, in bytes.
_WORTH_TILES = 256 << 20
_ASKED = "output_logits"
#: What the loss of a call comes from; with tiles the model itself sees none of it.
_TARGETS = ("labels", "shift_labels", "num_items_in_batch")


class CannotTile(Exception):
    """Why the logits of a model cannot be made in tiles."""


#: What models raise that do not run as they are called.
STUMBLES = (RuntimeError, TypeError, ValueError, AttributeError, IndexError)


@dataclass(frozen=True)
class Tail:
    """What a family does to the output layer's answer: times `scale`, then capped."""

    scale: float
    softcap: float | None
    #: Numbers that models keep for it beside the configuration: (module, name, value).
    kept: tuple[tuple[str, str, Any], ...] = ()

    def other(self, part: nn.Module) -> str | None:
        """The first of these numbers that is another in a model, in words."""
        for name, key, value in self.kept:
            now = getattr(part.get_submodule(name), key, None)
            if now != value:
                whose = f"'{name}'" if name else kind_of(part).__name__
                return f"`{key}` of {whose} is {now}, and its configuration made it {value}"
        return None

    def of(self, x: Tensor) -> Tensor:
        scaled = x * self.scale
        if self.softcap is None:
            return scaled
        return self.softcap * torch.tanh(scaled / self.softcap)

    def __str__(self) -> str:
        parts = [f"times {self.scale:g}"] if self.scale != 1 else []
        parts += [f"capped at {self.softcap:g}"] if self.softcap is not None else []
        return ", ".join(parts) or "as they are"


@dataclass(frozen=True)
class Tiles:
    """What `parallelize` was asked to do in tiles."""

    loss: str | int | None = None
    mlp: int | None = None
    offload: str | None = None
    #: Of each model, for its loss; or why it has none.
    tails: tuple[Tail | str, ...] = ()

    @staticmethod
    def of(loss: Any, mlp: Any, offload: Any) -> Tiles:
        who = "parallelize"
        if loss is not None and loss != "auto":
            if not is_whole(loss):
                raise wrong(who, "loss_tile", loss, '"auto", a number of tokens or None')
            check_whole(who, "loss_tile", loss, 1)
        if mlp is not None:
            check_whole(who, "mlp_tile", mlp, 1)
        if offload not in (None, "hidden"):
            raise ValueError(f'{who}: `offload` is {offload!r}; expected "hidden" or None')
        return Tiles(loss, mlp, offload)


def redirect(parts: Sequence[PreTrainedModel], state: Parallelized) -> None:
    """Does in tiles what `state.tiles` says, and notes it in words."""
    tiles: Tiles | None = state.tiles
    if tiles is None:
        return
    for part, tail in zip(parts, tiles.tails, strict=False):
        if isinstance(tail, str):
            state.tiled.append(f"loss: whole logits; {tail}")
        else:
            tile_loss(part, tail, tiles.loss, state)
            size = "of a size that fits" if tiles.loss == "auto" else f"of {tiles.loss} tokens"
            when = " from 256 MiB of logits on" if tiles.loss == "auto" else ""
            state.tiled.append(f"loss: in tiles {size}{when}, logits {tail}")
    for part in parts if tiles.mlp is not None else ():
        assert tiles.mlp is not None
        done, left = tile_feed_forwards(part, tiles.mlp, state)
        state.tiled.append(f"feed-forward: {done} modules in tiles of {tiles.mlp} tokens")
        if left:
            state.tiled.append(f"feed-forward: not in tiles, for their experts: {left[0]}, ...")
    for part in parts if tiles.offload is not None else ():
        offload_layers(part, state)
        state.tiled.append("layer inputs: kept on the host")


def _replace_forward(part: Any, function: Callable[..., Any], state: Parallelized) -> None:
    """By a method with the signature of the class's own, which trainers look at."""
    wrapped = functools.wraps(type(part).forward)(function)
    state.replace(part, "forward", types.MethodType(wrapped, part))


# ---- The loss.


def head_of(part: PreTrainedModel) -> nn.Linear:
    """The output layer of a causal model."""
    name = type(part).__name__
    if "ForCausalLM" not in name and "LMHead" not in name:
        raise CannotTile(f"{name} makes no loss of the next tokens")
    head: Any = part.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head is None or kind_of(head) is not nn.Linear:
        raise CannotTile(f"the output layer of {name} is {type(head).__name__}, not nn.Linear")
    assert isinstance(head, nn.Linear)
    hooks = not is_fully_sharded(head) and (head._forward_hooks or head._forward_pre_hooks)
    if hooks or guests_of(head) or "forward" in vars(head):
        raise CannotTile(f"somebody looks into the output layer of {name}")
    return head


def _hook_on(head: nn.Module) -> Any:
    """One that wants the logits of an output layer or their gradient, or None. Those before the
    layer see what they always do, and fully_shard's own do without."""
    for hooks in (head._forward_hooks, head._backward_hooks, head._backward_pre_hooks):
        for hook in hooks.values():
            if not home_of(hook).startswith(("torch.distributed.", "longspan._hooks")):
                return hook
    return None


def tail_of(twin: PreTrainedModel, ids: Tensor) -> Tail:
    """Seen on a twin whose output layer answers with numbers of our choice."""
    name = type(twin).__name__
    head = head_of(twin)
    wide = torch.tensor([1e-6, 1e9], dtype=torch.float64)
    numbers = torch.linspace(-90, 90, max(8, head.out_features - 2), dtype=torch.float64)
    given = torch.cat([wide, numbers])[: head.out_features]
    if given.numel() < 8:
        raise CannotTile(f"{name} has too few words to tell what it does to logits")
    try:
        vars(head)["forward"] = lambda x: given.expand(*x.shape[:-1], -1).to(x.dtype)
        with torch.no_grad():
            out = twin(input_ids=ids, use_cache=False).logits
    finally:
        del vars(head)["forward"]
    if out.shape[-1] != given.numel():
        raise CannotTile(f"{name} keeps {out.shape[-1]} of {given.numel()} logits")
    seen = out.double()
    scale = _rounded(float(seen[0, 0, 0]) / 1e-6)
    end = float(seen[0, 0, 1])
    capped = abs(end - scale * 1e9) > 1e-3 * abs(scale) * 1e9
    tail = Tail(scale, _rounded(abs(end)) if capped else None)
    if not torch.allclose(seen, tail.of(given).expand_as(seen), rtol=1e-5, atol=1e-5):
        raise CannotTile(f"{name} does more to its logits than to scale and cap them")
    return tail


#: Parts of the names of numbers that models may do to logits.
_TAILS = ("logit", "scal", "multiplier", "cap")


def kept_numbers(twin: PreTrainedModel, ids: Tensor, tail: Tail) -> Tail:
    """With those numbers on the modules of a twin that change what it does to logits."""
    from transformers import PreTrainedModel

    found = []
    for name, module in walked(twin):
        for key, value in list(vars(module).items()) if isinstance(module, PreTrainedModel) else ():
            if not any(part in key for part in _TAILS) or isinstance(value, bool):
                continue
            if value is None or (
                isinstance(value, (int, float)) and _matters(twin, ids, tail, module, key)
            ):
                found.append((name, key, value))
    return dataclasses.replace(tail, kept=tuple(found))


def _matters(twin: PreTrainedModel, ids: Tensor, tail: Tail, module: nn.Module, key: str) -> bool:
    value = vars(module)[key]
    vars(module)[key] = 2 * value + 1
    try:
        return tail_of(twin, ids) != tail
    except (CannotTile, *STUMBLES):
        return True
    finally:
        vars(module)[key] = value


def _rounded(number: float) -> float:
    """Families compute this in float32; a configuration has few digits."""
    few = float(f"{number:.6g}")
    return few if abs(few - number) <= 3e-7 * abs(number) else number


class TiledLoss:
    """The output layer of one model. While a loss is wanted it answers with the sum of its
    tokens' losses in place of logits."""

    def __init__(self, part: PreTrainedModel, head: nn.Linear, tail: Tail, tile: Any) -> None:
        self.part = part
        self.head = head
        self.tail = tail
        self.tile: int | None = None if tile == "auto" else int(tile)
        self.labels: Tensor | None = None
        self.loss: Tensor | None = None

    def answer(self, hidden: Tensor) -> Tensor:
        """In place of the layer's `forward`. The loss is made inside of it, where wrappers
        have the whole weight at hand, and what it returns is what they wait for in
        backward."""
        weight, bias = self.head.weight, self.head.bias
        if self.labels is None:
            return nn.functional.linear(hidden, weight, bias)
        found = linear_cross_entropy(
            hidden,
            weight,
            self.labels.to(hidden.device),
            bias,
            softcap=self.tail.softcap,
            scale=self.tail.scale,
            tile=self.tile,
        )
        self.loss = found.loss.view(1, 1, 1)
        return self.loss

    def _otherwise(self) -> str | None:
        """What came since the model was parallelized: another number for its logits, or a hook,
        which gets a loss in place of logits, and what it makes of it reaches nobody."""
        hook = _hook_on(self.head)
        if hook is None:
            return self.tail.other(self.part)
        name = next((n for n, one in self.part.named_modules() if one is self.head), "the head")
        return f"'{name}' has the hook {name_of(hook)} now"

    def wants(self, options: dict[str, Any]) -> bool:
        """Whether a call is for its loss alone, and worth it."""
        labels = options.get("shift_labels")
        if not isinstance(labels, Tensor) or options.get("return_dict") is False:
            return False
        if not isinstance(options.get(KEYWORD), LocalAttention):
            return False
        if is_sharded(self.head.weight) and not is_fully_sharded(self.head):
            return False  # whatever cut it does not put it together for this
        why = None if torch.compiler.is_compiling() else self._otherwise()
        if why is not None:
            if self.tile is None:
                return False  # logits, as models make them
            raise NotImplementedError(
                f"{type(self.part).__name__}: {why}, so loss_tile={self.tile} would give another "
                f"loss; put that back, call with output_logits=True, or restore the model and "
                f"parallelize it with loss_tile=None"
            )
        words: int = self.head.out_features
        return self.tile is not None or labels.numel() * words * 4 > _WORTH_TILES


def tile_loss(part: PreTrainedModel, tail: Tail, tile: Any, state: Parallelized) -> None:
    """Lets a causal model make its loss in tiles, where a call asks for no logits."""
    head = head_of(part)
    tiled = TiledLoss(part, head, tail, tile)
    state.replace(head, "forward", tiled.answer)
    original = part.forward

    def forward(_: Any, *arguments: Any, **options: Any) -> Any:
        asked = options.pop(_ASKED, False)
        if asked or not tiled.wants(options):
            return original(*arguments, **options)
        labels = options["shift_labels"]
        count = options.get("num_items_in_batch")
        for key in _TARGETS:
            options.pop(key, None)
        tiled.labels = labels
        try:
            out = original(*arguments, **options)
            loss = tiled.loss
        finally:
            tiled.labels = tiled.loss = None
        assert loss is not None
        total = loss.sum()
        divisor = (labels != -100).sum() if count is None else count
        if isinstance(divisor, Tensor):
            divisor = divisor.to(total.device)
        # What stands in place of logits is no logits.
        fields = {key: value for key, value in out.items() if key != "logits"}
        return type(out)(loss=total / divisor, **fields)

    _replace_forward(part, forward, state)


# ---- Feed-forward modules.


def feed_forwards(part: nn.Module, routers: set[int]) -> Iterator[tuple[str, nn.Module, bool]]:
    """The modules beside attention that multiply, with their names; whether they choose
    experts."""
    from longspan._transformers import is_attention

    for name, module in part.named_modules():
        children = dict(module.named_children())
        if not any(is_attention(child) for child in children.values()):
            continue
        for key, child in children.items():
            inside = list(child.modules())
            if any(is_attention(one) for one in inside):
                continue
            if any(isinstance(one, nn.Linear) for one in inside):
                yield f"{name}.{key}", child, any(id(one) in routers for one in inside)


def tile_feed_forwards(
    part: PreTrainedModel, tile: int, state: Parallelized
) -> tuple[int, list[str]]:
    """Calls them with `tile` tokens at a time, and again in backward; how many, and the names
    of those with experts, which are left alone: what routers give is counted by call."""
    from longspan._routers import router_modules

    done, left = 0, []
    for name, module, chooses in feed_forwards(part, {id(one) for one in router_modules(part)}):
        if chooses:
            left.append(name)
        else:
            state.replace(module, "forward", _in_tiles(module.forward, tile))
            done += 1
    return done, left


def _in_tiles(original: Callable[..., Any], tile: int) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(*arguments: Any, **options: Any) -> Any:
        x = arguments[0] if len(arguments) == 1 and not options else None
        if not isinstance(x, Tensor) or x.dim() < 2 or x.shape[-2] <= tile:
            return original(*arguments, **options)
        parts = torch.split(x, tile, dim=-2)
        if not torch.is_grad_enabled():
            made = [original(part) for part in parts]
        else:
            made = [checkpoint(original, part, use_reentrant=False) for part in parts]
        if not all(isinstance(one, Tensor) and one.shape[-2] == part.shape[-2]
                   for one, part in zip(made, parts, strict=True)):  # fmt: skip
            return original(x)  # it answers with something else than its tokens
        return torch.cat(made, dim=-2)

    return forward


# ---- Layer inputs on the host.


class HostMemory:
    """Tensors of one shape that wait for backward in pinned memory: copied out behind the
    work that goes on, and copied back one ahead of what asks for them."""

    def __init__(self, like: torch.Size, device: torch.device) -> None:
        self.shape = like
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.kept: list[_Away] = []

    def pack(self, tensor: Tensor) -> Any:
        if tensor.shape != self.shape or not tensor.is_cuda or not tensor.is_floating_point():
            return tensor
        away = _Away(len(self.kept), tensor, self.stream)
        self.kept.append(away)
        return away

    def unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _Away):
            return packed  # type: ignore[no-any-return]
        packed.come_back(self.stream)
        if packed.number > 0:
            self.kept[packed.number - 1].come_back(self.stream)
        return packed.here()


class _Away:
    """A tensor on the host."""

    def __init__(self, number: int, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        self.number = number
        self.device = tensor.device
        self.back: Tensor | None = None
        self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self.host.copy_(tensor.detach(), non_blocking=True)
        tensor.record_stream(stream)

    def come_back(self, stream: torch.cuda.Stream) -> None:
        if self.back is None:
            with torch.cuda.stream(stream):
                self.back = self.host.to(self.device, non_blocking=True)
                self.arrived = stream.record_event()

    def here(self) -> Tensor:
        assert self.back is not None
        current = torch.cuda.current_stream(self.device)
        current.wait_event(self.arrived)
        self.back.record_stream(current)
        found, self.back = self.back, None
        return found


def shape_of_inputs(part: Any, options: Mapping[str, Any]) -> torch.Size:
    """Of what every layer takes, in a call with these arguments."""
    rows = options.get("input_ids")
    tokens = options["inputs_embeds"] if rows is None else rows
    return torch.Size((*tokens.shape[:2], part.config.get_text_config().hidden_size))


def check_offload(who: str, part: Any) -> None:
    """That there is something to keep on the host."""
    if not getattr(part, "is_gradient_checkpointing", False):
        raise ValueError(
            f'{who}: offload="hidden" moves what gradient checkpointing keeps, and that is off; '
            f"call model.gradient_checkpointing_enable() first"
        )


def offload_layers(part: PreTrainedModel, state: Parallelized) -> None:
    """Keeps the inputs of checkpointed layers on the host."""
    original = part.forward

    def forward(_: Any, *arguments: Any, **options: Any) -> Any:
        local = options.get(KEYWORD)
        learns = part.training and torch.is_grad_enabled()
        if not learns or not isinstance(local, LocalAttention):
            return original(*arguments, **options)
        check_offload(type(part).__name__, part)
        first = next(t for t in options.values() if isinstance(t, Tensor))
        if not first.is_cuda:
            _say_once()
            return original(*arguments, **options)
        host = HostMemory(shape_of_inputs(part, options), first.device)
        with torch.autograd.graph.saved_tensors_hooks(host.pack, host.unpack):
            return original(*arguments, **options)

    _replace_forward(part, forward, state)


@functools.cache
def _say_once() -> None:
    warnings.warn(
        'parallelize: offload="hidden" does nothing here: the tensors are on the host already',
        stacklevel=3,
    )
