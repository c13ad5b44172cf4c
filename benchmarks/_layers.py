"""What benchmarks of layers share: a forward and a backward pass as one call, and the bytes that a
call holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .harness import Contender, Rotation

__all__ = ["held_bytes", "trained"]


def trained(
    data: Rotation,
    function: Callable[[Any], Any],
    inputs: Callable[[Any], Any],
    grads: Callable[[Any], Any] = lambda d: None,
) -> Contender:
    """Returns the contender that runs ``function`` on the next data, and its backward pass from
    ``grads`` to ``inputs``. Gradients are handed back, not added to earlier ones."""

    def call() -> None:
        d = data.next()
        torch.autograd.grad(function(d), inputs(d), grads(d))

    return Contender(call)


def held_bytes(call: Callable[[], Any], device: torch.device) -> tuple[int, int]:
    """Returns how much more memory torch's allocator holds behind a call, while its result lives,
    and the most that it held in between."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = call()
        held = torch.cuda.memory_allocated(device) - before
        del result
        return held, torch.cuda.max_memory_allocated(device) - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = call()
    held = peak = 0
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    del result
    return held, peak
