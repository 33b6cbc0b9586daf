"""Why a model may be cut: shown on a twin, not read from a list of names.

Under context parallelism a module sees some tokens of a document, and only attention
sees the rest. So everything else must treat tokens one by one, by their content and their
`position_ids` alone, and attention must be what the model would have done.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from longspan._agreement import Agreement
from longspan._batch import Place, Reading, share
from longspan._group import Group, run_ranks
from longspan._hooks import Guest, changes
from longspan._models import AttentionLayer, Parallelized, parallelize, set_up, state_of
from longspan._probing import (
    SCANNED,
    TOKENS,
    Probe,
    Refused,
    Run,
    call_apart,
    gradients_of,
    ids_of,
    loss_of,
    off_by,
    share_of,
    tokens_in_words,
    vectors_of,
    watch_call,
    with_others,
)
from longspan._proving_training import (
    buffers_kept,
    check_backward,
    check_in_training,
    check_states,
    check_sums,
    seeded,
)
from longspan._recipes import recipe_for, recipes_in
from longspan._routers import ASKED, loss_of_routers
from longspan._strategy import Strategy
from longspan._tiles import STUMBLES, CannotTile, Tail, kept_numbers, tail_of, tile_loss
from longspan._tracing import Blame, Pairing, Trace, guilty, traced
from longspan._transformers import (
    attention_layers,
    check_batch,
    first_position,
    has_loss,
    name_attention,
)
from longspan._twins import OwnRandomness, place_of
from longspan._walking import modes_kept, walked

#: A document of the ruler, for two ranks with `TOKENS` each; longer than every window.
LONG = 2 * TOKENS
#: Relative to the largest value of a tensor: many models compute norms, rotary tables and
#: routers in float32. What is wrong is off by 1e-2 and more.
_TOLERANCE = 1e-5


def prove(twin: Any) -> tuple[list[str], str | None]:
    """What holds for a twin, and why it may not be cut."""
    shown: list[str] = []
    try:
        shown += check_numbering(twin, first_position(twin))
        apart = _parallel(twin)
        shown += check_apart(apart, _TOLERANCE)
        check_in_training(apart, _TOLERANCE, OwnRandomness)
        check_states(apart, _TOLERANCE, OwnRandomness)
        shown += check_ruler(twin)
        check_sums(apart)  # it names no module, as the others do
    except Refused as error:
        return shown, str(error)
    return shown, None


def check_model_itself(model: Any, guests: Sequence[Guest] = ()) -> list[str]:
    """*Isolation* and *order* on a user's own model, with its weights and the hooks on it;
    leaves it as it was."""
    state = Parallelized(
        Group.solo(), Strategy.of("ring"), "contiguous-rows", attention_layers(model)
    )
    eps = max(torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point())
    tolerance = max(_TOLERANCE, 4 * eps)
    chosen = [layer.name for layer in state.layers if layer.selects or layer.pools]
    hidden = {
        one.name: one.module
        for one in guests
        if one.module is not None and any(one.name.startswith(name + ".") for name in chosen)
    }
    with modes_kept(model):
        try:
            model.eval()
            set_up(model, state)
            with changes(hidden) as changed:
                shown = check_apart(model, tolerance, watched=True)
            draws = functools.partial(seeded, model)
            with buffers_kept(model):
                check_in_training(model, tolerance, draws)
            check_states(model, tolerance, draws)
            check_backward(model, tolerance, draws)
            model.eval()
            state.put_back()
            _check_masks(model, state.layers)
        finally:
            state.put_back()
    for one in guests:
        if one.name in changed:
            raise Refused(
                f"{one} changes what this module takes or gives, and in a layer that chooses its "
                f"keys nobody can see what that does to other tokens; put it on the attention "
                f"around it, or only look"
            )
    return shown


def _check_masks(model: Any, layers: Sequence[AttentionLayer]) -> None:
    """That layers are handed the masks that they say: ours come from what they say. With eager
    attention they are handed some on every device."""
    modules = dict(walked(model))
    plain = [layer for layer in layers if recipe_for(modules[layer.name]) is None]
    if not plain:
        return
    seen: dict[str, Tensor] = {}

    def keep(name: str, _: Any, in_order: Any, named: Any) -> None:
        for value in (*in_order, *named.values()):
            if isinstance(value, Tensor) and value.shape[-2:] == (TOKENS, TOKENS):
                seen[name] = value

    aside = Parallelized(Group.solo(), Strategy.of("ring"), "contiguous-rows", list(layers))
    try:
        name_attention(model, aside, "eager")
        for layer in plain:
            aside.look_before(modules[layer.name], functools.partial(keep, layer.name))
        ids = ids_of(model, TOKENS, 10).to(next(model.parameters()).device)
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
    except Exception as error:
        raise Refused(
            f"{type(model).__name__} does not run with eager attention, so nobody sees the masks "
            f"of its layers: {type(error).__name__}: {' '.join(str(error).split())}; pass "
            f"proof=False to go without"
        ) from error
    finally:
        aside.put_back()
    for layer in plain:
        mask = seen.get(layer.name)
        if mask is not None and not _is_mask_of(layer, mask):
            raise Refused(
                f"'{layer.name}' ({type(modules[layer.name]).__name__}) is handed a mask of other "
                f"tokens than it says itself, which over ranks it would not get; leave masks to "
                f"the batch's documents, or pass proof=False to go without"
            )


def _is_mask_of(layer: AttentionLayer, mask: Tensor) -> bool:
    """Of booleans, or of numbers that are added to scores."""
    wanted = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=mask.device).tril()
    if layer.window is not None:
        wanted = wanted.triu(1 - layer.window)
    if mask.dtype == torch.bool:
        return bool((mask == wanted).all())
    return bool(((mask == 0) == wanted).all() and (mask[..., ~wanted] < -1e4).all())


def bypassed(twin: Any) -> frozenset[str]:
    """The modules that the plain twin calls with its tokens and the parallelized one does not,
    by their places: recipes do otherwise what they do."""
    ids = ids_of(twin, TOKENS, 9)
    with torch.no_grad():
        plain = watch_call(twin, {"input_ids": ids, "use_cache": False})
        mine = _parallel(twin)
        ours = watch_call(mine, share_of(mine, {"input_ids": ids}))
    return frozenset(_called(plain) - _called(ours))


def _called(trace: Trace) -> set[str]:
    """The places of modules that were given tokens."""
    return {
        place_of(call.name)
        for call in trace.calls
        if any(TOKENS in value.shape for value in call.inputs.values())
    }


def _parallel(twin: Any, group: Group | None = None) -> Any:
    """A copy of the twin over a group."""
    return parallelize(_copied(twin), group, layout="contiguous-rows", proof=False)


# ---- Tokens one by one.


def check_apart(model: Any, tolerance: float, *, watched: bool = False) -> list[str]:
    """*Isolation* and *order*, on a model that is parallelized over one rank: returns what
    was shown, or raises Refused. Unless `watched`, modules are looked at only where the
    answer of the whole model is another."""
    # For what is inside these a recipe answers; indices of selected keys, say, are places.
    spare = [name for name, _, recipe in recipes_in(model) if recipe.layer is not None]
    base = Probe.of(model, TOKENS, 1)
    other = Probe.of(model, TOKENS, 2).ids
    first = call_apart(model, base)
    same = Pairing.same(TOKENS, tolerance)
    half = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(3))[: TOKENS // 2]
    for changed in (torch.tensor([TOKENS // 2]), half):
        second = call_apart(model, with_others(model, base, other, changed))
        blame = first.blame(second, same, apart=True, spare=spare, watched=watched)
        if blame is not None:
            raise Refused(
                f"{blame} mixes tokens outside attention: when {tokens_in_words(changed)} changed, "
                f"its output moved at {tokens_in_words(blame.tokens)} by {blame.by:.0e}; cutting "
                f"the tokens would change it"
            )
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(4))
    again = call_apart(model, Probe(base.ids[:, order], base.positions[:, order]))
    moved = Pairing(TOKENS, TOKENS, order, torch.arange(TOKENS), tolerance)
    blame = first.blame(again, moved, apart=True, spare=spare, watched=watched)
    if blame is not None:
        raise Refused(
            f"{blame} goes by the place of a token in the call and not by its position_ids: when "
            f"tokens were permuted with their positions, its output at "
            f"{tokens_in_words(blame.tokens)} was another by {blame.by:.0e}; a rank's tokens "
            f"stand at other places"
        )
    return ["isolation", "order"]


# ---- What the plain model does.


def check_numbering(twin: Any, first: int) -> list[str]:
    """*Numbering*: without `position_ids` a model counts as `shard` does."""
    call = Probe.of(twin, TOKENS, 5)
    given = {"input_ids": call.ids, "use_cache": False}
    plain = Run(twin, given)
    numbered = Run(twin, {**given, "position_ids": call.positions + first})
    try:
        blame = plain.blame(numbered, Pairing.same(TOKENS, _TOLERANCE), apart=False)
    except Refused as error:
        if not isinstance(error.__cause__, TypeError) or "position_ids" not in str(error):
            raise
        raise Refused(
            f"{type(twin).__name__} takes no position_ids, so it numbers the tokens of every rank "
            f"from the start"
        ) from error
    if blame is not None:
        raise Refused(
            f"{blame} does not number tokens as position_ids {first}, {first + 1}, ... do: without "
            f"position_ids its output is another by {blame.by:.0e}"
        )
    return ["numbering"]


# ---- The ruler.


@dataclasses.dataclass(frozen=True)
class _Answer:
    """Of a whole batch: the mean loss of its targets, logits [tokens, words] of real tokens in
    order, and gradients."""

    loss: float
    logits: Tensor
    gradients: dict[str, Tensor]
    said: float | None = None  #: the loss that the model itself gave


def check_ruler(twin: Any) -> list[str]:
    """One rank equals the plain twin on a long document, and two ranks each document
    alone, packed and padded: loss, logits and every gradient. Leaves the twin plain."""
    plain = _plainly(twin, [ids_of(twin, LONG, 6)])
    alone = _over(twin, 1, {"input_ids": ids_of(twin, LONG, 6)})
    scans = any(recipe.carries for _, _, recipe in recipes_in(twin))
    rounding = SCANNED if scans else 1
    _compare(plain, alone, lambda: _blame_one_rank(twin), "over one rank", rounding)
    documents = [ids_of(twin, length, 7 + length) for length in (30, 1, LONG - 31)]
    packed = {
        "input_ids": torch.cat(documents, dim=1),
        "position_ids": torch.cat([torch.arange(d.shape[1]) for d in documents])[None],
    }
    long = documents[-1]
    pads = LONG - long.shape[1]
    left = {
        "input_ids": torch.cat([torch.full((1, pads), int(long[0, 0])), long], dim=1),
        "attention_mask": (torch.arange(LONG) >= pads).long()[None],
    }
    for name, batch, wanted in (("packed", packed, documents), ("left-padded", left, [long])):
        _compare(
            _plainly(twin, wanted),
            _over(twin, 2, batch),
            lambda batch=batch: _blame_two_ranks(twin, batch),  # type: ignore[misc]
            f"over two ranks, {name},",
            rounding,
        )
    return ["ruler"]


def _plainly(twin: Any, documents: list[Tensor]) -> _Answer:
    """Each document alone, without us."""
    twin.zero_grad()
    targets = sum(d.shape[1] - 1 for d in documents)
    loss, logits = 0.0, []
    for ids in documents:
        out = twin(input_ids=ids, use_cache=False)
        rows = vectors_of(twin, out)[0]
        part = loss_of(rows[:-1], ids[0, 1:], targets)
        part.backward()  # type: ignore[no-untyped-call]
        loss += float(part.detach())
        logits.append(rows.detach())
    return _Answer(loss, torch.cat(logits), gradients_of(twin))


def _over(twin: Any, ranks: int, batch: Mapping[str, Tensor]) -> _Answer:
    """The same, put together from what ranks on threads computed."""
    ids = batch["input_ids"]
    real = batch.get("attention_mask", torch.ones_like(ids))
    starts = batch.get("position_ids", real.cumsum(1) - 1) == 0
    targets = torch.where(real.bool(), ids, -100).roll(-1, 1)
    targets[:, -1] = -100
    targets[(starts | ~real.bool()).roll(-1, 1)] = -100  # a document's last token
    targets[~real.bool()] = -100
    count = int(targets.ne(-100).sum())

    learns = _learns(twin)

    def body(group: Group) -> tuple[float, Any, Tensor, dict[str, Tensor]]:
        mine = _parallel(twin, group)
        state = state_of("parallelize", mine)
        given = {**batch, "shift_labels": targets}
        nobody = Agreement("parallelize", None)
        local = share(given, Place.in_group(group), nobody, state, Reading(who="parallelize"))
        wanted = local["shift_labels"]
        for key in () if learns else ("labels", "shift_labels", "num_items_in_batch"):
            local.pop(key, None)
        out = mine(**local)
        rows = vectors_of(mine, out)
        loss = loss_of(rows.flatten(0, 1), wanted.flatten(), count)
        loss.backward()  # type: ignore[no-untyped-call]
        said = float((out.loss - loss_of_routers(mine, out)).detach()) if learns else None
        return float(loss.detach()), said, rows[0].detach(), gradients_of(mine)

    found = _run(ranks, body, twin)
    summed: dict[str, Tensor] = {}
    for _, _, _, gradients in found:
        for name, gradient in gradients.items():
            summed[name] = summed.get(name, 0) + gradient
    rows = torch.cat([logits for _, _, logits, _ in found])[: ids.shape[1]]
    said = sum(one[1] for one in found) if learns else None
    return _Answer(sum(one[0] for one in found), rows[real[0].bool()], summed, said)


def _learns(twin: Any) -> bool:
    """Whether it gives the mean loss of the next tokens, beside that of routers."""
    try:
        check_batch(twin, {"labels": ()})
    except NotImplementedError:
        return False  # `shard` takes no labels for it
    return has_loss(twin)


def _run(ranks: int, body: Callable[[Group], Any], twin: Any) -> list[Any]:
    try:
        return run_ranks(ranks, body)
    except Refused:
        raise
    except Exception as error:
        # Again on one rank, to see whose it was.
        mine = _parallel(twin)
        watch_call(mine, share_of(mine, {"input_ids": ids_of(twin, LONG, 6)}))
        said = " ".join(str(error).split())
        raise Refused(
            f"{type(twin).__name__} does not run over {ranks} ranks: {type(error).__name__}: {said}"
        ) from error


def _copied(twin: Any) -> Any:
    """With its own modules and gradients, and the twin's weights."""
    memo: dict[int, Any] = {}
    for parameter in twin.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach(), parameter.requires_grad)
    return copy.deepcopy(twin, memo)


