"""Models under context parallelism: one call before training, one for each batch.

group = longspan.Group.from_environment()
model = longspan.parallelize(model, group)
local = longspan.shard(batch, group, model=model)
loss = model(**local).loss
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from longspan import _C, dsa
from longspan._agreement import Agreement
from longspan._arguments import check_flags, check_kind, speaking_as, wrong
from longspan._attention import AttentionLayout, attend, layout_named, plan
from longspan._group import Group, ranks_of
from longspan._hooks import Guest, Lookout, guests_in
from longspan._local_batch import KEYWORD, real_tokens
from longspan._pools import HaloPlan, PoolPlan, tokens_before
from longspan._remarks import Targets
from longspan._scans import Borders, Scans
from longspan._settings import Settings
from longspan._sources import Sources
from longspan._states import StatePlan
from longspan._steps import guard, unguard
from longspan._strategy import Strategy
from longspan._twins import Kinds
from longspan._walking import MARK, modules_in, still

Model = TypeVar("Model", bound=torch.nn.Module)

#: The layout that each batch's documents ask for.
AUTO = "auto"

#: What the queries of a layer see: so many keys (None is causal), and how far tokens of
#: a group see in it (None: no further than any).
Sight = tuple[int | None, str | None]
#: Tokens that see each other both ways, for each row or the stream; () where there are none.
Groups = Sequence[Sequence[_C.TokenRange]]


@dataclass(frozen=True)
class Selection:
    """How an indexer selects the keys of a layer."""

    slots: int  #: keys of a query, at most
    heads: int  #: of the indexer
    head_dim: int
    shared: bool = False  #: taken over from an earlier layer


@dataclass(frozen=True)
class Pooling:
    """Pools of tokens that a layer sees beside its window; rows of keys come over the
    borders of a share, and attention looks at lists of them."""

    ratio: int | None = None  #: tokens of a pool; None: there are none
    overlap: bool = False  #: whether a pool looks at the window before its own
    #: How an indexer selects among them; None: a token sees all that have ended.
    selects: Selection | None = None


#: Bytes of a transition and of a state, and the rows of a transition that is a matrix.
Pair = tuple[int, int, int]


@dataclass(frozen=True)
class Recurrence:
    """A layer that does not attend: a convolution of tokens, and a state that runs through
    each document. Rows come over the borders of a share, and states are carried."""

    kernel: int  #: tokens that the convolution sees
    channels: int  #: that it has
    #: What a run makes of a state: "matrix", "vector", "number" for each head; None: there
    #: is no state.
    transition: str | None = None
    heads: int = 1
    rows: int = 1  #: of the state of a head
    columns: int = 1
    chunk: int = 1  #: of its scan
    doubles: bool = False  #: whether float64 layers have float64 states

    def itemsize(self, dtype: torch.dtype) -> int:
        """Of the numbers of a state."""
        return 8 if self.doubles and dtype == torch.float64 else 4

    def bytes_of_state(self, itemsize: int) -> tuple[int, int]:
        """Of the transition and the state of one run, in the type of sums."""
        if self.transition is None:
            return 0, 0
        per_head = {"matrix": self.rows * self.rows, "vector": self.rows, "number": 1}
        size = self.heads * itemsize
        return per_head[self.transition] * size, self.rows * self.columns * size

    @property
    def pair(self) -> Pair:
        """What a way for its pairs is chosen by (`StatePlan`), in float32, so that the
        choice is the same in every type: bytes of a transition, of a state, and rows of a
        transition that is a matrix."""
        return *self.bytes_of_state(4), self.rows if self.transition == "matrix" else 1

    def way(self, ownership: _C.Ownership, masks: Sequence[_C.Mask], rows: int) -> str:
        """How its pairs travel in such a batch: as `LocalAttention.scans` has it."""
        return _C.StatePlan.choose(ownership, masks, rows, *self.pair)


@dataclass(frozen=True)
class AttentionLayer:
    """What one attention layer computes, as far as its module says."""

    name: str
    heads: int
    key_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None
    softcap: float | None = None
    sink: bool = False
    #: How far tokens of a group see in it (`Mask.with_group_reach`), if it knows groups.
    groups: str | None = None
    #: Attention to selected keys: `key_heads` is 1, and a value is the first channels of
    #: its key.
    selects: Selection | None = None
    #: A window whose rows are listed, and pools: `key_heads` is 1, and keys are values.
    pools: Pooling | None = None
    #: No attention at all: `head_dim` and `value_dim` are the rows and columns of a state.
    recurrence: Recurrence | None = None

    def masks(self, cut: _C.Cut, groups: Groups = ()) -> list[_C.Mask]:
        """Who sees whom in it, for each row or the stream of a batch."""
        return masks_for(cut, (self.window, self.groups), groups)

    def plan(self, cut: _C.Cut, strategy: Strategy, groups: Groups = ()) -> _C.Plan:
        """What one rank computes and sends in it for a batch."""
        return plan(
            cut.ownership,
            self.masks(cut, groups),
            strategy=strategy,
            rank=cut.rank,
            key_heads=self.key_heads,
            rows=len(cut.packings),
        )


class Inventory(NamedTuple):
    """What a model consisted of when it was let in."""

    part: torch.nn.Module
    fingerprint: tuple[Any, ...]
    kinds: Kinds  #: names for those who differ later
    sources: Sources


@dataclass
class Parallelized:
    """What `parallelize` did to a model, and what `shard` must know about it."""

    group: Group
    strategy: Strategy
    layout: str | _C.Ownership
    layers: list[AttentionLayer]
    #: Of a document's first token, in the model's own counting.
    first_position: int = 0
    #: What let the model in, in words.
    proof: str = ""
    #: The configuration of a model that reads images, and of its towers.
    eyes: Any = None
    #: What is done in tiles (`longspan._tiles`), and what is not, in words.
    tiles: Any = None
    tiled: list[str] = field(default_factory=list)
    #: The models inside.
    seen: list[Inventory] = field(default_factory=list)
    #: What their configurations and layers said.
    settings: Settings | None = None
    #: Hooks of users that were there.
    guests: list[Guest] = field(default_factory=list)
    #: Who looks for others in calls.
    lookout: Lookout | None = None
    #: Where the model looks for ready masks, in the mapping it takes as attention_mask.
    masks: tuple[str, ...] = ()
    #: What `restore` puts back: (object, attribute, value or _ABSENT).
    undo: list[tuple[Any, str, Any]] = field(default_factory=list)
    #: Configurations that got a copy: (the user's, ours, ours as it was made).
    configs: list[tuple[Any, Any, dict[str, Any]]] = field(default_factory=list)
    #: Looks at calls: (how to begin, handle to end it).
    hooks: list[tuple[Callable[[], Any], Any]] = field(default_factory=list)
    #: What was remarked on already, and how often somebody looked.
    remarks: Counter[str] = field(default_factory=Counter)

    @property
    def sights(self) -> list[Sight]:
        """Each kind of mask that its layers need, once."""
        return list(dict.fromkeys((layer.window, layer.groups) for layer in self.layers))

    def inputs_of(self, attention: LocalAttention) -> dict[str, Any]:
        """How a call of the model hears of its batch: by a keyword that reaches attention, and
        where the model looks for masks that are ready."""
        masks = {"attention_mask": dict.fromkeys(self.masks, attention)} if self.masks else {}
        return {KEYWORD: attention, **masks}

    def layout_for(self, wish: str | _C.Ownership | None = None) -> str | _C.Ownership:
        """How a batch is cut, where a wish for it alone comes before the model's. Every run is
        a border that states cross, so "auto" means few of them where layers have any."""
        layout = self.layout if wish is None else wish
        carried = [layer.recurrence is not None for layer in self.layers]
        if isinstance(layout, str) and layout == AUTO and any(carried):
            return "contiguous-rows" if all(carried) else "head-tail"
        return layout

    def replace(self, owner: Any, attribute: str, value: Any) -> None:
        """Sets an attribute of one instance and remembers what was there."""
        self.undo.append((owner, attribute, vars(owner).get(attribute, _ABSENT)))
        vars(owner)[attribute] = value

    def look_before(self, module: torch.nn.Module, function: Callable[..., Any]) -> None:
        """Calls it with the arguments of every call of one instance."""
        self._look(functools.partial(module.register_forward_pre_hook, function, with_kwargs=True))

    def look_after(self, module: torch.nn.Module, function: Callable[..., None]) -> None:
        """Calls it with the arguments and the output of every call of one instance."""
        self._look(functools.partial(module.register_forward_hook, function, with_kwargs=True))

    def _look(self, begin: Callable[[], Any]) -> None:
        self.hooks.append((begin, begin()))

    def put_back(self) -> None:
        """Undoes it all, the last change first; edits of our configurations are kept."""
        for _, handle in self.hooks:
            handle.remove()
        self.hooks.clear()
        if self.lookout is not None:
            self.lookout.end()
        for original, ours, before in self.configs:
            keep_edits(ours, original, before)
        while self.undo:
            owner, attribute, value = self.undo.pop()
            if value is _ABSENT:
                vars(owner).pop(attribute, None)
            else:
                vars(owner)[attribute] = value

    @contextlib.contextmanager
    def put_aside(self) -> Iterator[None]:
        """The plain model inside, then everything as it was: the same objects, so that
        what was compiled stays valid."""
        replaced = [(owner, name, vars(owner)[name]) for owner, name, _ in self.undo]
        hooks = [begin for begin, _ in self.hooks]
        self.put_back()
        plain = [vars(original).copy() for original, _, _ in self.configs]
        try:
            yield
        finally:
            for (original, ours, before), then in zip(self.configs, plain, strict=True):
                keep_edits(original, ours, then)
                before.update(vars(ours))
            for owner, name, value in replaced:
                self.replace(owner, name, value)
            for begin in hooks:
                self._look(begin)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a parallelized model cannot be copied or pickled whole, since its group stays in this "
            "process; restore the model, copy it, and parallelize both (a state_dict is fine)"
        )


class _Absent:
    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()


def keep_edits(edited: Any, kept: Any, before: dict[str, Any]) -> None:
    """Writes what changed in one configuration since `before` into another, but for which
    attention it names."""
    for key, value in vars(edited).items():
        if key != "_attn_implementation_internal" and (
            key not in before or (before[key] is not value and before[key] != value)
        ):
            vars(kept)[key] = value


def masks_for(cut: _C.Cut, sight: Sight, groups: Groups = ()) -> list[_C.Mask]:
    """Causal inside documents, with a window only that many keys, and tokens of a group
    both ways."""
    window, reach = sight
    masks = [
        _C.Mask.causal(packing) if window is None else _C.Mask.sliding(packing, window)
        for packing in cut.packings
    ]
    if reach is None or not groups:
        return masks
    return [
        mask.with_groups(own).with_group_reach(reach)
        for mask, own in zip(masks, groups, strict=True)
    ]


@dataclass(frozen=True)
class WholeBatch:
    """A batch before it was cut, and how: tensors of other tokens are cut the same way."""

    rows: _C.RowBatch
    cut: Callable[[_C.RowBatch], dict[str, torch.Tensor]]


class LocalAttention:
    """How one rank's tokens of one batch attend: the layout of each kind of layer,
    and the group. `shard` puts it into the batch, and the model's own call carries
    it to every attention layer.

    Neither a tensor nor a dataclass: wrappers that move or cast what they find in
    keyword arguments leave it alone, and the layouts stay on the host."""

    def __init__(
        self,
        cut: _C.Cut,
        group: Group,
        strategy: Strategy,
        sights: Sequence[Sight],
        groups: Groups = (),
    ) -> None:
        self.cut = cut
        self.group = group
        self.strategy = strategy
        self.groups = groups
        self.targets: Targets | None = None  #: of the batch; None where nobody asks
        #: Where features of pictures go, by kind; see `longspan._images`.
        self.routes: Mapping[str, Any] = {}
        self.whole: WholeBatch | None = None  #: what it was cut from
        self._layouts: dict[Sight, AttentionLayout] = {}
        for window, reach in ((None, None), *sights):
            self.layout(window, reach)
        self._halos: dict[int, HaloPlan] = {}
        self._pools: dict[tuple[int, bool], PoolPlan] = {}
        self._borders: dict[int, Borders] = {}
        self._scans: dict[tuple[int, Pair], Scans] = {}

    def prepare(self, layers: Sequence[AttentionLayer]) -> None:
        """Makes the plans of these layers, which compiled code cannot."""
        for layer in layers:
            if layer.recurrence is not None:
                self.borders(layer.recurrence.kernel - 1)
                if layer.recurrence.transition is not None:
                    self.scans(layer.recurrence.chunk, layer.recurrence.pair)
            if layer.pools is None:
                continue
            host = torch.device("cpu")
            if layer.window is not None:
                self.halo(layer.window - 1).seen(host)
            if layer.pools.ratio is not None:
                pools = self.pools(layer.pools.ratio, layer.pools.overlap)
                if layer.pools.selects is None:
                    pools.ended(host)

    def halo(self, count: int) -> HaloPlan:
        """The tokens before each run of [B, L, ..]."""
        found = self._halos.get(count)
        if found is None:
            rows = len(self.cut.packings)
            found = HaloPlan(self.layout(), count, group=self.group, rows=rows)
            self._halos[count] = found
        return found

    def pools(self, ratio: int, overlap: bool) -> PoolPlan:
        """Pools of the tokens of [B, L, ..]."""
        found = self._pools.get((ratio, overlap))
        if found is None:
            rows = len(self.cut.packings)
            found = PoolPlan(self.layout(), ratio, overlap=overlap, group=self.group, rows=rows)
            self._pools[ratio, overlap] = found
        return found

    def borders(self, count: int) -> Borders:
        """Where convolutions that look so many tokens back look over the borders of runs."""
        found = self._borders.get(count)
        if found is None:
            found = Borders(self.halo(count), self.cut.local_tokens, real_tokens(self.cut))
            self._borders[count] = found
        return found

    def scans(self, chunk: int, pair: Pair) -> Scans:
        """How the runs of [B, L, ..] are scanned by kernels with such chunks, and states of
        such pairs carried."""
        found = self._scans.get((chunk, pair))
        if found is None:
            rows = len(self.cut.packings)
            transition, state, matrix_rows = pair
            plan = StatePlan(
                self.layout(),
                group=self.group,
                rows=rows,
                bytes_per_transition=transition,
                bytes_per_state=state,
                matrix_rows=matrix_rows,
            )
            found = Scans(plan, chunk, self.cut.local_tokens, rows)
            self._scans[chunk, pair] = found
        return found

    def tokens_before(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """Of [B, L, ..] the tokens before each run: [runs * count, ..]."""
        return tokens_before(x, self.halo(count), group=self.group)

    def layout(self, window: int | None = None, groups: str | None = None) -> AttentionLayout:
        """Owners and masks of layers with this window (None is causal), whose tokens of a
        group see so far in it (None: no further than any)."""
        found = self._layouts.get((window, groups))
        if found is None:
            found = self._layouts[window, groups] = self._layout_for((window, groups))
        return found

    def _layout_for(self, sight: Sight) -> AttentionLayout:
        window, reach = sight
        if reach is not None and not self.groups:
            return self.layout(window)  # the same, and made once
        return AttentionLayout(self.cut.ownership, masks_for(self.cut, sight, self.groups))

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        window: int | None = None,
        groups: str | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sink: torch.Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> torch.Tensor:
        """q, k and v [B, H, L, D] of this rank's tokens; [B, H, L, Dv] comes back."""
        out = attend(
            q,
            k,
            v,
            attention=self.layout(window, groups),
            group=self.group,
            strategy=self.strategy,
            scale=scale,
            softcap=softcap,
            sink=sink,
            dropout_p=dropout_p,
        )
        assert isinstance(out, torch.Tensor)
        return out

    def select_keys(
        self, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, *, slots: int
    ) -> torch.Tensor:
        """The keys of this rank's queries [B, L, H, D], causal in their documents:
        int32 [B, L, slots] of tokens of the row or stream."""
        indices = dsa.select_keys(
            q, k, weights, slots=slots, attention=self.layout(), group=self.group
        )
        assert isinstance(indices, torch.Tensor)
        return indices

    def attend_selected(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        indices: torch.Tensor,
        *,
        scale: float,
        value_dim: int,
        sink: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q [B, L, H, D] and kv [B, L, D] of this rank's tokens; [B, L, H, Dv] comes
        back."""
        out = dsa.attend_selected(
            q,
            kv,
            indices,
            scale=scale,
            value_dim=value_dim,
            sink=sink,
            attention=self.layout(),
            group=self.group,
        )
        assert isinstance(out, torch.Tensor)
        return out

    def __getitem__(self, _: Any) -> LocalAttention:
        """Where it stands for a mask, every slice of that is the whole."""
        return self

    def __repr__(self) -> str:
        kinds = ", ".join(
            ("causal" if window is None else f"window {window}") + (f" {reach}" if reach else "")
            for window, reach in self._layouts
            if self.groups or reach is None
        )
        return f"LocalAttention({kinds}; {self.strategy.name} over {self.group})"


def parallelize(
    model: Model,
    group: Any = None,
    *,
    strategy: str | Strategy = "ring",
    layout: str | _C.Ownership = AUTO,
    proof: str | bool | torch.nn.Module = "auto",
    loss_tile: str | int | None = "auto",
    mlp_tile: int | None = None,
    offload: str | None = None,
    check_steps: bool = True,
) -> Model:
    """Makes the attention of a model run over the ranks of `group`; returns the
    same object. Batches then come from ``shard(batch, group, model=model)``.

    `strategy` is a `Strategy` or its name: "ring" (Ring Attention), "head_parallel"
    (DeepSpeed-Ulysses), ... `layout` says how batches are cut: an `Ownership`, a name of
    `longspan.values.named_layouts()` such as "head-tail" (zigzag), or "auto": what evens out the
    work of each batch, see `shard`. `restore` undoes it all.

    Works for decoders of Hugging Face transformers, bare or wrapped (peft, DDP,
    FSDP2, torch.compile), that a `longspan.proof` lets in: shown once for a class and a
    configuration on a twin with small sizes, on the CPU and in less than a second. Rank 0
    shows it, all ranks hear. `proof` is False to go without, or a small model of the
    same class where none can be made. Only the instances inside `model` change, never a
    class, a module of Python, or a configuration that other models may share.

    For long shares (see docs/memory.md): `loss_tile` tokens have logits at a time when
    labels are given, and `logits` of the answer is None then, unless the call says
    ``output_logits=True``; "auto" does so where a rank's logits would take more than 256 MiB.
    `mlp_tile` tokens are in a feed-forward module at a time, and again in backward.
    `offload` is "hidden" to keep what gradient checkpointing keeps in memory of the host.

    Over more than one rank, a step of an optimizer of torch on gradients that
    `sum_gradients` has not seen raises; `check_steps=False` is for those who sum themselves.
    """
    from longspan import _transformers
    from longspan._admission import admit, check_wish, with_tails
    from longspan._tiles import Tiles

    if not isinstance(model, torch.nn.Module):
        raise wrong("parallelize", "model", model, "a torch.nn.Module")
    ranks = ranks_of(group)
    with speaking_as("parallelize", "Strategy"):
        strategy = Strategy.of(strategy)
    check_layout("parallelize", layout, ranks.size())
    with still(model):
        if find_state(model) is not None:
            raise ValueError(
                "parallelize: this model is parallelized already; call longspan.restore(model) "
                "first"
            )
        check_wish(proof)
        check_flags("parallelize", check_steps=check_steps)
        tiles = Tiles.of(loss_tile, mlp_tile, offload)
        with Agreement("parallelize", ranks) as agreement:
            layers = _transformers.attention_layers(model)
            state = Parallelized(ranks, strategy, layout, layers)
            admitted = admit(model, ranks, proof, agreement)
            state.proof = admitted.said
            state.tiles = with_tails(model, proof, tiles, admitted)
        state.first_position = _transformers.first_position(model)
        set_up(model, state)
        if check_steps and ranks.size() > 1:
            guard(model)
    return model


def set_up(model: torch.nn.Module, state: Parallelized) -> None:
    """Redirects a model that was let in; leaves it as it was where that fails."""
    from longspan import _transformers

    try:
        _transformers.redirect(model, state)
        for owner in _transformers.entrances(model):
            state.replace(owner, MARK, state)
            if callable(getattr(owner, "generate", None)):
                state.replace(owner, "generate", _refuse_to_generate)
            if callable(getattr(owner, "set_attn_implementation", None)):
                state.replace(owner, "set_attn_implementation", _refuse_to_switch)
    except BaseException:
        state.put_back()
        raise
    state.seen = _transformers.inventory(model)
    state.settings = _transformers.settings_of(model, state)
    state.guests = guests_in(model)
    state.lookout = Lookout(model, state.guests)


def restore(model: Model) -> Model:
    """Undoes `parallelize`; returns the same object. What was changed in the model's
    configuration meanwhile stays changed."""
    check_kind("restore", "model", model, torch.nn.Module, "a torch.nn.Module")
    state = find_state(model)
    if state is None:
        raise ValueError("restore: this model is not parallelized")
    unguard(state)
    state.put_back()
    return model


@contextlib.contextmanager
def paused(model: Model) -> Iterator[Model]:
    """The plain model inside a ``with`` block, for evaluation on one rank and for
    `generate`; after it the model is parallelized as before, also after an exception."""
    check_kind("paused", "model", model, torch.nn.Module, "a torch.nn.Module")
    state = state_of("paused", model)
    marked = [owner for owner, name, _ in state.undo if name == MARK]
    with state.put_aside():
        looks = [
            owner.register_forward_pre_hook(_refuse_shares, with_kwargs=True)
            for owner in (marked if state.group.size() > 1 else ())
        ]
        try:
            yield model
        finally:
            for look in looks:
                look.remove()


def _refuse_shares(module: torch.nn.Module, _: Any, given: dict[str, Any]) -> None:
    if isinstance(given.get(KEYWORD), LocalAttention):
        raise ValueError(
            f"{type(module).__name__}: got a rank's share of a batch inside of longspan.paused, "
            f"where the plain model would see these tokens alone; give it the whole batch, or call "
            f"it outside"
        )


def state_of(who: str, model: Any) -> Parallelized:
    """What `parallelize` noted about a model, also through wrappers."""
    state = find_state(model) if isinstance(model, torch.nn.Module) else None
    if state is None:
        raise ValueError(
            f"{who}: this {type(model).__name__} is not parallelized; call "
            f"longspan.parallelize(model, group) first"
        )
    return state


def find_state(model: torch.nn.Module) -> Parallelized | None:
    """What `parallelize` noted about a model, or None."""
    state = vars(model).get(MARK)
    if state is None:  # it may be in a wrapper
        marked = (module for module in modules_in(model) if MARK in module.__dict__)
        state = next((vars(module)[MARK] for module in marked), None)
    assert state is None or isinstance(state, Parallelized)
    return state


def check_layout(who: str, layout: Any, ranks: int) -> None:
    """That it is the name of a layout, or an ownership for so many ranks."""
    if not isinstance(layout, _C.Ownership):
        if layout != AUTO:
            layout_named(who, layout)
    elif layout.ranks != ranks:
        raise ValueError(f"{who}: the ownership has {layout.ranks} ranks, the group {ranks}")


def _refuse_to_generate(*_: Any, **__: Any) -> Any:
    raise RuntimeError(
        "generate: this model is parallelized, and generation decodes token by token on one "
        "rank; call it inside `with longspan.paused(model):`, or longspan.restore(model) first"
    )


def _refuse_to_switch(*_: Any, **__: Any) -> Any:
    raise RuntimeError(
        "set_attn_implementation: this model is parallelized, and another attention would see "
        "this rank's tokens alone; call longspan.restore(model) first"
    )
