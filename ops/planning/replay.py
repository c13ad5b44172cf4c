"""Replays torch's CUDA caching allocator over a sequence of allocations and frees.

A GPU runs out of memory when the bytes that torch has *reserved* from the driver reach its size,
and those exceed the bytes in use: requests are rounded up, they are served from segments of 2 MiB
or 20 MiB, and a freed piece fits only what is not larger. :func:`replay` repeats those decisions
without a GPU.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from .allocator import Allocator, Block

__all__ = ["Replay", "replay"]


@dataclass(frozen=True)
class Replay:
    """The peaks of a replay, in bytes.

    Attributes:
        requested_peak: the most that the tensors needed at once.
        allocated_peak: the most in blocks in use, what ``torch.cuda.max_memory_allocated`` reports:
            ``requested_peak`` and the rounding.
        reserved_peak: the most taken from the driver, what ``torch.cuda.max_memory_reserved``
            reports.
    """

    requested_peak: int
    allocated_peak: int
    reserved_peak: int

    @property
    def rounding(self) -> int:
        return self.allocated_peak - self.requested_peak

    @property
    def fragmentation(self) -> int:
        return self.reserved_peak - self.allocated_peak


def replay(events: Iterable[tuple[Hashable, int]], expandable: bool = False) -> Replay:
    """Returns what torch's CUDA caching allocator reserves for a sequence of events.

    Args:
        events: pairs of a name and bytes. Bytes of 0 or more allocate under that name, negative
            ones free what the name holds (the number does not matter).
        expandable: as ``expandable_segments`` in ``PYTORCH_CUDA_ALLOC_CONF``.

    Raises:
        KeyError: a name is freed that holds nothing.
        ValueError: a name is allocated twice.
    """
    allocator = Allocator(expandable)
    live: dict[Hashable, Block | None] = {}
    for index, (name, size) in enumerate(events):
        if size < 0:
            allocator.free(live.pop(name))
        elif name in live:
            raise ValueError(f"event {index} allocates {name!r}, which was not freed before")
        else:
            live[name] = allocator.allocate(size)
    # Nothing is given back, so the most that was reserved is what is.
    return Replay(allocator.requested_peak, allocator.allocated_peak, allocator.reserved)
