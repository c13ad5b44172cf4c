"""Replays torch's CUDA caching allocator over a sequence of allocations and frees.

A GPU runs out of memory when the bytes that torch has *reserved* from the driver reach its size,
and those exceed the bytes in use: requests are rounded up, they are served from segments of 2 MiB
or 20 MiB, and a freed piece fits only what is not larger. :func:`replay` repeats those decisions
without a GPU.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from .allocator import Allocator, OutOfMemory
from .allocator_settings import AllocatorSettings
from .blocks import Block

__all__ = ["Replay", "replay"]


@dataclass(frozen=True)
class Replay:
    """What a replay found, in bytes.

    Attributes:
        requested_peak: the most that the tensors needed at once.
        allocated_peak: the most in blocks in use, what ``torch.cuda.max_memory_allocated`` reports:
            ``requested_peak`` and the rounding.
        reserved_peak: the most taken from the driver, what ``torch.cuda.max_memory_reserved``
            reports.
        segments: the number of segments when ``reserved_peak`` was reached first.
        reserved: what is still reserved at the end.
        allocated: what is still in use at the end.
        retries: how many times all unused segments were given back to serve a request.
        failed: the index of the event that could not be served, and its bytes; the replay ends
            there. ``None`` when everything fitted.
    """

    requested_peak: int
    allocated_peak: int
    reserved_peak: int
    segments: int
    reserved: int
    allocated: int
    retries: int
    failed: tuple[int, int] | None

    @property
    def rounding(self) -> int:
        return self.allocated_peak - self.requested_peak

    @property
    def fragmentation(self) -> int:
        return self.reserved_peak - self.allocated_peak


def replay(
    events: Iterable[tuple[Hashable, int]],
    settings: AllocatorSettings | str | None = None,
    capacity: int | None = None,
) -> Replay:
    """Returns what torch's CUDA caching allocator reserves for a sequence of events.

    Args:
        events: pairs of a name and bytes. Bytes of 0 or more allocate under that name, negative
            ones free what the name holds (the number does not matter).
        settings: of the allocator, or the text of ``PYTORCH_CUDA_ALLOC_CONF``.
        capacity: the bytes that the driver can give to this process, context and other processes
            taken off. ``None`` for no limit.

    Raises:
        KeyError: a name is freed that holds nothing.
        ValueError: a name is allocated twice.
    """
    if isinstance(settings, str):
        settings = AllocatorSettings.parse(settings)
    allocator = Allocator(settings, capacity)
    live: dict[Hashable, Block | None] = {}
    failed = None
    for index, (name, size) in enumerate(events):
        if size < 0:
            allocator.free(live.pop(name))
            continue
        if name in live:
            raise ValueError(f"event {index} allocates {name!r}, which was not freed before")
        try:
            live[name] = allocator.allocate(size)
        except OutOfMemory:
            failed = (index, size)
            break
    return Replay(
        requested_peak=allocator.requested_peak,
        allocated_peak=allocator.allocated_peak,
        reserved_peak=allocator.reserved_peak,
        segments=allocator.segments_at_peak,
        reserved=allocator.reserved,
        allocated=allocator.allocated,
        retries=allocator.retries,
        failed=failed,
    )
