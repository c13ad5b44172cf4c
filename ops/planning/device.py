"""Estimates what a CUDA device holds besides the tensors of a plan: the allocator's share, cuBLAS's
scratch memory and the context."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import torch

from ..memory.events import Timeline
from .allocator import replay
from .result import DeviceShare

__all__ = ["capability", "context", "cublas_workspace", "device_share"]

KIB, MIB = 1 << 10, 1 << 20
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
    config = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    size = cublas_workspace(capability(), config) if _keeps_workspaces() else 0
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    settings = settings.replace(" ", "")
    if left_out := [name for name in _NOT_REPLAYED if name in settings]:
        timeline.notes.append(f"The plan does not follow the allocator's {', '.join(left_out)}.")
    found = replay(_events(timeline, size), "expandable_segments:true" in settings.lower())
    return DeviceShare(found.rounding, found.fragmentation, size, *context(capability()))


def capability() -> tuple[int, int]:
    """Returns the compute capability of the device that plans are for: of the current one, if this
    process has one in use, else 8.0."""
    has_device = torch.cuda.is_initialized()  # asking would make a context
    return torch.cuda.get_device_capability() if has_device else (8, 0)


def context(capability: tuple[int, int]) -> tuple[int, str]:
    """Returns an estimate of the bytes that the CUDA context of a process takes outside the
    allocator, and where the number is from: of the driver, the stacks of the multiprocessors and
    the kernels of torch. It grows by what NCCL, cuDNN and others load."""
    return next((size, source) for least, size, source in _CONTEXTS if capability >= least)


def cublas_workspace(capability: tuple[int, int], config: str | None = None) -> int:
    """Returns the bytes that torch allocates, through its allocator, for products on one stream.

    The sizes are those of ``ATen/cuda/CublasHandlePool.cpp``: 32 MiB from compute capability 9.0
    on, 8.125 MiB (``:4096:2:16:8``) before. cuBLASLt, which takes 1 MiB, uses cuBLAS's.

    Args:
        config: the value of ``CUBLAS_WORKSPACE_CONFIG``, if it is set.
    """
    sizes = re.findall(r":(\d+):(\d+)", config or "")
    if sizes:
        return max(MIB, sum(int(size) * KIB * int(count) for size, count in sizes))
    return 32 * MIB if capability[0] >= 9 else 8 * MIB + 128 * KIB


def _keeps_workspaces() -> bool:
    """Returns whether torch keeps cuBLAS's workspaces from one product to the next."""
    if hasattr(torch._C, "_cuda_cublas_workspace_cache"):
        return False
    return os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE", "1") == "1"


def _events(timeline: Timeline, workspaces: int) -> Iterator[tuple[Any, int]]:
    """Yields the allocations and frees of a plan in order, after that of the workspaces."""
    changes: list[tuple[int, int, int, int]] = []
    for a in timeline.allocations:
        changes.append((a.start, 1, a.id, a.bytes))
        if a.end is not None:
            changes.append((a.end, 0, a.id, -max(1, a.bytes)))
    if workspaces:
        yield "workspaces", workspaces
    for _, _, key, size in sorted(changes):
        yield key, size
