"""Estimates what a CUDA device holds besides the tensors of a plan: the allocator's share, cuBLAS's
scratch memory and the context."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .._core.contexts import context
from ..memory.events import Timeline
from .allocator import EMPTY_CACHE, replay
from .allocator_settings import current_settings
from .products import capability
from .result import DeviceShare

__all__ = ["context_bytes", "device_share"]


def device_share(timeline: Timeline) -> DeviceShare:
    """Returns the share of a device: the allocator's, by a replay of its rules over the allocations
    of the plan, cuBLAS's and the context's. Notes settings of the allocator that it leaves out."""
    if timeline.device != "cuda":
        return DeviceShare()
    settings = current_settings()
    if settings.left_out:
        names = ", ".join(settings.left_out)
        timeline.notes.append(f"The plan does not follow the allocator's {names}.")
    found = replay(_events(timeline), settings)
    workspaces = found.requested_peak - timeline.peak_bytes
    return DeviceShare(found.rounding, found.fragmentation, workspaces, *context(capability()))


def context_bytes(device: torch.device) -> int:
    """Returns the estimate of :func:`context` for a device, and 0 of the CPU, which has none."""
    return context(capability())[0] if device.type == "cuda" else 0


def _events(timeline: Timeline) -> Iterator[tuple[Any, int]]:
    """Yields the allocations and frees of a plan in order, those of cuBLAS's workspaces with
    them."""
    past = timeline.past
    changes: list[tuple[int, int, int, int]] = []
    for sign, allocations in ((1, [*past, *timeline.allocations]), (-1, timeline.workspaces)):
        for a in allocations:
            key = sign * (a.id + 1)
            changes.append((a.start, 1, key, a.bytes))
            if a.end is not None:
                changes.append((a.end, 0, key, -max(1, a.bytes)))
    if past:
        changes.append((timeline.began, 0, 0, -1))
    for _, _, key, size in sorted(changes):
        yield key or EMPTY_CACHE, size
