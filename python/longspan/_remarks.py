"""What is probably not meant, said once for a model, with how to be sure. Each is recognised by
facts that an honest program does not show; nothing here changes a result."""

from __future__ import annotations

import dataclasses
import math
import os
import socket
import struct
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from longspan import _C
from longspan._hooks import is_known, name_of, names_in
from longspan._walking import MARK, modules_in
from longspan._wrappings import Trained, is_sharded, local_part

_IGNORED = -100
#: Targets of a row that must all lie one token ahead before we speak.
_ENOUGH = 8
#: Numbers of a weight that are compared.
_FIRST = 16
#: What clips numbers, of torch.
_CLIPS = {
    *("clamp", "clamp_", "clamp_min", "clamp_max", "clip", "clip_"),
    *("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"),
}
#: Calls in which somebody looks; programs do the same in every step.
_LOOKS = 16


def _say(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=5)


def looks_again(state: Any, what: str) -> bool:
    """Whether a call is among the first; compiled code does not count."""
    if torch.compiler.is_compiling() or state.remarks[what] >= _LOOKS:
        return False
    state.remarks[what] += 1
    return True


# ---- Labels.


def labels_are_shifted(ids: Tensor, labels: Tensor) -> bool | None:
    """Whether, on a whole row, every label is the id of the next token and not of its own;
    None where there are too few to tell."""
    if ids.dim() != 2 or labels.shape != ids.shape or ids.shape[1] < 2:
        return None
    here, ahead, mine = labels[:, :-1], ids[:, 1:], ids[:, :-1]
    learned = here != _IGNORED
    told = (learned.sum(1) >= _ENOUGH) & (learned & (ahead != mine)).any(1)
    shifted = told & ~(learned & (here != ahead)).any(1)
    any_told, any_shifted = torch.stack([told, shifted]).any(1).tolist()
    return any_shifted if any_told else None


def remark_on_labels(state: Any, tokens: dict[str, Tensor]) -> None:
    """Of the first batch that tells, as a collator gave it."""
    if state.remarks["labels"] or "labels" not in tokens or "input_ids" not in tokens:
        return
    found = labels_are_shifted(tokens["input_ids"], tokens["labels"])
    if found is None:
        return
    state.remarks["labels"] = 1
    if found and state.group.rank() == 0:
        _say(
            "shard: `labels` of a whole row are the `input_ids` one token ahead, so they seem to "
            "be shifted already, and shard shifts labels by one token: the model would learn to "
            "skip one; give them unshifted, as transformers does (labels = input_ids), or under "
            "the name `shift_labels`, which is taken as it is; to be sure, print both"
        )


_asked_to_shift = False


def remark_on_shifting(who: str, batch: Any) -> None:
    """Of the first batch that tells, where nobody's model is known and labels are to be shifted.
    Without that they are taken as they are, shifted or not."""
    global _asked_to_shift
    ids, labels = (batch.get(key) for key in ("input_ids", "labels"))
    if not isinstance(ids, Tensor) or not isinstance(labels, Tensor):
        return
    if _asked_to_shift or ids.is_meta or labels.is_meta or ids.device != labels.device:
        return
    found = labels_are_shifted(ids, labels)
    if found is None:
        return
    _asked_to_shift = True
    if found:
        _say(
            f"{who}: `labels` of a whole row are the `input_ids` one token ahead, so they seem to "
            "be shifted already, and `shift_labels=True` shifts them by one token more: the model "
            "would learn to skip one; give them unshifted (labels = input_ids), or leave "
            "`shift_labels` out; to be sure, print both"
        )


# ---- Losses.


def remark_on_missing_count(state: Any, module: nn.Module, given: dict[str, Any]) -> None:
    """A model that was given labels without the batch's count takes the mean of its own."""
    if torch.compiler.is_compiling() or state.group.size() == 1 or state.remarks["count"]:
        return
    named = [key for key in ("shift_labels", "labels") if given.get(key) is not None]
    if not named or given.get("num_items_in_batch") is not None or not torch.is_grad_enabled():
        return
    state.remarks["count"] = 1
    if state.group.rank() == 0:
        _say(
            f"{type(module).__name__}: got `{named[0]}` without `num_items_in_batch`, so its loss "
            "is the mean over this rank's targets and not over those of the whole batch, and "
            "gradients summed over ranks come out too large; pass on all that shard gave, as "
            "model(**local); to be sure, compare with longspan.check_parity(model, batch, group)"
        )


