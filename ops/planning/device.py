"""What a CUDA device holds besides the tensors of a plan."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from ..memory.events import Timeline
from .device_costs import context, cublas_workspace
from .replay import replay
from .result import DeviceShare

__all__ = ["device_share"]


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
    has_device = torch.cuda.is_initialized()  # asking would make a context
    capability = torch.cuda.get_device_capability() if has_device else (8, 0)
    config = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    size = cublas_workspace(capability, config) if _keeps_workspaces() else 0
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    settings = settings.replace(" ", "")
    if left_out := [name for name in _NOT_REPLAYED if name in settings]:
        timeline.notes.append(f"The plan does not follow the allocator's {', '.join(left_out)}.")
    found = replay(_events(timeline, size), "expandable_segments:true" in settings.lower())
    return DeviceShare(found.rounding, found.fragmentation, size, *context(capability))


def _keeps_workspaces() -> bool:
    """Returns whether torch keeps cuBLAS's workspaces from one product to the next."""
    if hasattr(torch._C, "_cuda_cublas_workspace_cache"):
        return False
    return os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE", "1") == "1"


def _events(timeline: Timeline, workspaces: int) -> Iterator[tuple[Any, int]]:
    changes: list[tuple[int, int, int, int]] = []
    for a in timeline.allocations:
        changes.append((a.start, 1, a.id, a.bytes))
        if a.end is not None:
            changes.append((a.end, 0, a.id, -max(1, a.bytes)))
    changes.sort()
    if workspaces:
        yield "workspaces", workspaces
    for _, _, key, size in changes:
        yield key, size
