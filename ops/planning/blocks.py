"""Blocks of memory and the lists of free ones, for the replay of the caching allocator."""

from __future__ import annotations

from bisect import bisect_left, insort

__all__ = ["Block", "Pool", "reach"]


class Block:
    """A piece of a segment, between two neighbors."""

    __slots__ = (
        "address",
        "after",
        "before",
        "born",
        "mapped",
        "pool",
        "requested",
        "size",
        "used",
    )

    def __init__(self, pool: Pool, address: int, size: int, mapped: bool = True) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.mapped = mapped
        self.used = False
        self.requested = 0
        self.born = 0  # The pool's count of searches when the block became free.
        self.before: Block | None = None
        self.after: Block | None = None

    @property
    def split(self) -> bool:
        return self.before is not None or self.after is not None


class Pool:
    """The free blocks of one pool, by size and then address."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []  # Address space of expandable segments.
        self.searches = 0

    def add(self, block: Block) -> None:
        block.born = self.searches
        insort(self.free, (block.size, block.address, block))

    def take(self, block: Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address, block))]

    def fitting(self, size: int) -> int:
        """Returns the position of the smallest free block of at least ``size`` bytes."""
        return bisect_left(self.free, size, key=_size)

    def add_unmapped(self, block: Block) -> None:
        insort(self.unmapped, (block.address, block))

    def take_unmapped(self, block: Block) -> None:
        del self.unmapped[bisect_left(self.unmapped, (block.address, block))]


def _size(entry: tuple[int, int, Block]) -> int:
    return entry[0]


def reach(block: Block) -> int:
    """Returns the size of a block with the unmapped space behind it."""
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)
