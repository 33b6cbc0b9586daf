"""Why a model may be cut: shown on a twin, not read from a list of names.

Under context parallelism a module sees some tokens of a document, and only attention
sees the rest. So everything else must treat tokens one by one, by their content and their
`position_ids` alone, and attention must be what the model would have done.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from longspan._agreement import Agreement
from longspan._batch import Place, Reading, share
from longspan._group import Group, run_ranks
from longspan._hooks import Guest, changes
from longspan._local_batch import KEYWORD, LocalBatch
from longspan._lookups import rows_of
from longspan._models import (
    AttentionLayer,
    LocalAttention,
    Parallelized,
    parallelize,
    set_up,
    state_of,
)
from longspan._recipes import recipe_for, recipes_in
from longspan._recipes.recipe import NotSharded
from longspan._routers import ASKED, loss_of_routers
from longspan._strategy import Strategy
from longspan._tiles import STUMBLES, CannotTile, Tail, kept_numbers, tail_of, tile_loss
from longspan._tracing import Blame, Call, Pairing, Trace, guilty, traced
from longspan._transformers import (
    attention_layers,
    check_batch,
    first_position,
    has_loss,
    name_attention,
)
from longspan._twins import OwnRandomness, place_of
from longspan._walking import modes_kept, walked

#: Tokens of a call. A prime: no other axis of a model is as long.
TOKENS = 37
#: A document of the ruler, for two ranks with `TOKENS` each; longer than every window.
LONG = 2 * TOKENS
#: Relative to the largest value of a tensor: many models compute norms, rotary tables and
#: routers in float32. What is wrong is off by 1e-2 and more.
_TOLERANCE = 1e-5
#: With scans: their functions are float32 throughout, and chunks of another length round
#: otherwise.
_SCANNED = 10
#: Of gradients; eager attention of transformers has a float32 softmax.
_GRADIENTS = 3e-4
#: Ranks that are threads have one state of random numbers.
_drawing = threading.Lock()
#: Inside, random numbers are those of one seed.
_Draws = Callable[[], contextlib.AbstractContextManager[Any]]


class Refused(Exception):
    """What a model does that cutting its tokens would change; begins with the module."""


class _Alone(LocalAttention):
    """Attention in which every token sees itself only. What it returns depends on
    queries and keys too, so that nobody can hide in them."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = (one.repeat_interleave(groups, dim=1) for one in (k, v))
        scale = options.get("scale") or q.shape[-1] ** -0.5
        gate: Tensor = torch.sigmoid((q * k).sum(-1, keepdim=True) * scale)
        return v * gate


@dataclasses.dataclass(frozen=True)
class _Call:
    """Tokens for one call, as the test wants them."""

    ids: Tensor
    positions: Tensor

    @staticmethod
    def of(model: Any, tokens: int, seed: int) -> _Call:
        random = torch.Generator().manual_seed(seed)
        ids = ordinary_ids(model)
        chosen = torch.randint(len(ids), (1, tokens), generator=random)
        return _Call(ids[chosen], torch.arange(tokens)[None])