def _compare(
    plain: _Answer,
    ours: _Answer,
    blame: Callable[[], Blame | None],
    where: str,
    rounding: float = 1,
) -> None:
    """Refused where one answer is another than the plain model's."""
    size = float(plain.logits.abs().max()) or 1.0
    off = float((plain.logits - ours.logits).abs().max()) / size
    if not off <= rounding * _TOLERANCE:
        found = blame()
        who = "the whole model" if found is None else str(found)
        raise Refused(f"{who} gives another answer {where} than the plain model, by {off:.0e}")
    if ours.said is not None and not abs(ours.said - plain.loss) <= _TOLERANCE * plain.loss:
        raise Refused(
            f"the model counts another loss {where} than its logits have: {ours.said:.4g} and not "
            f"{plain.loss:.4g}; it may not hand shift_labels and num_items_in_batch on"
        )
    off_there = off_by(plain.gradients, ours.gradients, rounding)
    if off_there is not None:
        nearest, error = off_there
        raise Refused(
            f"'{nearest}' gets another gradient {where} than in the plain model, by {error:.0e}"
        )


# ---- The loss in tiles.


def show_tail(twin: Any) -> Tail:
    """What a twin does to its logits: with it, a loss in tiles has the value and the gradients
    of the model's own. CannotTile where it has not."""
    name = type(twin).__name__
    if not _learns(twin):
        raise CannotTile(f"{name} gives no mean loss of the next tokens")
    ids = ids_of(twin, TOKENS, 8)
    targets = ids.roll(-1, 1)
    targets[:, -1] = -100
    try:
        tail = kept_numbers(twin, ids, tail_of(twin, ids))
        own, tiled = (_own_loss(twin, ids, targets, one) for one in (None, tail))
    except STUMBLES as error:
        said = " ".join(str(error).split())
        raise CannotTile(f"{name} does not run so: {type(error).__name__}: {said}") from error
    try:
        _compare(own, tiled, lambda: None, "with its loss in tiles")
    except Refused as error:
        raise CannotTile(str(error)) from error
    return tail


