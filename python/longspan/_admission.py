"""Who lets a model in: the proof, once for a class, its code and a configuration, by rank 0."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from longspan._agreement import Agreement
from longspan._arguments import wrong
from longspan._group import Group
from longspan._hooks import Guest, adds_noise, backward_guests_in, guests_in
from longspan._images import beside_towers
from longspan._lookups import check_lookup
from longspan._models import AttentionLayer
from longspan._sources import Sources, sources_of
from longspan._tiles import CannotTile, Tail, Tiles, head_of
from longspan._twins import (
    CannotTwin,
    Part,
    build_twin,
    fingerprint,
    forward_of,
    has_own_forwards,
    is_of_tuner,
    kind_of,
    kinds_in,
    modules_of,
    place_of,
    quiet,
    strange_tuner,
    strangers,
    unwrapped,
)
from longspan._walking import modules_in, of_classes, walked
from longspan._wrappings import holds_shards

SKIPPED = "not proved (proof=False)"
#: Of transformers, from and up to; see pyproject.toml.
_FROM, _BELOW = (5, 17), (6,)


@dataclasses.dataclass(frozen=True)
class Proof:
    """What was shown about a model; true where it may be cut."""

    model: str
    #: Tests that held: isolation, order, numbering, ruler.
    shown: tuple[str, ...]
    #: Why it may not be cut, beginning with the module that is to blame.
    refusal: str | None
    seconds: float

    def __bool__(self) -> bool:
        return self.refusal is None

    def __str__(self) -> str:
        if self.refusal is not None:
            return f"{self.model} may not be cut: {self.refusal}"
        return f"{self.model}: {', '.join(self.shown)} hold on a twin ({self.seconds:.2f} s)"


@dataclasses.dataclass
class Known:
    """What this process knows about one class and configuration."""

    twin: Any
    #: What models like this have and the twin does not.
    strangers: list[Part]
    #: The code that it is known of.
    sources: Sources
    proof: Proof | None = None
    #: What it does to logits, or why nobody can tell.
    tail: Tail | str | None = None
    #: Places of modules that see no tokens once it is parallelized.
    bypassed: frozenset[str] | None = None
    lock: threading.RLock = dataclasses.field(default_factory=threading.RLock)


_known: dict[Any, Known] = {}
_lock = threading.Lock()


def check_wish(proof: Any) -> None:
    """That `proof` is something that parallelize takes."""
    if proof is False or (isinstance(proof, str) and proof == "auto"):
        return
    from longspan._transformers import whole_models

    if not isinstance(proof, torch.nn.Module) or proof not in whole_models(proof):
        raise wrong("parallelize", "proof", proof, '"auto", False or a small model of transformers')


def check_twin(who: str, argument: str, twin: Any, found: Sequence[torch.nn.Module]) -> None:
    """That a twin that was handed in is made as the models are, and shows how each layer of
    theirs attends."""
    from longspan._proving import LONG
    from longspan._transformers import attention_layers

    mine = kind_of(twin)
    shown = {_way(layer): layer for layer in attention_layers(twin)}
    for part in found:
        kind = kind_of(part)
        if kind is not mine:
            same = f" (of {kind.__module__})" if kind.__name__ == mine.__name__ else ""
            raise ValueError(
                f"{who}: `{argument}` is a {mine.__name__}, which shows nothing about a "
                f"{kind.__name__}{same}; give a small {kind.__name__}"
            )
        for layer in attention_layers(part):
            like = shown.get(_way(layer))
            if like is None:
                raise ValueError(
                    f"{who}: `{argument}` has no layer that attends as '{layer.name}' does "
                    f"({', '.join(_way(layer)) or 'causal'}), so it shows nothing about it; give "
                    f"one with a layer of each kind"
                )
            if like.window is not None and like.window >= LONG:
                raise ValueError(
                    f"{who}: the window of '{like.name}' of `{argument}` is {like.window} tokens, "
                    f"and documents of {LONG} would not show it; give one with smaller windows"
                )


def _way(layer: AttentionLayer) -> tuple[str, ...]:
    """What a layer has beside causal attention, in words."""
    pools, states = layer.pools, layer.recurrence
    found = {
        "a window": layer.window is not None,
        "a softcap": layer.softcap is not None,
        "sinks": layer.sink,
        f"groups of tokens ({layer.groups})": layer.groups is not None,
        "selected keys": layer.selects is not None,
        "pools": pools is not None and pools.ratio is not None,
        "selected pools": pools is not None and pools.selects is not None,
        "a convolution": states is not None,
        f"states ({states and states.transition})": states is not None and bool(states.transition),
    }
    return tuple(word for word, is_so in found.items() if is_so)


@dataclasses.dataclass
class Admitted:
    """What let a model in."""

    said: str
    #: What is known about the models of transformers in it; without a proof nothing is.
    known: list[tuple[Any, Known]] = dataclasses.field(default_factory=list)


def admit(model: torch.nn.Module, ranks: Group, wish: Any, agreement: Agreement) -> Admitted:
    """Lets a model in, or raises NotImplementedError with the module that is to blame. Every
    rank calls it; those that were given different models raise."""
    from longspan._transformers import whole_models

    check_version()
    found = whole_models(model)
    names = ", ".join(kind_of(part).__name__ for part in found)
    if wish is not False:
        check_wrappers(model, found)
        check_adapters(model)
        check_guests(model, found)
    if isinstance(wish, torch.nn.Module):
        check_twin("parallelize", "proof", wish, found)
    configs = [_settings(part.config) for part in found]
    every = zip(found, configs, strict=True)
    twins = [] if wish is False else [(part, known_of(part, wish, said)) for part, said in every]
    for _, known in twins if ranks.rank() == 0 else ():
        refusal = proof_of(known).refusal
        if refusal is not None:
            raise NotImplementedError(f"parallelize: {refusal}")
    _compare(agreement, names, configs, wish, _guests_that_all_must_have(model))
    if wish is False:
        return Admitted(SKIPPED)
    said = f"{names}: isolation, order, numbering and ruler hold on a twin"
    looked_at = [other for part, known in twins for other in look_at(part, known)]
    if looked_at:
        said += f"; isolation and order on the model itself, for {looked_at[0]}"
    return Admitted(said, twins)


def with_tails(
    model: torch.nn.Module, wish: Any, tiles: Tiles, admitted: Admitted | None = None
) -> Tiles:
    """With what each of the models in it does to its logits, as far as the loss is to be made
    in tiles. Raises NotImplementedError where it has to be and cannot."""
    from longspan._transformers import whole_models

    if tiles.loss is None:
        return tiles
    known = {id(part): found for part, found in admitted.known} if admitted else {}
    tails = [_tail_of(part, wish, known.get(id(part))) for part in whole_models(model)]
    for why in tails:
        if isinstance(why, str) and tiles.loss != "auto":
            raise NotImplementedError(
                f"parallelize: the loss cannot be made in tiles: {why}; pass loss_tile=None"
            )
    return dataclasses.replace(tiles, tails=tuple(tails))


def _tail_of(part: Any, wish: Any, known: Known | None) -> Tail | str:
    from longspan import _proving

    if wish is False:
        return "what the model does to its logits is seen on a twin, and proof=False makes none"
    try:
        head_of(part)
    except CannotTile as error:
        return str(error)
    known = known or known_of(part, wish)
    with known.lock:
        if known.tail is None:
            try:
                with quiet():
                    known.tail = _proving.show_tail(known.twin)
            except CannotTile as error:
                known.tail = str(error)
    other = known.tail.other(part) if isinstance(known.tail, Tail) else None
    return known.tail if other is None else other


def _guests_that_all_must_have(model: torch.nn.Module) -> str:
    """A call of a model whose parameters lie on all ranks is one of all ranks."""
    guests = guests_in(model)
    if not guests or not holds_shards(model):
        return ""
    return ", ".join(map(str, guests))


def _compare(
    agreement: Agreement, names: str, configs: Sequence[str], wish: Any, hooks: str
) -> None:
    fields = {"model": names, "configuration": configs, "proof": wish is not False, "hooks": hooks}
    try:
        agreement.compare(fields)
    except ValueError as error:
        what = re.search(r"were given different (.*); ", str(error))
        if what is None:
            raise
        raise ValueError(
            f"parallelize: the ranks of the group were given different {what[1]}, and this one has "
            f"{names}; give every rank the same"
        ) from None


def check_wrappers(model: torch.nn.Module, found: Sequence[torch.nn.Module]) -> None:
    """That what is around the models of transformers leaves tokens alone. Wrappers of
    torch and peft do; others nobody has looked at."""
    if list(found) == [model]:
        return
    inside = {id(module) for part in found for module in modules_in(part)}
    for name, module in walked(model):
        if id(module) in inside:
            continue
        if isinstance(module, torch.nn.DataParallel) and len(module.device_ids) > 1:
            raise NotImplementedError(
                f"parallelize: {f'{name!r} ' if name else ''}(DataParallel) deals the rows of a "
                f"rank's share out to {len(module.device_ids)} GPUs, and attention is that of all "
                f"its rows; start one process a GPU, and wrap in DistributedDataParallel"
            )
        home = type(module).__module__.split(".")[0]
        if home not in ("torch", "peft", "accelerate"):
            held = kind_of(found[0]).__name__
            raise NotImplementedError(
                f"parallelize: {f'{name!r} ' if name else ''}({type(module).__name__}) holds "
                f"{held} and is no model of transformers itself, so nobody has looked at what it "
                f"does to tokens; parallelize what it holds, or pass proof=False to go without"
            )


def check_adapters(model: torch.nn.Module) -> None:
    """That adapters of peft are of kinds that take tokens one by one."""
    for name, module in of_classes(model, is_of_tuner):
        tuner = strange_tuner(module)
        if tuner is not None:
            raise NotImplementedError(
                f"parallelize: '{name}' is an adapter of kind {tuner}, which is not known to take "
                f"tokens one by one; use another, such as LoRA, or pass proof=False to go without"
            )


def check_guests(model: torch.nn.Module, found: Sequence[torch.nn.Module]) -> None:
    """That every hook of a user can be looked at."""
    guests = guests_in(model)
    if not guests:
        return
    seen = {id(module) for part in found for _, module in beside_towers(part)}
    held = kind_of(found[0]).__name__
    for guest in guests:
        if adds_noise(guest):
            why = "adds noise as large as the length of a rank's share says; take it off"
        elif guest.module is None or id(guest.module) in seen:
            continue
        elif any(guest.module is module for part in found for module in modules_in(part)):
            why = (
                "would see the pictures of one rank alone, and nobody has looked at what it does "
                "to them; take it off, or pass proof=False to go without"
            )
        else:
            why = (
                f"is around {held}, where nobody looks at what it does to tokens; put it on the "
                f"{held}, or pass proof=False to go without"
            )
        raise NotImplementedError(f"parallelize: {guest} {why}")


def look_at(part: Any, known: Known) -> list[Part | Guest]:
    """Its input embeddings where they are somebody's, and isolation and order on the model itself
    where it has modules or hooks that its twin does not have; returns those. Under fully_shard
    every rank takes part."""
    from longspan import _proving
    from longspan._probing import Refused

    check_lookup(part)
    guests = guests_in(part)
    back = backward_guests_in(part)
    if back and holds_shards(part):
        back = []  # a backward pass under fully_shard is one of all ranks, and none is made
    others: list[Part | Guest] = [*known.strangers, *guests, *back]
    if not others:
        return []
    if any(p.device.type == "meta" for p in part.parameters()):
        raise NotImplementedError(
            f"parallelize: {others[0]} is not what {kind_of(part).__name__} is made of, and "
            f"without weights (on the meta device) it cannot be looked at; parallelize once it "
            f"has them"
        )
    if known.strangers:
        _check_attention(part, known.twin)
    if guests:
        _check_called(guests, known)
    try:
        _proving.check_model_itself(part, guests)
    except Refused as error:
        on_it = next((one for one in guests if str(error).startswith(one.where)), None)
        behind = (one for one in back if str(error).startswith(f"'{one.name}"))
        on_it = on_it or next(behind, None)
        with_it = "" if on_it is None else f"; it was looked at with {on_it}"
        raise NotImplementedError(f"parallelize: {error}{with_it}") from None
    return others


def _check_attention(part: Any, twin: Any) -> None:
    """That its attention is that of the twin: a call of the model itself would not show who
    sees whom."""
    shown = {key for _, key in _attention_in(twin)}
    for name, key in _attention_in(part):
        if key not in shown:
            raise NotImplementedError(
                f"parallelize: '{name}' ({key[0].__name__}) does not fit into a twin of "
                f"{kind_of(part).__name__}, and nothing else would show which tokens its attention "
                f"sees; pass proof=twin, a small model on the CPU with the same attention, or "
                f"proof=False to go without"
            )


def _attention_in(model: Any) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """The class and the forward of every layer that attends or carries states, by its name."""
    from longspan._recipes import recipe_for
    from longspan._transformers import is_attention

    for name, module in modules_of(model):
        if is_attention(module) or recipe_for(module) is not None:
            kind = kind_of(module)
            yield name, (kind, forward_of(module, kind))


def _check_called(guests: Sequence[Guest], known: Known) -> None:
    """That the modules of hooks are given tokens as they are without us."""
    from longspan import _proving

    with known.lock:
        if known.bypassed is None:
            with quiet():
                known.bypassed = _proving.bypassed(known.twin)
    places = {place_of(name) for name, _ in walked(known.twin)}
    for guest in guests:
        place = place_of(unwrapped(guest.name))
        while place not in places:
            place = place.rpartition(".")[0]
        if place in known.bypassed:
            raise NotImplementedError(
                f"parallelize: {guest} would not be called with tokens: over ranks another "
                f"function does what this module does; put it on a module around it, or pass "
                f"proof=False to go without"
            )


def check_version() -> None:
    """Outside of the range attention may come to us in another way, or not at all."""
    import transformers

    numbers = tuple(int(n) for n in transformers.__version__.split(".")[:2] if n.isdigit())
    if not _FROM <= numbers < _BELOW:
        wanted = f"{'.'.join(map(str, _FROM))} up to below {'.'.join(map(str, _BELOW))}"
        raise ImportError(
            f"parallelize: transformers {transformers.__version__} is installed, and {wanted} is "
            f"understood; install one of those"
        )


def known_of(part: Any, wish: Any = "auto", settings: str | None = None) -> Known:
    """What is known about a model's classes, their code and its configuration (`settings`, where
    it was written already); makes its twin if need be."""
    if isinstance(wish, torch.nn.Module):
        twin = copy.deepcopy(wish).to(device="cpu", dtype=torch.float64).eval()
        return _known_by(part, twin)
    if has_own_forwards(part):
        # As a key of what is kept they would keep the model.
        return _made(part)
    key = (settings or _settings(part.config), fingerprint(part))
    with _lock:
        known = _known.get(key)
        if known is None or known.sources.changed() is not None:
            known = _known[key] = _made(part)
    return known


def _made(part: Any) -> Known:
    try:
        with quiet():
            twin = build_twin(part)
    except CannotTwin as error:
        raise NotImplementedError(
            f"parallelize: no twin of this model can be made: {error}; pass proof=... a small "
            f"model of the same classes on the CPU, or proof=False to go without"
        ) from error
    return _known_by(part, twin)


def _known_by(part: Any, twin: Any) -> Known:
    return Known(twin, strangers(part, twin), sources_of(kinds_in(part)))


def proof_of(known: Known) -> Proof:
    """Whether the twin may be cut; shown once."""
    from longspan import _proving

    with known.lock:
        if known.proof is None:
            begin = time.monotonic()
            with quiet():
                shown, refusal = _proving.prove(known.twin)
            taken = time.monotonic() - begin
            known.proof = Proof(type(known.twin).__name__, tuple(shown), refusal, taken)
    return known.proof


def _settings(config: Any) -> str:
    """The configuration as text, without what parallelize itself sets."""
    return json.dumps(config.to_dict(), sort_keys=True)