def ordinary_ids(model: Any) -> Tensor:
    """Ids that are no special tokens: models look for those."""
    config = model.config
    special: set[int] = set()
    for one in (config, *(v for v in vars(config).values() if hasattr(v, "to_dict"))):
        for key, value in vars(one).items():
            if key.endswith(("_id", "_ids", "_index", "_idx")):
                values = value if isinstance(value, (list, tuple)) else [value]
                special |= {v for v in values if isinstance(v, int)}
    words = getattr(config.get_text_config(), "vocab_size", None)  # that have a logit
    size = rows_of(model.get_input_embeddings()) or words or 1
    words = words or size
    usual = [i for i in range(min(size, words, 4096)) if i not in special]
    return torch.tensor(usual or [0])


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
            draws = functools.partial(_seeded, model)
            with _buffers_kept(model):
                check_in_training(model, tolerance, draws)
            check_states(model, tolerance, draws)
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
        ids = _ids(model, TOKENS, 10).to(next(model.parameters()).device)
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
    ids = _ids(twin, TOKENS, 9)
    with torch.no_grad():
        plain = _traced(twin, {"input_ids": ids, "use_cache": False})
        mine = _parallel(twin)
        ours = _traced(mine, _share(mine, {"input_ids": ids}))
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
    base = _Call.of(model, TOKENS, 1)
    other = _Call.of(model, TOKENS, 2).ids
    first = _apart(model, base)
    same = Pairing.same(TOKENS, tolerance)
    half = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(3))[: TOKENS // 2]
    for changed in (torch.tensor([TOKENS // 2]), half):
        second = _apart(model, _changed(model, base, other, changed))
        blame = first.blame(second, same, apart=True, spare=spare, watched=watched)
        if blame is not None:
            raise Refused(
                f"{blame} mixes tokens outside attention: when {_tokens(changed)} changed, its "
                f"output moved at {_tokens(blame.tokens)} by {blame.by:.0e}; cutting the tokens "
                f"would change it"
            )
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(4))
    again = _apart(model, _Call(base.ids[:, order], base.positions[:, order]))
    moved = Pairing(TOKENS, TOKENS, order, torch.arange(TOKENS), tolerance)
    blame = first.blame(again, moved, apart=True, spare=spare, watched=watched)
    if blame is not None:
        raise Refused(
            f"{blame} goes by the place of a token in the call and not by its position_ids: when "
            f"tokens were permuted with their positions, its output at "
            f"{_tokens(blame.tokens)} was another by {blame.by:.0e}; a rank's tokens "
            f"stand at other places"
        )
    return ["isolation", "order"]


def _changed(model: Any, call: _Call, other: Tensor, tokens: Tensor) -> _Call:
    """With other ids at some tokens."""
    ids = call.ids.clone()
    new = other[0, tokens]
    ids[0, tokens] = torch.where(new == ids[0, tokens], ordinary_ids(model)[0], new)
    return _Call(ids, call.positions)


def check_in_training(model: Any, tolerance: float, draws: _Draws) -> None:
    """*Isolation* of a model that was let in for evaluation, where its forward is another one in
    training: norms of a batch, experts with a capacity. `draws` makes random numbers those of one
    seed, so that dropout is the same in every run. Leaves the model in training."""
    base, other = _Call.of(model, TOKENS, 1), _Call.of(model, TOKENS, 2).ids
    same = Pairing.same(TOKENS, tolerance)
    half = torch.arange(0, TOKENS, 2)
    try:
        calm = _apart(model, base).outside
        model.train()
        first = _apart(model, base, draws)
        if guilty(calm, first.outside, same, apart=False) is None:
            return
        if guilty(first.outside, _apart(model, base, draws).outside, same, apart=False):
            return  # draws that no seed repeats
        second = _apart(model, _changed(model, base, other, half), draws)
        blame = first.blame(second, same, apart=True)
    except Exception:  # it does not train so: with a batch of its own, it will say why
        return
    if blame is not None:
        raise Refused(
            f"{blame} mixes tokens outside attention in training: when {_tokens(half)} changed, "
            f"its output moved at {_tokens(blame.tokens)} by {blame.by:.0e}; cutting the tokens "
            f"would change it"
        )


def check_states(model: Any, tolerance: float, draws: _Draws) -> None:
    """What a model keeps of the tokens it was trained on, in buffers, changes no later answer:
    ranks see other tokens, and would part. Leaves the model in evaluation."""
    base, other = _Call.of(model, TOKENS, 1), _Call.of(model, TOKENS, 2)

    def train(call: _Call) -> None:
        model.train()
        _ = _apart(model, call, draws).outside
        model.eval()

    def kept_of(call: _Call) -> dict[str, Tensor]:
        with _buffers_kept(model):
            train(call)
            return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}

    def answer_after(call: _Call) -> Trace:
        with _buffers_kept(model):
            train(call)
            return _apart(model, base).outside

    try:
        ones, others = kept_of(base), kept_of(other)
        moved = [
            name
            for name, buffer in ones.items()
            if name not in others or not buffer.equal(others[name])
        ]
        if not moved:
            return
        first, second = answer_after(base), answer_after(other)
    except Exception:  # it does not train so: with a batch of its own, it will say why
        return
    if guilty(first, second, Pairing.same(TOKENS, tolerance), apart=False):
        raise Refused(
            f"'{moved[0]}' keeps in training what the tokens of a call were like, and answers "
            f"depend on it; ranks see other tokens each, and would come to differ"
        )


def check_sums(twin: Any) -> None:
    """Gradients of tokens that have nothing to do with each other add up, in training too: a loss
    that a module adds in backward, of its experts say, is no sum. For a parallelized twin, which
    is left in training."""
    cut = TOKENS // 3
    every, parts = slice(None), (slice(0, cut), slice(cut, None))
    ids = _ids(twin, TOKENS, 9)
    positions = torch.cat([torch.arange(cut), torch.arange(TOKENS - cut)])[None]

    def rows(part: slice, seed: int = 16) -> Tensor:
        given = _given(twin, _Call(ids[:, part], positions[:, part]))
        if getattr(twin.config, ASKED, False):
            given[ASKED] = False
        with OwnRandomness(seed):
            return _rows(twin, twin(**given))[0]

    def gradients(part: slice) -> dict[str, Tensor]:
        targets = ids[0].roll(1)[part]
        _loss(rows(part), targets, TOKENS).backward()  # type: ignore[no-untyped-call]
        return _gradients(twin)

    try:
        twin.train().zero_grad()
        if not rows(every).detach().equal(rows(every, 17).detach()):
            return  # draws, which depend on how many tokens there are
        whole, (first, second) = gradients(every), map(gradients, parts)
    except Exception:  # it does not train so: with a batch of its own, it will say why
        return
    scans = any(recipe.carries for _, _, recipe in recipes_in(twin))
    summed = {
        name: first.get(name, torch.zeros(())) + second.get(name, torch.zeros(()))
        for name in first.keys() | second.keys()
    }
    off = _off(whole, summed, _SCANNED if scans else 1)
    if off is not None:
        raise Refused(
            f"'{off[0]}' gets another gradient in training from tokens together than from each of "
            f"them, by {off[1]:.0e}, so something adds to it in backward that is no sum over "
            f"tokens; ranks have some of the tokens each"
        )


@contextlib.contextmanager
def _seeded(model: nn.Module) -> Iterator[None]:
    """Random numbers of one seed, and afterwards those that would have come."""
    device = next(model.parameters()).device
    cuda = [device] if device.type == "cuda" else []
    with _drawing, torch.random.fork_rng(devices=cuda):
        torch.default_generator.manual_seed(16)
        for one in cuda:
            with torch.cuda.device(one):
                torch.cuda.manual_seed(16)
        yield


@contextlib.contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """What modules keep of the batches they train on is as before."""
    kept = [
        (module._buffers, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for buffers, name, buffer, before in kept:
            if not buffer.equal(before):
                buffer.copy_(before)
            buffers[name] = buffer  # others are put in its place, too


class _Run:
    """A forward pass without gradients: from outside, or with every module watched. Each is
    done once, when it is asked for."""

    def __init__(
        self,
        model: Any,
        given: Mapping[str, Any],
        draws: _Draws = contextlib.nullcontext,
    ) -> None:
        self._model = model
        self._given = given
        self._draws = draws

    @functools.cached_property
    def outside(self) -> Trace:
        """The call of the whole model alone."""
        try:
            with torch.no_grad(), self._draws():
                out = self._model(**self._given)
        except Exception:
            self.inside  # noqa: B018  (raises, with the name of the module)
            raise
        inputs = {k: v for k, v in self._given.items() if isinstance(v, Tensor)}
        rows = {"rows": _rows(self._model, out).detach()}
        return Trace([Call("", type(self._model).__name__, inputs, rows)])

    @functools.cached_property
    def inside(self) -> Trace:
        with torch.no_grad(), self._draws():
            return _traced(self._model, self._given)

    def blame(
        self,
        other: _Run,
        pairing: Pairing,
        *,
        apart: bool,
        spare: Sequence[str] = (),
        watched: bool = False,
    ) -> Blame | None:
        """Who is to blame where two runs differ: a module, or else the whole model."""
        whole = guilty(self.outside, other.outside, pairing, apart=apart)
        if whole is None and not watched:
            return None
        return guilty(self.inside, other.inside, pairing, apart=apart, spare=spare) or whole


def _apart(
    model: Any,
    call: _Call,
    draws: _Draws = contextlib.nullcontext,
) -> _Run:
    """One forward pass in which every token is a document."""
    return _Run(model, _given(model, call), draws)


def _given(model: Any, call: _Call) -> dict[str, Any]:
    """What the model is called with for that."""
    batch = {
        "input_ids": call.ids,
        "position_ids": call.positions,
        "seq_lens": torch.ones(1, call.ids.shape[1], dtype=torch.int64),
    }
    local = _share(model, batch)
    state = state_of("parallelize", model)
    local[KEYWORD] = _Alone(local.cut, state.group, state.strategy, state.sights)
    device = next(model.parameters()).device
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in local.items()}


def _share(model: Any, batch: Mapping[str, Any]) -> LocalBatch:
    """What one rank gets of it."""
    state = state_of("parallelize", model)
    nobody = Agreement("parallelize", None)
    alone = Place.in_group(Group.solo())
    reading = Reading(who="parallelize")
    return share(batch, alone, nobody, state, reading, "contiguous-rows")


def _traced(model: Any, arguments: Mapping[str, Any]) -> Trace:
    """A call with every module watched; Refused, with the module's name, where it raises."""
    with traced(model) as trace:
        try:
            model(**arguments)
        except Exception as error:
            raise Refused(_stumbled(trace, error, KEYWORD in arguments)) from error
    return trace


def _stumbled(trace: Trace, error: Exception, cut: bool) -> str:
    who = str(trace.open[-1]) if trace.open else "the model"
    if isinstance(error, NotSharded):
        return (
            f"{who} is not handed the keyword arguments of the model's call, so it cannot be told "
            f"which tokens of the batch it has"
        )
    said = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if not cut:
        return (
            f"{who} does not run in a twin, cut or not: {said}; pass proof=... a small model of "
            f"the same classes on the CPU, or proof=False to go without"
        )
    return f"{who} does not run on a cut batch: {said}"


def _tokens(tokens: Any) -> str:
    numbers = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
    if len(numbers) == 1:
        return f"token {numbers[0]}"
    shown = ", ".join(map(str, numbers[:3])) + (", ..." if len(numbers) > 3 else "")
    return f"tokens {shown}"


# ---- What the plain model does.


def check_numbering(twin: Any, first: int) -> list[str]:
    """*Numbering*: without `position_ids` a model counts as `shard` does."""
    call = _Call.of(twin, TOKENS, 5)
    given = {"input_ids": call.ids, "use_cache": False}
    plain = _Run(twin, given)
    numbered = _Run(twin, {**given, "position_ids": call.positions + first})
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
    plain = _plainly(twin, [_ids(twin, LONG, 6)])
    alone = _over(twin, 1, {"input_ids": _ids(twin, LONG, 6)})
    scans = any(recipe.carries for _, _, recipe in recipes_in(twin))
    rounding = _SCANNED if scans else 1
    _compare(plain, alone, lambda: _blame_one_rank(twin), "over one rank", rounding)
    documents = [_ids(twin, length, 7 + length) for length in (30, 1, LONG - 31)]
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


def _ids(twin: Any, tokens: int, seed: int) -> Tensor:
    return _Call.of(twin, tokens, seed).ids


def _plainly(twin: Any, documents: list[Tensor]) -> _Answer:
    """Each document alone, without us."""
    twin.zero_grad()
    targets = sum(d.shape[1] - 1 for d in documents)
    loss, logits = 0.0, []
    for ids in documents:
        out = twin(input_ids=ids, use_cache=False)
        rows = _rows(twin, out)[0]
        part = _loss(rows[:-1], ids[0, 1:], targets)
        part.backward()  # type: ignore[no-untyped-call]
        loss += float(part.detach())
        logits.append(rows.detach())
    return _Answer(loss, torch.cat(logits), _gradients(twin))


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
        rows = _rows(mine, out)
        loss = _loss(rows.flatten(0, 1), wanted.flatten(), count)
        loss.backward()  # type: ignore[no-untyped-call]
        said = float((out.loss - loss_of_routers(mine, out)).detach()) if learns else None
        return float(loss.detach()), said, rows[0].detach(), _gradients(mine)

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
        _traced(mine, _share(mine, {"input_ids": _ids(twin, LONG, 6)}))
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


def _rows(model: Any, out: Any) -> Tensor:
    """One vector a token: logits, or what a decoder without a head gives."""
    found = getattr(out, "logits", None)
    if found is None:
        found = getattr(out, "last_hidden_state", None)
    if not isinstance(found, Tensor) or found.dim() != 3:
        raise Refused(f"{type(model).__name__} gives neither logits nor last_hidden_state")
    return found


def _loss(rows: Tensor, targets: Tensor, count: int) -> Tensor:
    """A part of the mean, in float64. Decoders without a head have few channels to name."""
    named = torch.where(targets == -100, targets, targets % rows.shape[-1])
    return nn.functional.cross_entropy(rows, named, ignore_index=-100, reduction="sum") / count


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


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
    off_there = _off(plain.gradients, ours.gradients, rounding)
    if off_there is not None:
        nearest, error = off_there
        raise Refused(
            f"'{nearest}' gets another gradient {where} than in the plain model, by {error:.0e}"
        )


def _off(
    true: Mapping[str, Tensor], ours: Mapping[str, Tensor], rounding: float
) -> tuple[str, float] | None:
    """The parameter whose gradient is another, and by how much: the last, for gradients come
    from the end."""
    largest = max((float(g.abs().max()) for g in true.values()), default=1.0)
    wrong = None
    for key, gradient in true.items():
        other = ours.get(key, torch.zeros_like(gradient))
        # Of gradients that cancel out nothing but rounding is left.
        least = max(float(gradient.abs().max()), 1e-4 * largest)
        error = float((other - gradient).abs().max()) / least
        if not error <= rounding * _GRADIENTS:
            wrong = key, error
    return wrong


# ---- The loss in tiles.


def show_tail(twin: Any) -> Tail:
    """What a twin does to its logits: with it, a loss in tiles has the value and the gradients
    of the model's own. CannotTile where it has not."""
    name = type(twin).__name__
    if not _learns(twin):
        raise CannotTile(f"{name} gives no mean loss of the next tokens")
    ids = _ids(twin, TOKENS, 8)
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
    local = _share(mine, {"input_ids": ids, "shift_labels": targets})
    if getattr(twin.config, ASKED, False):
        local[ASKED] = False  # their loss is made outside of tiles
    loss = mine(**local).loss
    loss.backward()
    return _Answer(float(loss.detach()), torch.zeros(1), _gradients(mine), float(loss.detach()))


def _blame_one_rank(twin: Any) -> Blame | None:
    ids = _ids(twin, LONG, 6)
    with torch.no_grad(), traced(twin) as plain:
        twin(input_ids=ids, use_cache=False)
    mine = _parallel(twin)
    with torch.no_grad():
        ours = _traced(mine, _share(mine, {"input_ids": ids}))
    return guilty(plain, ours, Pairing.same(LONG, _TOLERANCE), apart=False)


def _blame_two_ranks(twin: Any, batch: Mapping[str, Tensor]) -> Blame | None:
    """Two ranks against one, with the same batch."""
    one = _parallel(twin)
    with torch.no_grad():
        whole = _traced(one, _share(one, batch))

    def body(group: Group) -> Trace:
        mine = _parallel(twin, group)
        nobody = Agreement("parallelize", None)
        state = state_of("parallelize", mine)
        reading = Reading(who="parallelize")
        local = share(batch, Place.in_group(group), nobody, state, reading)
        with torch.no_grad():
            return _traced(mine, local)

    for rank, trace in enumerate(run_ranks(2, body)):
        mine = torch.arange(TOKENS)
        pairing = Pairing(LONG, TOKENS, mine + rank * TOKENS, mine, _TOLERANCE)
        found = guilty(whole, trace, pairing, apart=False)
        if found is not None:
            return found
    return None
