"""What the steps of a group took: tokens a second, bytes sent, time waited, memory."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
import warnings
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from longspan import _C, _peaks
from longspan._arguments import check_flags
from longspan._group import Group, ranks_of
from longspan._tables import aligned, html_table

#: Steps that are remembered for a group, the last ones.
_KEPT = 256
_TITLES = ("step", "seconds", "tokens", "tokens/s", "sent", "waited", "peak memory", "so far")

_log = logging.getLogger("longspan")


@dataclass(frozen=True)
class Step:
    """One step of this rank: from the first `shard` to the end of `sum_gradients`, or from the
    end of the step before."""

    step: int
    seconds: float
    tokens: int  #: real ones of whole batches, on all ranks of the group
    sent_bytes: int
    waited: float  #: seconds that the host waited for other ranks
    peak_bytes: int  #: of this process so far: of the GPU where there is one, else of the host
    #: Of this step; None where it raised no peak, and nobody asked for the peaks of steps.
    step_peak_bytes: int | None

    def cells(self) -> tuple[str, ...]:
        rate = self.tokens / self.seconds if self.seconds else 0.0
        return (
            str(self.step),
            f"{self.seconds:.3f}",
            f"{self.tokens:,}",
            f"{rate:,.0f}",
            f"{self.sent_bytes / 1e6:.1f} MB",
            f"{self.waited:.3f} s",
            f"<= {_gigabytes(self.peak_bytes)}"
            if self.step_peak_bytes is None
            else _gigabytes(self.step_peak_bytes),
            _gigabytes(self.peak_bytes),
        )


@dataclass(frozen=True)
class Report:
    """The last steps of a group on this rank; print it for a table, which it is in a notebook."""

    group: str
    steps: tuple[Step, ...]

    def to_json(self) -> dict[str, Any]:
        """For machines: plain dictionaries, lists and numbers."""
        return {"group": self.group, "steps": [asdict(step) for step in self.steps]}

    def __str__(self) -> str:
        table = [_TITLES, *(step.cells() for step in self.steps)]
        return "\n".join([self.group, *aligned(table, right=True)])

    def _repr_html_(self) -> str:
        return html_table(self.group, _TITLES, [step.cells() for step in self.steps])


@dataclass
class _Open:
    """The step that runs, and those that ended."""

    began: float = 0.0
    tokens: int = 0
    sent: int = 0
    waited: float = 0.0
    peak: _peaks.Span | None = None
    count: int = 0
    ended: deque[Step] = field(default_factory=lambda: deque(maxlen=_KEPT))


_lock = threading.Lock()
_groups: dict[tuple[str, int], _Open] = {}


def report(group: Any = None, *, step_peaks: bool | None = None) -> Report:
    """What the last 256 steps of this rank took. A step ends with `sum_gradients`; tokens are
    those that `shard` cut for the group since the step before, evaluation included. With
    LONGSPAN_LOG=info in the environment rank 0 writes a line to standard error after each.

    There is one peak of memory for all who ask torch (or the system, without a GPU), and only a
    step that raises it shows its own. ``step_peaks=True`` begins a new one with every step from
    now on, for this process: `torch.cuda.max_memory_allocated` is then that of the step. False
    ends that."""
    ranks = ranks_of(group)
    if step_peaks is not None:
        check_flags("report", step_peaks=step_peaks)
    with _lock:
        if step_peaks is not None:
            _peaks.renew("report", step_peaks)
        found = _groups.get(_key(ranks))
        steps = () if found is None else tuple(found.ended)
    return Report(repr(ranks), steps)


def note_tokens(group: Group, cut: _C.Cut) -> None:
    """A batch was cut for a group."""
    tokens = sum(packing.real_tokens for packing in cut.packings)
    with _lock:
        found = _found(group)
        if found.began == 0.0:
            found.began = time.monotonic()
            found.sent, found.waited = group.sent_bytes, group.waited
            found.peak = _peaks.Span()
        found.tokens += tokens


def note_step(group: Group) -> None:
    """Gradients of a step were summed."""
    now = time.monotonic()
    with _lock:
        found = _found(group)
        if found.began == 0.0 or found.peak is None:  # nothing was cut here
            return
        peak = found.peak.end()
        step = Step(
            step=found.count,
            seconds=now - found.began,
            tokens=found.tokens,
            sent_bytes=group.sent_bytes - found.sent,
            waited=group.waited - found.waited,
            peak_bytes=peak.so_far,
            step_peak_bytes=peak.of_span,
        )
        found.ended.append(step)
        found.began, found.tokens = now, 0
        found.sent, found.waited = group.sent_bytes, group.waited
        found.peak = _peaks.Span()
        found.count += 1
    if group.rank() == 0 and _wants_lines():
        named = zip(_TITLES, step.cells(), strict=True)
        _log.info("%s", ", ".join(f"{title} {cell}" for title, cell in named))


def _key(group: Group) -> tuple[str, int]:
    return group.name, group.rank()


def _found(group: Group) -> _Open:
    found = _groups.get(_key(group))
    if found is None:
        for name, rank in list(_groups):
            if name and not _is_alive(name):
                del _groups[name, rank]
        found = _groups[_key(group)] = _Open()
    return found


def _is_alive(name: str) -> bool:
    c10d: Any = torch._C._distributed_c10d
    with contextlib.suppress(RuntimeError, LookupError, ValueError):
        return c10d._resolve_process_group(name) is not None
    return False


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


def _wants_lines() -> bool:
    asked = os.environ.get("LONGSPAN_LOG", "").strip().lower()
    if asked not in ("", "off", "info"):
        _say_what_is_known(os.environ["LONGSPAN_LOG"])
    if asked != "info":
        return False
    if not _log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("longspan: %(message)s"))
        _log.addHandler(handler)
        _log.setLevel(logging.INFO)
    return True


@functools.cache
def _say_what_is_known(asked: str) -> None:
    """Once for each word."""
    warnings.warn(
        f"longspan: LONGSPAN_LOG is '{asked}'; known are `info`, a line after each step of rank 0, "
        f"and `off`",
        stacklevel=5,
    )
