"""The largest memory of this process, so far and of a span of time.

A process has one peak, of its GPU where it uses one and else of the host, and whoever begins
it anew takes it from everybody else; so that is done only where it was asked for. Callers take
turns."""

from __future__ import annotations

import contextlib
import pathlib
import re
import sys
import weakref
from typing import Any, NamedTuple

import torch

_STATUS = pathlib.Path("/proc/self/status")
_CLEAR = pathlib.Path("/proc/self/clear_refs")
#: What the kernel takes for "begin the peak of the resident size anew".
_RESIDENT = "5"

_renews = False
_so_far: dict[str, int] = {}  #: by device
_open: weakref.WeakSet[Span] = weakref.WeakSet()


class Peak(NamedTuple):
    """Bytes; `of_span` is None where the span did not raise the peak, which hides its own."""

    so_far: int
    of_span: int | None


class Span:
    """From now to `end`."""

    def __init__(self) -> None:
        self._device, self._before = _look()
        self._renewed = _renews
        #: The largest since then, where others begin anew meanwhile.
        self.largest = 0
        _open.add(self)

    def end(self) -> Peak:
        device, so_far = _look()
        _open.discard(self)
        raised = so_far > self._before
        known = device == self._device and (raised or (self._renewed and _renews))
        return Peak(so_far, (so_far if raised else self.largest) if known else None)


def renew(who: str, wanted: bool) -> None:
    """Whether spans from now on begin a peak of their own."""
    global _renews
    if wanted:
        _look()
        try:
            _begin_anew()
        except OSError as error:
            raise RuntimeError(
                f"{who}: the peak memory of a step is not known here, since {_CLEAR} cannot be "
                f"written ({error.strerror}); leave `step_peaks` out"
            ) from None
    _renews = wanted


def _look() -> tuple[str, int]:
    """What is measured, and its peak so far."""
    global _renews
    device = "cuda" if _uses_cuda() else "host"
    now = _counted(device)
    for span in list(_open):
        span.largest = max(span.largest, now)
    _so_far[device] = max(_so_far.get(device, 0), now)
    if _renews:
        try:
            _begin_anew()
        except OSError:  # spans show what they raise again
            _renews = False
    return device, _so_far[device]


def _begin_anew() -> None:
    if _uses_cuda():
        torch.cuda.reset_peak_memory_stats()
    else:
        _CLEAR.write_text(_RESIDENT)


def _uses_cuda() -> bool:
    cuda: Any = torch.cuda
    return bool(cuda.is_available() and cuda.is_initialized())


def _counted(device: str) -> int:
    if device == "cuda":
        return int(torch.cuda.max_memory_allocated())
    # What getrusage says may be of the program that started this one.
    with contextlib.suppress(OSError):
        found = re.search(r"VmHWM:\s+(\d+)", _STATUS.read_text())
        if found is not None:
            return int(found[1]) * 1024
    with contextlib.suppress(ImportError):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return 0