def _own_loss(twin: Any, ids: Tensor, targets: Tensor, tail: Tail | None) -> _Answer:
    mine = _parallel(twin)
    if tail is not None:
        tile_loss(mine, tail, TOKENS // 3, state_of("parallelize", mine))
    local = share_of(mine, {"input_ids": ids, "shift_labels": targets})
    if getattr(twin.config, ASKED, False):
        local[ASKED] = False  # their loss is made outside of tiles
    loss = mine(**local).loss
    loss.backward()
    return _Answer(float(loss.detach()), torch.zeros(1), gradients_of(mine), float(loss.detach()))


def _blame_one_rank(twin: Any) -> Blame | None:
    ids = ids_of(twin, LONG, 6)
    with torch.no_grad(), traced(twin) as plain:
        twin(input_ids=ids, use_cache=False)
    mine = _parallel(twin)
    with torch.no_grad():
        ours = watch_call(mine, share_of(mine, {"input_ids": ids}))
    return guilty(plain, ours, Pairing.same(LONG, _TOLERANCE), apart=False)


def _blame_two_ranks(twin: Any, batch: Mapping[str, Tensor]) -> Blame | None:
    """Two ranks against one, with the same batch."""
    one = _parallel(twin)
    with torch.no_grad():
        whole = watch_call(one, share_of(one, batch))

    def body(group: Group) -> Trace:
        mine = _parallel(twin, group)
        nobody = Agreement("parallelize", None)
        state = state_of("parallelize", mine)
        reading = Reading(who="parallelize")
        local = share(batch, Place.in_group(group), nobody, state, reading)
        with torch.no_grad():
            return watch_call(mine, local)

    for rank, trace in enumerate(run_ranks(2, body)):
        mine = torch.arange(TOKENS)
        pairing = Pairing(LONG, TOKENS, mine + rank * TOKENS, mine, _TOLERANCE)
        found = guilty(whole, trace, pairing, apart=False)
        if found is not None:
            return found
    return None