@dataclasses.dataclass(frozen=True)
class Targets:
    """How many targets a batch has, and one of this rank's tokens that has one."""

    here: int
    everywhere: int
    at: int  #: in the flattened share


def targets_of(state: Any, local: dict[str, Any], everywhere: Tensor | None) -> Targets | None:
    """None where this rank has none, or nobody looks any more."""
    if state.group.size() == 1 or state.remarks["mean"] >= _LOOKS:
        return None
    labels = local.get("shift_labels")
    if not isinstance(labels, Tensor) or everywhere is None:
        return None
    places = (labels.flatten() != _IGNORED).nonzero().flatten()
    if not places.numel():
        return None
    return Targets(places.numel(), int(everywhere), int(places[0]))


def remark_on_own_mean(state: Any, targets: Targets | None, logits: Any) -> None:
    """Looks, in backward, at what a loss of the user's own does to one token's logits: that of
    a mean over this rank's targets is known by its size."""
    if targets is None or targets.here == targets.everywhere:
        return
    if not (isinstance(logits, Tensor) and logits.requires_grad):
        return
    state.remarks["mean"] += 1
    # A copy: all logits would live as long as their hook.
    row = logits.detach().flatten(0, -2)[targets.at].to(torch.float32, copy=True)
    shape = logits.shape

    def look(grad: Tensor | None) -> None:
        # Where nothing flows, as through outputs that DDP passes on, hooks are given None.
        if grad is None or grad.shape != shape or state.remarks["mean"] > _LOOKS:
            return
        count = divisor_of(row, grad.flatten(0, -2)[targets.at].float())
        if count is None or abs(count - targets.here) > 0.01 * targets.here:
            return
        if abs(count - targets.everywhere) <= 0.02 * targets.everywhere:
            return
        state.remarks["mean"] = _LOOKS + 1
        _say(
            f"longspan: the loss of rank {state.group.rank()} is a mean over its own "
            f"{targets.here} targets, and the batch has {targets.everywhere} on all ranks; "
            "gradients summed over ranks come out too large: take "
            "longspan.reduce_loss(losses.sum(), count, group), or the model's own loss; to be "
            "sure, compare with longspan.check_parity(model, batch, group)"
        )

    watched: Any = logits
    watched.register_hook(look)


def divisor_of(logits: Tensor, grad: Tensor) -> float | None:
    """By what a cross entropy was divided, of one token's logits [V] and their gradient; None
    where it is no such gradient."""
    label = int(grad.argmin())
    expected = logits.softmax(-1)
    expected[label] -= 1.0
    if not float(grad[label]) < 0.0 or not float(expected[label]) < -1e-3:
        return None
    divisor = float(expected[label]) / float(grad[label])
    apart = float((grad * divisor - expected).abs().max())
    return divisor if math.isfinite(divisor) and apart <= 0.02 else None


# ---- What ranks tell each other in `sum_gradients`.

_looked: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
#: Norm of a parameter's gradient when backward had made it.
_left: Any = WeakIdKeyDictionary()
#: Words of a rank: its random numbers, its process, by what its gradients were scaled, its weights.
WORDS = 4


def facts(model: nn.Module, trained: Sequence[Trained]) -> list[int]:
    """What this rank knows, as so many words; zeros where nobody looks any more."""
    looks = _looked.get(model, 0)
    _looked[model] = looks + 1
    if looks >= _LOOKS:
        return [0] * WORDS
    weights = word_of(repr(hashes_of_weights(model)).encode()) if looks == 0 else 0
    return [*_random_words(model), _factor_word(trained), weights]


def remark_on_facts(model: nn.Module, rank: int, said: Sequence[Sequence[int]]) -> None:
    """From the words of all ranks, in rank order. Rank 0 speaks."""
    states, processes, factors, _ = zip(*said, strict=True)
    if 0 not in states and len(set(states)) == 1 and len(set(processes)) == len(said):
        _looked[model] = _LOOKS
        if rank == 0:
            _say(
                f"sum_gradients: random numbers are in the same state on all {len(said)} ranks, "
                f"and `{_draws(model)}` draws dropout from them, so tokens at the same place of "
                "their shares get the same mask; call longspan.seed_ranks(seed, group) once the "
                "model is built; to be sure, compare torch.initial_seed() of the ranks"
            )
    known = [struct.unpack("d", struct.pack("q", word))[0] for word in factors if word]
    if len(known) > 1 and max(known) > 1.02 * min(known):
        _looked[model] = _LOOKS
        if rank == 0:
            listed = ", ".join(f"{factor:.3g}" for factor in known)
            _say(
                "sum_gradients: since backward, gradients were scaled by other factors on each "
                f"rank ({listed}), as torch.nn.utils.clip_grad_norm_ does with the norm of a "
                "rank's own part; sum first, then clip with longspan.clip_grad_norm(model, "
                "max_norm, group); to be sure, leave clipping out and compare"
            )


