"""Replays torch's CUDA caching allocator, as far as it decides what is reserved, without a GPU.

A GPU runs out of memory when the bytes that torch has *reserved* from the driver reach its size,
and those exceed the bytes in use: requests are rounded up, they are served from segments of 2 MiB
or 20 MiB, and a freed piece fits only what is not larger. :func:`replay` repeats those decisions.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` of torch 2.11 to 2.15, with as much
memory as is asked for. Addresses are made up: each segment lies above the one before, so two free
blocks of one size may be chosen in another order.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable

from ..memory.events import SMALLEST_BLOCK

__all__ = ["Allocator", "Block", "replay"]

MIB = 1 << 20
SMALL_REQUEST = MIB  # Up to this a request goes to the pool of small blocks.
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
LARGE_REQUEST = 10 * MIB  # From this on a request gets a segment of its own size,
LARGE_ROUNDING = 2 * MIB  # rounded up to this.


# The name of an event at which the segments that nothing uses are given back, and after which peaks
# are counted.
EMPTY_CACHE = "torch.cuda.empty_cache()"


def _rounded_up(size: int, step: int) -> int:
    return -(-size // step) * step


class Block:
    """A piece of a segment, between two neighbors."""

    __slots__ = ("address", "after", "before", "pool", "requested", "size", "used")

    def __init__(self, pool: Pool, address: int, size: int) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.used = False
        self.requested = 0
        self.before: Block | None = None
        self.after: Block | None = None

    def append(self, other: Block) -> None:
        """Puts a block behind this one, in front of the one that is there."""
        other.before, other.after = self, self.after
        if other.after is not None:
            other.after.before = other
        self.after = other

    def absorb(self) -> None:
        """Takes in the block behind this one."""
        other = self.after
        assert other is not None
        self.size += other.size
        self.after = other.after
        if self.after is not None:
            self.after.before = self


class Pool:
    """The free blocks of one size class and stream, by size and then address."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.free: list[tuple[int, int, Block]] = []
        self.last: Block | None = None  # of the range of addresses that grows, if segments do

    def add(self, block: Block) -> None:
        """Adds a free block."""
        insort(self.free, (block.size, block.address, block))

    def take(self, block: Block) -> None:
        """Removes a free block."""
        del self.free[bisect_left(self.free, (block.size, block.address, block))]

    def found(self, size: int) -> Block | None:
        """Removes and returns the smallest free block of at least ``size`` bytes. The one at the
        end of a range that grows is taken last."""
        at = bisect_left(self.free, size, key=lambda entry: entry[0])
        if at == len(self.free):
            return None
        if self.free[at][2] is self.last and at + 1 < len(self.free):
            at += 1
        return self.free.pop(at)[2]


