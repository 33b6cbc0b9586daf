"""What a model does in training, as far as evaluation does not show it: what mixes tokens, what
it keeps of them, and what adds to gradients."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from longspan._backward import Gradients, backward_of, in_training
from longspan._probing import (
    GRADIENTS,
    SCANNED,
    TOKENS,
    Draws,
    Probe,
    Refused,
    arguments_of,
    call_apart,
    gradients_of,
    ids_of,
    loss_of,
    off_by,
    tokens_in_words,
    vectors_of,
    with_others,
)
from longspan._recipes import recipes_in
from longspan._routers import ASKED
from longspan._tracing import Pairing, Trace, guilty
from longspan._twins import OwnRandomness
from longspan._wrappings import holds_shards

#: Ranks that are threads have one state of random numbers.
_drawing = threading.Lock()
#: Two parts of the tokens of a call, and how many are in the first.
_CUT = TOKENS // 3
_PARTS = slice(0, _CUT), slice(_CUT, None)


def check_in_training(model: Any, tolerance: float, draws: Draws) -> None:
    """*Isolation* of a model that was let in for evaluation, where its forward is another one in
    training: norms of a batch, experts with a capacity. `draws` makes random numbers those of one
    seed, so that dropout is the same in every run. Leaves the model in training."""
    base, other = Probe.of(model, TOKENS, 1), Probe.of(model, TOKENS, 2).ids
    same = Pairing.same(TOKENS, tolerance)
    half = torch.arange(0, TOKENS, 2)
    try:
        calm = call_apart(model, base).outside
        model.train()
        first = call_apart(model, base, draws)
        if guilty(calm, first.outside, same, apart=False) is None:
            return
        if guilty(first.outside, call_apart(model, base, draws).outside, same, apart=False):
            return  # draws that no seed repeats
        second = call_apart(model, with_others(model, base, other, half), draws)
        blame = first.blame(second, same, apart=True)
    except Exception:  # it does not train so: with a batch of its own, it will say why
        return
    if blame is not None:
        raise Refused(
            f"{blame} mixes tokens outside attention in training: when {tokens_in_words(half)} "
            f"changed, its output moved at {tokens_in_words(blame.tokens)} by {blame.by:.0e}; "
            f"cutting the tokens would change it"
        )


def check_states(model: Any, tolerance: float, draws: Draws) -> None:
    """What a model keeps of the tokens it was trained on, in buffers, changes no later answer:
    ranks see other tokens, and would part. Leaves the model in evaluation."""
    base, other = Probe.of(model, TOKENS, 1), Probe.of(model, TOKENS, 2)

    def train(call: Probe) -> None:
        model.train()
        _ = call_apart(model, call, draws).outside
        model.eval()

    def kept_of(call: Probe) -> dict[str, Tensor]:
        with buffers_kept(model):
            train(call)
            return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}

    def answer_after(call: Probe) -> Trace:
        with buffers_kept(model):
            train(call)
            return call_apart(model, base).outside

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
    every = slice(None)
    ids = ids_of(twin, TOKENS, 9)
    positions = torch.cat([torch.arange(_CUT), torch.arange(TOKENS - _CUT)])[None]

    def rows(part: slice, seed: int = 16) -> Tensor:
        given = arguments_of(twin, Probe(ids[:, part], positions[:, part]))
        if getattr(twin.config, ASKED, False):
            given[ASKED] = False
        with OwnRandomness(seed):
            return vectors_of(twin, twin(**given))[0]

    def gradients(part: slice) -> dict[str, Tensor]:
        targets = ids[0].roll(1)[part]
        loss_of(rows(part), targets, TOKENS).backward()  # type: ignore[no-untyped-call]
        return gradients_of(twin)

    try:
        twin.train().zero_grad()
        if not rows(every).detach().equal(rows(every, 17).detach()):
            return  # draws, which depend on how many tokens there are
        whole, (first, second) = gradients(every), map(gradients, _PARTS)
    except Exception:  # it does not train so: with a batch of its own, it will say why
        return
    scans = any(recipe.carries for _, _, recipe in recipes_in(twin))
    summed = {
        name: first.get(name, torch.zeros(())) + second.get(name, torch.zeros(()))
        for name in first.keys() | second.keys()
    }
    off = off_by(whole, summed, SCANNED if scans else 1)
    if off is not None:
        raise Refused(
            f"'{off[0]}' gets another gradient in training from tokens together than from each of "
            f"them, by {off[1]:.0e}, so something adds to it in backward that is no sum over "
            f"tokens; ranks have some of the tokens each"
        )


def check_backward(model: Any, tolerance: float, draws: Draws) -> None:
    """*Isolation* of gradients in training, on a user's own model: what comes back at a token
    depends on that token, and what modules add on the way is a sum over tokens. Under fully_shard
    only a whole backward pass is understood, and none is made."""
    if torch.is_inference_mode_enabled() or holds_shards(model):
        return
    base, other = Probe.of(model, TOKENS, 1), Probe.of(model, TOKENS, 2).ids
    half = torch.arange(0, TOKENS, 2)
    tolerance = max(GRADIENTS, tolerance)

    def back(call: Probe, scale: float) -> Gradients:
        def rows() -> Tensor:
            with draws():
                return vectors_of(model, model(**arguments_of(model, call)))

        return backward_of(model, rows, call.ids.shape[1], scale)

    def moved(one: Gradients, two: Gradients, tokens: Tensor) -> tuple[str, float] | None:
        same = Pairing(TOKENS, TOKENS, tokens, tokens, tolerance)
        return _last_off(one, two, same)

    try:
        with in_training(model), buffers_kept(model):
            every = torch.arange(TOKENS)
            first = back(base, 1)
            if moved(first, back(base, 1), every):
                return  # draws that no seed repeats
            changed = with_others(model, base, other, half)
            off, added = None, back(base, 0)
            if any(map(_is_any, (added.inputs, added.parameters))):
                parts = [Probe(base.ids[:, p], base.positions[:, p]) for p in _PARTS]
                off = moved(added, back(changed, 0), every[1::2]) or _no_sum(
                    added, [back(part, 0) for part in parts], 4 * tolerance
                )
            off = off or moved(first, back(changed, 1), every[1::2])
    except Exception:  # it does not train so: with a batch of its own, it will say why
        return
    if off is not None:
        raise Refused(
            f"{off[0]} another gradient in training for tokens together than for each of them, by "
            f"{off[1]:.0e}, so something adds to it in backward that is no sum over tokens; ranks "
            f"have some of the tokens each"
        )


def _is_any(gradients: Mapping[str, Tensor]) -> bool:
    """0 / 0, of nothing that came back, adds nothing."""
    return any(bool(one.nan_to_num(0.0, 0.0, 0.0).any()) for one in gradients.values())


def _last_off(one: Gradients, two: Gradients, pairing: Pairing) -> tuple[str, float] | None:
    """Of what modules were given the last whose gradient differs, for gradients come from the
    end."""
    wrong = None
    for name, gradient in one.inputs.items():
        if name in two.inputs:
            found = pairing.differing(gradient, two.inputs[name])
            if found is not None and bool((found > pairing.tolerance).any()):
                wrong = f"{name} gives back", float(found.max())
    return wrong


def _no_sum(
    whole: Gradients, parts: Sequence[Gradients], tolerance: float
) -> tuple[str, float] | None:
    tokens = torch.arange(_CUT)
    first = Pairing(TOKENS, _CUT, tokens, tokens, tolerance)
    one, two = (part.parameters for part in parts)
    learned = {name: gradient for name, gradient in whole.parameters.items() if gradient.any()}
    summed = {name: one[name] + two[name] for name in learned}
    off = off_by(learned, summed, tolerance / GRADIENTS)
    return _last_off(whole, parts[0], first) or (off and (f"'{off[0]}' gets", off[1]))


@contextlib.contextmanager
def seeded(model: nn.Module) -> Iterator[None]:
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
def buffers_kept(model: nn.Module) -> Iterator[None]:
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
