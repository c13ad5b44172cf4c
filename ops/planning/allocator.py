"""Replays torch's CUDA caching allocator, as far as it decides what is reserved, without a GPU.

A GPU runs out of memory when the bytes that torch has *reserved* from the driver reach its size,
and those exceed the bytes in use: requests are rounded up, they are served from segments of 2 MiB
or 20 MiB, and a freed piece fits only what is not larger. :func:`replay` repeats those decisions.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` of torch 2.11 to 2.15, with as much
memory as is asked for. Addresses are made up: each segment lies above the one before.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable

from ..memory.events import SMALLEST_BLOCK
from .allocator_settings import AllocatorSettings

__all__ = ["Allocator", "Block", "replay"]

MIB = 1 << 20
SMALL_REQUEST = MIB  # Up to this a request goes to the pool of small blocks.
SMALL_SEGMENT = 2 * MIB
LARGE_REQUEST = 10 * MIB  # From this on a request gets a segment of its own size,
LARGE_ROUNDING = 2 * MIB  # rounded up to this.
EVERYTHING = 1 << 50  # bytes of addresses, of which a segment that grows takes what it needs

# The name of an event at which the segments that nothing uses are given back, and after which peaks
# are counted.
EMPTY_CACHE = "torch.cuda.empty_cache()"


def _rounded_up(size: int, step: int) -> int:
    return -(-size // step) * step


class Block:
    """A piece of a segment, between two neighbors."""

    __slots__ = (
        *("address", "size", "pool", "mapped", "used", "requested", "since"),
        *("before", "after"),
    )

    def __init__(self, pool: Pool, address: int, size: int, mapped: bool = True) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.mapped = mapped  # or a part of a segment that grows which has no memory
        self.used = False
        self.requested = 0
        self.since = 0  # the search in its pool after which it is free
        self.before: Block | None = None
        self.after: Block | None = None

    def is_free(self) -> bool:
        return self.mapped and not self.used

    def is_whole(self) -> bool:
        """Returns whether it is all of its segment."""
        return self.before is None and self.after is None

    def cut(self, size: int) -> Block:
        """Makes the block as small as ``size``, and returns the rest, which lies behind it."""
        rest = Block(self.pool, self.address + size, self.size - size, self.mapped)
        rest.before, rest.after = self, self.after
        if rest.after is not None:
            rest.after.before = rest
        self.after, self.size = rest, size
        return rest

    def absorb(self) -> None:
        """Takes in the block behind this one."""
        other = self.after
        assert other is not None
        self.size += other.size
        self.after = other.after
        if self.after is not None:
            self.after.before = self


class Pool:
    """The free blocks of one size class and stream, by size and then address.

    Attributes:
        page: the bytes that a segment grows by, and the least that it has.
        unmapped: what has no memory of the segment that grows, by address.
        searches: how often a block was asked for.
    """

    def __init__(self, small: bool, page: int) -> None:
        self.small, self.page = small, page
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []
        self.searches = 0

    def add(self, block: Block) -> None:
        """Adds a block that is not used."""
        if block.mapped:
            block.since = self.searches
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def take(self, block: Block) -> None:
        """Removes a block that is not used."""
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address, block))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address, block))]

    def found(self, size: int, settings: AllocatorSettings) -> Block | None:
        """Removes and returns the smallest free block of at least ``size`` bytes, where one that
        can grow is as large as it can become."""
        self.searches += 1
        at = bisect_left(self.free, size, key=lambda entry: entry[0])
        if at == len(self.free):
            return None
        if settings.expandable:
            sizes = [_grown(entry[2]) for entry in self.free[at : at + 2]]
            while len(sizes) == 2 and sizes[1] < sizes[0]:
                at += 1
                sizes = [_grown(entry[2]) for entry in self.free[at : at + 2]]
        limit, found = settings.max_split, self.free[at][0]
        if size < limit <= found or limit <= size <= found - settings.max_excess:
            return None
        return self.free.pop(at)[2]


def _grown(block: Block) -> int:
    """Returns the size of a block with what has no memory behind it."""
    after = block.after
    return block.size if after is None or after.mapped else block.size + after.size


class Allocator:
    """The allocator of one device; :func:`replay` drives it.

    Attributes:
        requested_peak: the most bytes that the tensors needed at once.
        allocated_peak: the most in blocks in use, what ``torch.cuda.max_memory_allocated`` reports:
            ``requested_peak`` and the rounding.
        reserved_peak: the most taken from the driver, what ``torch.cuda.max_memory_reserved``
            reports.
    """

    def __init__(self, settings: AllocatorSettings | None = None) -> None:
        self._settings = settings or AllocatorSettings()
        self.reserved = self.allocated = self.requested = 0
        self.reserved_peak = self.allocated_peak = self.requested_peak = 0
        self._end = 0  # of the addresses
        self.segments: list[Block] = []  # the first block of each
        self._pools: dict[tuple[Hashable, bool], Pool] = {}

    @property
    def rounding(self) -> int:
        return self.allocated_peak - self.requested_peak

    @property
    def fragmentation(self) -> int:
        return self.reserved_peak - self.allocated_peak

    def allocate(self, size: int, stream: Hashable = 0) -> Block | None:
        """Returns a block of at least ``size`` bytes, for 0 bytes ``None``. Each stream, and each
        private pool, has blocks of its own: ``stream`` says whose."""
        if size == 0:
            return None
        settings = self._settings
        rounded = settings.rounded(size, SMALLEST_BLOCK)
        small = rounded <= SMALL_REQUEST
        page = SMALL_SEGMENT if small else settings.large_segment
        pool = self._pools.setdefault((stream, small), Pool(small, page))
        block = pool.found(rounded, settings)
        if block is None:
            if self.reserved > settings.collects_from:
                self._collect()
            block = (self._expanded if settings.expandable else self._new)(pool, rounded)
        remaining = block.size - rounded
        if pool.small or settings.expandable:
            splits = remaining >= SMALLEST_BLOCK
        else:
            splits = rounded < settings.max_split and remaining > SMALL_REQUEST
        if splits:
            pool.add(block.cut(rounded))
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
        self._merged(block)

    def empty_cache(self) -> None:
        """Gives back the memory that nothing uses."""
        for pool in self._pools.values():
            for _, _, block in [*pool.free]:
                self._give_back(block)

    def reset_peaks(self) -> None:
        """Counts peaks from now on."""
        self.requested_peak, self.allocated_peak = self.requested, self.allocated
        self.reserved_peak = self.reserved

    def _merged(self, block: Block) -> None:
        """Adds a block to its pool, as one with the neighbors that are as free as it is."""
        pool = block.pool
        for first in (block, block.before):
            other = None if first is None else first.after
            if first is None or other is None or first.used or other.used:
                continue
            if first.mapped == other.mapped:
                pool.take(other if first is block else first)
                first.absorb()
                block = first
        pool.add(block)

    def _reserve(self, size: int) -> None:
        self.reserved += size
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def _new(self, pool: Pool, size: int) -> Block:
        """Returns a new segment."""
        size = _rounded_up(size, LARGE_ROUNDING) if size >= LARGE_REQUEST else pool.page
        block = Block(pool, self._end, size)
        self._end += size
        self._reserve(size)
        self.segments.append(block)
        return block

    def _give_back(self, block: Block) -> None:
        """Gives back a free block which is a segment, or the pages in it of one that grows."""
        pool = block.pool
        if not self._settings.expandable:
            if block.is_whole():
                pool.take(block)
                self.segments.remove(block)
                self.reserved -= block.size
            return
        begin = _rounded_up(block.address, pool.page)
        size = (block.address + block.size) // pool.page * pool.page - begin
        if size <= 0:
            return
        pool.take(block)
        if begin > block.address:
            block, before = block.cut(begin - block.address), block
            pool.add(before)
        if size < block.size:
            pool.add(block.cut(size))
        block.mapped = False
        self.reserved -= size
        self._merged(block)

    def _collect(self) -> None:
        """Gives back segments that nothing uses, those that have been free for longest first."""
        target = self.reserved - self._settings.collects_from
        large = [pool for (_, small), pool in self._pools.items() if not small]
        whole = [block for pool in large for *_, block in pool.free if block.is_whole()]
        while whole and target > 0 and not self._settings.expandable:
            ages = [block.pool.searches - block.since for block in whole]
            least = sum(ages) / len(ages)
            for block, age in zip(whole, ages, strict=True):
                if age >= least:
                    target -= block.size
                    self._give_back(block)
            whole = [block for block, age in zip(whole, ages, strict=True) if age < least]

    def _expanded(self, pool: Pool, size: int) -> Block:
        """Returns ``size`` bytes or more of the segment that grows, of which those that have no
        memory get some."""
        if not pool.unmapped and not any(first.pool is pool for first in self.segments):
            self.segments.append(Block(pool, 0, EVERYTHING, mapped=False))
            pool.add(self.segments[-1])
        block = next(filter(None, (_room(block, size) for _, block in pool.unmapped)))
        while not block.mapped or block.size < size:
            missing, rest = (block.after, size - block.size) if block.mapped else (block, size)
            assert missing is not None
            pool.take(missing)
            mapped = min(_rounded_up(rest, pool.page), missing.size)
            if mapped < missing.size:
                pool.add(missing.cut(mapped))
            missing.mapped = True
            self._reserve(mapped)
            before = missing.before
            block = before if before is not None and before.is_free() else missing
            self._merged(missing)
        pool.take(block)
        return block


def _room(block: Block, size: int) -> Block | None:
    """Returns where ``size`` bytes begin that nothing uses, of which a block has some that have no
    memory; or None."""
    if block.before is not None and not block.before.used:
        block = block.before
    room, at = 0, block
    while at is not None and not at.used and room < size:
        room, at = room + at.size, at.after
    return block if room >= size else None


def replay(
    events: Iterable[tuple[Hashable, int]], settings: AllocatorSettings | None = None
) -> Allocator:
    """Returns the allocator after a sequence of events.

    Args:
        events: pairs of a name and bytes. Bytes of 0 or more allocate under that name, negative
            ones free what the name holds (the number does not matter). At :data:`EMPTY_CACHE`,
            with any number, memory that nothing uses is given back.
        settings: of the allocator; None: the usual ones.

    Raises:
        KeyError: a name is freed that holds nothing.
        ValueError: a name is allocated twice.
    """
    allocator = Allocator(settings)
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
