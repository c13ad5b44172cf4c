"""The GPU of this machine, on which a program runs as it is, to be compared with its rehearsal."""

from __future__ import annotations

import collections
import resource
from typing import Any

import torch

from .host import KINDS

__all__ = ["OnGpu"]


class OnGpu:
    """Says of the first GPU and its host what a report has of those that are rehearsed."""

    def __init__(self) -> None:
        self.reads: collections.Counter[str] = collections.Counter()  # all values are computed

    def device(self) -> dict[str, Any]:
        """Returns name, memory and compute capability, and as ``context`` the bytes that torch's
        allocator does not have: of the context, of libraries, and of other processes."""
        of = torch.cuda.get_device_properties(0)  # not before the program, which may fork
        free, total = torch.cuda.mem_get_info(0)
        return {
            "name": of.name,
            "gpu": of.name,
            "memory": of.total_memory,
            "capability": 10 * of.major + of.minor,
            "context": total - free - torch.cuda.memory_reserved(0),
            "context_is": "with what other processes have",
        }

    def peak_reserved(self, by_torch: int) -> int:
        """Returns the most bytes that were reserved, of which only torch's allocator tells."""
        return by_torch

    def host(self, error: BaseException | None) -> dict[str, Any]:
        """Returns the most bytes that the process had on the host."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        parts = dict.fromkeys(KINDS, 0)
        return {"peak": peak, **parts, "rest": peak, "limit": None, "refused": []}