class Allocator:
    """The allocator of one device; :func:`replay` drives it.

    Args:
        expandable: whether segments grow page by page, as ``expandable_segments:True`` makes them,
            instead of being allocated one by one.

    Attributes:
        requested_peak: the most bytes that the tensors needed at once.
        allocated_peak: the most in blocks in use, what ``torch.cuda.max_memory_allocated`` reports:
            ``requested_peak`` and the rounding.
        reserved: bytes taken from the driver now.
        reserved_peak: the most, what ``torch.cuda.max_memory_reserved`` reports.
    """

    def __init__(self, expandable: bool = False) -> None:
        self._expandable = expandable
        self.reserved = self.allocated = self.requested = 0
        self.allocated_peak = self.requested_peak = self.reserved_peak = 0
        self._end = 0  # of the addresses
        self.segments: list[Block] = []  # the first block of each
        self._pools: dict[tuple[Hashable, bool], Pool] = {}

    @property
    def rounding(self) -> int:
        return self.allocated_peak - self.requested_peak

    @property
    def fragmentation(self) -> int:
        return self.reserved - self.allocated_peak

    def allocate(self, size: int, stream: Hashable = 0) -> Block | None:
        """Returns a block of at least ``size`` bytes, for 0 bytes ``None``. Each stream, and each
        private pool, has blocks of its own: ``stream`` says whose."""
        if size == 0:
            return None
        rounded = _rounded_up(size, SMALLEST_BLOCK)
        small = rounded <= SMALL_REQUEST
        pool = self._pools.setdefault((stream, small), Pool(small))
        block = pool.found(rounded)
        if block is None:
            block = self._expanded(pool, rounded) if self._expandable else self._new(pool, rounded)
        remaining = block.size - rounded
        splits = remaining >= SMALLEST_BLOCK if pool.small else remaining > SMALL_REQUEST
        if splits or (self._expandable and remaining):
            self._split(block, rounded)
        block.used = True
        block.requested = size
        self.requested += size
        self.allocated += block.size
        self.requested_peak = max(self.requested_peak, self.requested)
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        return block

    def free(self, block: Block | None) -> None:
        """Makes a block free, and one with its free neighbors."""
        if block is not None:
            self.request_free(block)
            self.complete_free(block)

    def request_free(self, block: Block) -> None:
        """Counts a block no more, which some stream may still use."""
        self.requested -= block.requested
        self.allocated -= block.size

    def complete_free(self, block: Block) -> None:
        """Makes a block free that is counted no more."""
        block.used = False
        pool = block.pool
        if block.after is not None and not block.after.used:
            pool.take(block.after)
            self._join(block)
        if block.before is not None and not block.before.used:
            block = block.before
            pool.take(block)
            self._join(block)
        pool.add(block)

    def empty_cache(self) -> None:
        """Gives back the segments that nothing uses."""
        for block in [one for one in self.segments if not one.used and one.after is None]:
            block.pool.take(block)
            self.reserved -= block.size
            self.segments.remove(block)

    def reset_peaks(self) -> None:
        """Counts peaks from now on."""
        self.requested_peak, self.allocated_peak = self.requested, self.allocated
        self.reserved_peak = self.reserved

    def _split(self, block: Block, size: int) -> None:
        """Cuts a block to ``size``; the rest is free."""
        pool = block.pool
        rest = Block(pool, block.address + size, block.size - size)
        block.append(rest)
        block.size = size
        if pool.last is block:
            pool.last = rest
        pool.add(rest)

    def _join(self, block: Block) -> None:
        if block.pool.last is block.after:
            block.pool.last = block
        block.absorb()

    def _new(self, pool: Pool, size: int) -> Block:
        """Returns a new segment."""
        if pool.small:
            size = SMALL_SEGMENT
        elif size < LARGE_REQUEST:
            size = LARGE_SEGMENT
        else:
            size = _rounded_up(size, LARGE_ROUNDING)
        block = Block(pool, self._end, size)
        self._end += size
        self._reserve(size)
        self.segments.append(block)
        return block

    def _expanded(self, pool: Pool, size: int) -> Block:
        """Returns the end of the range of a pool, which has grown to hold ``size`` bytes."""
        last, page = pool.last, SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        if last is not None and not last.used:
            pool.take(last)
            grown = _rounded_up(size - last.size, page)
            last.size += grown
        else:
            grown = _rounded_up(size, page)
            end = len(self._pools) << 50 if last is None else last.address + last.size
            block = Block(pool, end, grown)
            if last is None:
                self.segments.append(block)
            else:
                last.append(block)
            last = pool.last = block
        self._reserve(grown)
        return last

    def _reserve(self, size: int) -> None:
        self.reserved += size
        self.reserved_peak = max(self.reserved_peak, self.reserved)


def replay(events: Iterable[tuple[Hashable, int]], expandable: bool = False) -> Allocator:
    """Returns the allocator after a sequence of events.

    Args:
        events: pairs of a name and bytes. Bytes of 0 or more allocate under that name, negative
            ones free what the name holds (the number does not matter). At :data:`EMPTY_CACHE`,
            with any number, segments that nothing uses are given back.
        expandable: as in :class:`Allocator`.

    Raises:
        KeyError: a name is freed that holds nothing.
        ValueError: a name is allocated twice.
    """
    allocator = Allocator(expandable)
    live: dict[Hashable, Block | None] = {}
    for index, (name, size) in enumerate(events):
        if name == EMPTY_CACHE:
            allocator.empty_cache()
            allocator.reset_peaks()
        elif size < 0:
            allocator.free(live.pop(name))
        elif name in live:
            raise ValueError(f"event {index} allocates {name!r}, which was not freed before")
        else:
            live[name] = allocator.allocate(size)
    return allocator
