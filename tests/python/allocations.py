"""What torch's allocator gave out, as its profiler saw it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch._C._profiler import _EventType


def peak_of_step(model: Any, local: dict[str, Any]) -> int:
    """The most bytes that were there at once in forward and backward, beyond those before."""
    for _ in range(2):  # whatever is made once is made
        model(**local).loss.backward()
        model.zero_grad()
    return peak_of(lambda: model(**local).loss.backward())


def peak_of(run: Callable[[], Any]) -> int:
    """The most bytes that were there at once, beyond those before."""
    gc.collect()  # what others left and an earlier profile saw would be taken off here
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    assert profile.profiler is not None
    events = list(profile.profiler.kineto_results.experimental_event_tree())
    allocations = []
    while events:
        event = events.pop()
        events += event.children
        if event.tag == _EventType.Allocation:
            allocations.append((event.start_time_ns, event.extra_fields.alloc_size))
    live = peak = 0
    for _, size in sorted(allocations):
        live += size
        peak = max(peak, live)
    return peak