def remark_on_hooks(model: nn.Module, rank: int, trained: Sequence[Trained]) -> None:
    """Hooks of users that clip gradients as backward makes them, of a rank's part. They are read
    and not called: they may count."""
    if _looked.get(model, 0) > 1 or rank != 0:
        return
    for one in trained:
        own: Any = one.parameter
        hooks = [*(own._backward_hooks or {}).values()]
        hooks += (own._post_accumulate_grad_hooks or {}).values()
        for hook in hooks:
            if not is_known(hook) and not _CLIPS.isdisjoint(names_in(hook)):
                _say(
                    f"sum_gradients: the hook {name_of(hook)} on the gradient of `{one.name}` "
                    "clips it in backward, where each rank has a part of it, and parts that are "
                    "clipped sum to another gradient; take it off, and clip what was summed, with "
                    "longspan.clip_grad_norm(model, max_norm, group); to be sure, compare with "
                    "longspan.check_parity(model, batch, group)"
                )
                return


def hashes_of_weights(model: nn.Module) -> dict[str, int]:
    """Of the first numbers of every parameter that lies whole on each rank, of a model that was
    parallelized: modules of others may be what they like."""
    if not any(MARK in module.__dict__ for module in modules_in(model)):
        return {}
    rows = {}
    for name, parameter in model.named_parameters():
        if type(parameter) is nn.Parameter and not (is_sharded(parameter) or parameter.is_meta):
            row = parameter.detach()
            while row.dim() > 1 and len(row):
                row = row[0]
            rows[name] = row.reshape(-1)[:_FIRST]
    return {name: word_of(repr(row.tolist()).encode()) for name, row in rows.items()}


def watch_scale(parameters: Sequence[nn.Parameter]) -> None:
    """Notes the size of the smallest gradient whenever backward has made it."""
    smallest = min((p for p in parameters if p.numel()), key=lambda p: p.numel(), default=None)
    if smallest is None or smallest in _left:
        return

    def note(parameter: Tensor) -> None:
        grad = parameter.grad
        if grad is not None and local_part(grad).layout == torch.strided:
            _left[parameter] = _norm(grad)

    _left[smallest] = None
    watched: Any = smallest
    watched.register_post_accumulate_grad_hook(note)


@torch.no_grad()
def _norm(grad: Tensor) -> Tensor:
    here = local_part(grad.detach())
    wide = torch.float64 if here.dtype in (torch.float64, torch.complex128) else torch.float32
    norm: Tensor = torch.linalg.vector_norm(here, dtype=wide)
    return norm.double()


def _factor_word(trained: Sequence[Trained]) -> int:
    """The bits of a float: the factor between now and backward; 0 where nobody knows. What
    wrappers average is written to by them."""
    for one in trained:
        before = _left.get(one.parameter)
        if before is None or one.reduction is not None or one.parameter.grad is None:
            continue
        now, then = torch.stack([_norm(one.parameter.grad), before]).tolist()
        if math.isfinite(now) and math.isfinite(then) and now > 0 and then > 0:
            word: int = struct.unpack("q", struct.pack("d", now / then))[0]
            return word
    return 0


def _draws(model: nn.Module) -> str | None:
    """A module that draws random numbers in training."""
    named: list[tuple[str, Any]] = list(model.named_modules())
    for name, module in named:
        drops = isinstance(module, nn.modules.dropout._DropoutNd) and 0.0 < module.p < 1.0
        if drops and module.training:
            return name
    return None


def _random_words(model: nn.Module) -> tuple[int, int]:
    if _draws(model) is None:
        return 0, 0
    device = next(model.parameters()).device
    cuda = device.type == "cuda"
    state = torch.cuda.get_rng_state(device) if cuda else torch.get_rng_state()
    here = f"{socket.gethostname()} {os.getpid()}".encode()
    return word_of(bytes(state.tolist())), word_of(here)


def word_of(data: bytes) -> int:
    return _C.hash_of(data) & (1 << 63) - 1 | 1
