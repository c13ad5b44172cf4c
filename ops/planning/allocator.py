"""Torch's CUDA caching allocator, as far as it decides what is reserved, without a GPU.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` of torch 2.11 to 2.15, for one stream,
outside CUDA graphs and private pools. Addresses are made up: each segment lies above the one
before, so two free blocks of one size may be chosen in another order.
"""

from __future__ import annotations

from math import lcm

from .allocator_settings import AllocatorSettings
from .blocks import Block, Pool, reach

__all__ = ["Allocator", "OutOfMemory"]

MIB = 1 << 20
SMALLEST_BLOCK = 512
SMALL_REQUEST = MIB  # Up to this a request goes to the pool of small blocks.
SMALL_SEGMENT = 2 * MIB
LARGE_REQUEST = 10 * MIB  # From this on a request gets a segment of its own size,
LARGE_ROUNDING = 2 * MIB  # rounded up to this.


class OutOfMemory(MemoryError):
    """Says that the replayed allocator could not serve a request within its capacity."""


class Allocator:
    """The allocator of one device; :func:`~headroom.planning.replay.replay` drives it.

    Args:
        settings: what ``PYTORCH_CUDA_ALLOC_CONF`` sets.
        capacity: the bytes that the driver can give, ``None`` for no limit.
    """

    def __init__(
        self, settings: AllocatorSettings | None = None, capacity: int | None = None
    ) -> None:
        self.settings = settings or AllocatorSettings()
        self.capacity = capacity
        self.reserved = self.allocated = self.requested = 0
        self.reserved_peak = self.allocated_peak = self.requested_peak = 0
        self.segments = self.segments_at_peak = self.retries = 0
        self._small, self._large = Pool(True), Pool(False)
        self._heads: dict[int, Block] = {}  # The first block of every segment, by its address.
        self._next_address = 0

    # Requests

    def allocate(self, size: int) -> Block | None:
        """Returns a block of at least ``size`` bytes, for 0 bytes ``None``."""
        if size == 0:
            return None
        rounded = self.settings.rounded(size)
        pool = self._small if rounded <= SMALL_REQUEST else self._large
        block = self._found(pool, rounded)
        if block is None:
            self._collect_garbage()
            block = self._grown(pool, rounded)
        if block is None and self._release_oversized(pool, rounded):
            block = self._grown(pool, rounded)
        if block is None:
            self.release_unused()
            self.retries += 1
            block = self._grown(pool, rounded)
        if block is None:
            raise OutOfMemory(
                f"{size} bytes more do not fit: {self.reserved} of {self.capacity} bytes are "
                f"reserved, {self.allocated} of them in use"
            )
        if self._worth_splitting(block, rounded):
            pool.add(self._split(block, rounded))
        block.used = True
        block.requested = size
        self.requested += size
        self.allocated += block.size
        self.requested_peak = max(self.requested_peak, self.requested)
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        return block

    def free(self, block: Block | None) -> None:
        if block is None:
            return
        self.requested -= block.requested
        self.allocated -= block.size
        block.used = False
        self._merge_neighbors(block)
        block.pool.add(block)

    def _found(self, pool: Pool, size: int) -> Block | None:
        """Takes the best-fitting free block, if there is one."""
        pool.searches += 1
        free, settings = pool.free, self.settings
        at = pool.fitting(size)
        if at == len(free):
            return None
        if settings.expandable_segments:
            # A block before unmapped space counts with what it can grow to.
            while at + 1 < len(free) and reach(free[at + 1][2]) < reach(free[at][2]):
                at += 1
        found, limit = free[at][0], settings.max_split_size
        if limit is not None:
            if size < limit <= found:
                return None
            if size >= limit and found >= size + settings.max_non_split_rounding:
                return None
        return free.pop(at)[2]

    def _worth_splitting(self, block: Block, size: int) -> bool:
        remaining = block.size - size
        if block.pool.small or self.settings.expandable_segments:
            return remaining >= SMALLEST_BLOCK
        limit = self.settings.max_split_size
        return (limit is None or size < limit) and remaining > SMALL_REQUEST

    # Blocks

    def _split(self, block: Block, size: int) -> Block:
        """Cuts a block to ``size`` and returns the rest, which is the block after it."""
        rest = Block(block.pool, block.address + size, block.size - size, block.mapped)
        rest.before, rest.after = block, block.after
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.size = rest, size
        return rest

    def _merge_neighbors(self, block: Block) -> None:
        for other in (block.before, block.after):
            if other is None or other.used or other.mapped != block.mapped:
                continue
            pool = other.pool
            if other.mapped:
                pool.take(other)
            else:
                pool.take_unmapped(other)
            first, second = (other, block) if other is block.before else (block, other)
            if first is other:
                block.address, block.before = first.address, first.before
                if block.before is not None:
                    block.before.after = block
                else:
                    self._heads[block.address] = block
            else:
                block.after = second.after
                if block.after is not None:
                    block.after.before = block
            block.size += other.size

    # Segments

    def _grown(self, pool: Pool, size: int) -> Block | None:
        """Takes a new segment from the driver, or ``None`` where the capacity is reached."""
        if self.settings.expandable_segments:
            return self._expanded(pool, size)
        if size <= SMALL_REQUEST:
            segment = SMALL_SEGMENT
        elif size < LARGE_REQUEST:
            segment = self.settings.large_segment
        else:
            segment = -(-size // LARGE_ROUNDING) * LARGE_ROUNDING
        if not self._reserve(segment):
            return None
        self.segments += 1
        self._note_reserved()
        block = Block(pool, self._next_address, segment)
        self._next_address += segment + LARGE_ROUNDING  # A gap: segments never merge.
        self._heads[block.address] = block
        return block

    def _reserve(self, size: int) -> bool:
        if self.capacity is not None and self.reserved + size > self.capacity:
            return False
        self.reserved += size
        return True

    def _note_reserved(self) -> None:
        if self.reserved > self.reserved_peak:
            self.reserved_peak, self.segments_at_peak = self.reserved, self.segments

    def _give_back(self, block: Block) -> None:
        block.pool.take(block)
        del self._heads[block.address]
        self.reserved -= block.size
        self.segments -= 1

    def release_unused(self) -> None:
        """Gives back every segment that holds nothing, as ``torch.cuda.empty_cache`` does."""
        for pool in (self._large, self._small):
            for _, _, block in list(pool.free):
                if self.settings.expandable_segments:
                    self._unmap(block)
                elif not block.split:
                    self._give_back(block)

    def _release_oversized(self, pool: Pool, size: int) -> bool:
        """Gives back blocks that ``max_split_size_mb`` keeps whole, enough for ``size`` bytes."""
        limit = self.settings.max_split_size
        if limit is None:
            return False
        wanted = max(size, limit)
        at = pool.fitting(wanted)
        if at < len(pool.free):
            self._give_back(pool.free[at][2])
            return True
        released = 0
        for _, _, block in reversed(list(pool.free)):
            if released >= wanted or block.size < limit:
                break
            released += block.size
            self._give_back(block)
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Gives back the whole large blocks that went unused longest, above the threshold."""
        if not self.settings.garbage_collection_threshold or self.capacity is None:
            return
        goal = self.reserved - int(self.settings.garbage_collection_threshold * self.capacity)
        pool, reclaimed = self._large, 0
        whole = [block for _, _, block in pool.free if not block.split]
        while whole and reclaimed < goal:
            ages = [pool.searches - block.born for block in whole]
            mean = sum(ages) / len(ages)
            for block, age in zip(whole, ages, strict=True):
                if age >= mean:
                    reclaimed += block.size
                    self._give_back(block)
            whole = [block for block, age in zip(whole, ages, strict=True) if age < mean]

    # Expandable segments: one range of addresses for each pool, mapped page by page

    def _page(self, pool: Pool) -> int:
        return SMALL_SEGMENT if pool.small else self.settings.large_segment

    def _expanded(self, pool: Pool, size: int) -> Block | None:
        block = self._growable(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            rest = block.after
            assert rest is not None
            if not self._map(rest, min(size - block.size, rest.size)):
                return None
            block = rest  # It took in the free block before it.
        pool.take(block)
        return block

    def _growable(self, pool: Pool, size: int) -> Block:
        """Returns the first of a run of free and unmapped blocks that together reach ``size``."""
        for _, block in pool.unmapped:
            first = block.before if block.before is not None and not block.before.used else block
            total, each = 0, first
            while each is not None and not each.used and total < size:
                total += each.size
                each = each.after
            if total >= size:
                return first
        page = self._page(pool)
        space = (1 << 50) if self.capacity is None else self.capacity + self.capacity // 8
        space = -(-max(space, size) // page) * page
        block = Block(pool, self._next_address, space, mapped=False)
        self._next_address += space + page
        alignment = lcm(SMALL_SEGMENT, self.settings.large_segment)
        self._next_address = -(-self._next_address // alignment) * alignment
        self._heads[block.address] = block
        pool.add_unmapped(block)
        self.segments += 1
        return block

    def _map(self, block: Block, size: int) -> bool:
        page, pool = self._page(block.pool), block.pool
        size = -(-size // page) * page
        if not self._reserve(size):
            return False
        self._note_reserved()
        pool.take_unmapped(block)
        if size < block.size:
            pool.add_unmapped(self._split(block, size))
        block.mapped = True
        self._merge_neighbors(block)
        pool.add(block)
        return True

    def _unmap(self, block: Block) -> None:
        """Gives back the whole pages of a free block."""
        page, pool = self._page(block.pool), block.pool
        start = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if start >= end:
            return
        pool.take(block)
        if start > block.address:
            rest = self._split(block, start - block.address)
            pool.add(block)
            block = rest
        if end < block.address + block.size:
            pool.add(self._split(block, end - block.address))
        block.mapped = False
        self.reserved -= block.size
        self._merge_neighbors(block)
        if block.split:
            pool.add_unmapped(block)
        else:
            del self._heads[block.address]
            self.segments -= 1

    def blocks(self) -> list[list[tuple[int, int, str]]]:
        """Returns of every segment its blocks: address, size, and "used", "free" or "unmapped"."""
        segments = []
        for head in self._heads.values():
            blocks, block = [], head
            while block is not None:
                state = "used" if block.used else "free" if block.mapped else "unmapped"
                blocks.append((block.address, block.size, state))
                block = block.after
            segments.append(blocks)
        return segments
