"""Estimates what a CUDA device holds besides the tensors of a plan: the allocator's share, cuBLAS's
scratch memory and the context."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from ..memory.events import Timeline
from .allocator import EMPTY_CACHE, replay
from .products import capability
from .result import DeviceShare

__all__ = ["context", "context_bytes", "device_share"]

MIB = 1 << 20
# By the least compute capability. Reports differ by the driver and by what was loaded before the
# reading; one reading per row.
_CONTEXTS = (
    ((9, 0), 512 * MIB, "assumed: more multiprocessors than the 426 MiB read on Ada"),
    ((8, 9), 426 * MIB, "RTX 6000 Ada, torch 2.10, CUDA 13.0: unsloth-zoo pull request 1053"),
    ((8, 0), 400 * MIB, "CUDA >= 11.7 and lazy loading, pytorch issue 109888"),
    ((0, 0), 274 * MIB, "torch 1.13 and lazy loading, pytorch pull request 86509"),
)
# Options of PYTORCH_CUDA_ALLOC_CONF that change what is reserved, in ways that are not replayed.
_NOT_REPLAYED = (
    "backend:cudaMallocAsync",
    "garbage_collection_threshold",
    "large_segment_size_mb",
    "max_split_size_mb",
    "roundup_power2_divisions",
)


def device_share(timeline: Timeline) -> DeviceShare:
    """Returns the share of a device: the allocator's, by a replay of its rules over the allocations
    of the plan, cuBLAS's and the context's. Notes settings of the allocator that it leaves out."""
    if timeline.device != "cuda":
        return DeviceShare()
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    settings = settings.replace(" ", "")
    if left_out := [name for name in _NOT_REPLAYED if name in settings]:
        timeline.notes.append(f"The plan does not follow the allocator's {', '.join(left_out)}.")
    grows = "expandable_segments:true" in settings.lower()
    found = replay(_events(timeline, with_past=not grows), grows)
    workspaces = found.requested_peak - timeline.peak_bytes
    return DeviceShare(found.rounding, found.fragmentation, workspaces, *context(capability()))


def context(capability: tuple[int, int]) -> tuple[int, str]:
    """Returns an estimate of the bytes that the CUDA context of a process takes outside the
    allocator, and where the number is from: of the driver, the stacks of the multiprocessors and
    the kernels of torch. It grows by what NCCL, cuDNN and others load."""
    return next((size, source) for least, size, source in _CONTEXTS if capability >= least)


def context_bytes(device: torch.device) -> int:
    """Returns the estimate of :func:`context` for a device, and 0 of the CPU, which has none."""
    return context(capability())[0] if device.type == "cuda" else 0


def _events(timeline: Timeline, with_past: bool) -> Iterator[tuple[Any, int]]:
    """Yields the allocations and frees of a plan in order, those of cuBLAS's workspaces with
    them."""
    past = timeline.past if with_past else []
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
