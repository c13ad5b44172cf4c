"""Stages states on the device: what fills a slot of the ring, and the calls that step it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from torch import Tensor

from ..._core.overlap import flat
from ...host.ring import Copy, Piece, Ring, Run, aligned
from ..plan import Bucket, Call, Calls
from ..states import STEP
from .homes import Field, Home, taken_by_ops

# Elements, at multiples of which parameters are cut: whole blocks, and whole cache lines.
CUT = 4096


class Part(Piece):
    """Parameters, or a part of one, whose states fill a slot.

    Attributes:
        states: of each, in the slot, as an op takes them.
    """

    def __init__(self, slot: int) -> None:
        super().__init__(slot)
        self._owners: list[Tensor] = []
        self._params: list[Tensor] = []
        # Of each, its position in the bucket, and its elements; None: all.
        self._elements: list[tuple[int, slice | None]] = []
        self.states: dict[Tensor, dict[str, Tensor]] = {}

    def add(self, ring: Ring, home: Home, bucket: Bucket, at: int, block_size: int) -> None:
        """Adds the parameter at a position of a bucket."""
        views, first, param = ring.typed[self.slot], self.filled, bucket.params[at]
        states = {one.name: one.of(views[one.dtype], first) for one in home.fields}
        self._note(home, bucket.owners[at], param, taken_by_ops(states, param, block_size), at)
        copy = Copy(first, home.slab, home.first, home.size)
        self.up.append(copy)
        self.down.append(copy)
        self.filled += home.size

    def add_cut(
        self,
        ring: Ring,
        home: Home,
        bucket: Bucket,
        at: int,
        block_size: int,
        first: int,
        last: int,
    ) -> None:
        """Adds the elements from ``first`` to ``last`` of the parameter at a position."""
        param, states = bucket.params[at], {}
        for one in home.fields:
            begin, end = one.elements(first, last, block_size)
            size = one.dtype.itemsize
            run = ring.slots[self.slot][self.filled : self.filled + (end - begin) * size]
            states[one.name] = run.view(one.dtype) if one.shape else run.view(one.dtype)[0]
            there = home.first + one.first
            copy = Copy(self.filled, home.slab, there + begin * size, run.numel())
            self.up.append(copy)
            # All parts read the same count of steps, and each adds one to a copy of it.
            if one.name != STEP.name or last == param.numel():
                self.down.append(copy)
            self.filled = aligned(self.filled + run.numel())
        elements = slice(first, last)
        self._note(home, bucket.owners[at], flat(param)[elements], states, at, elements)

    def _note(
        self,
        home: Home,
        owner: Tensor,
        param: Tensor,
        states: dict[str, Tensor],
        at: int,
        elements: slice | None = None,
    ) -> None:
        self.places.append(home)
        self._owners.append(owner)
        self._params.append(param)
        self._elements.append((at, elements))
        self.states[param] = states

    def bucket(self, whole: Bucket) -> Bucket:
        """Returns what an op steps, with the gradients that a bucket has in this step. Those of
        parameters that are cut lie in memory as these do."""
        grads = [
            whole.grads[at] if elements is None else flat(whole.grads[at])[elements]
            for at, elements in self._elements
        ]
        return Bucket(whole.layout, self._owners, self._params, grads)


def pieces_of(bucket: Bucket, homes: dict[Tensor, Home], ring: Ring, block_size: int) -> list[Part]:
    """Returns the parameters of a bucket in pieces that fit in a slot, with the states and copies
    of each. Parameters that are larger are cut."""
    pieces: list[Part] = []

    def begin() -> Part:
        pieces.append(Part(ring.next_slot()))
        return pieces[-1]

    piece: Part | None = None
    for at, owner in enumerate(bucket.owners):
        home = homes[owner]
        if home.size > ring.slot_bytes:
            for first, last in _cuts(home, bucket.params[at], ring.slot_bytes, block_size):
                begin().add_cut(ring, home, bucket, at, block_size, first, last)
            piece = None
            continue
        if piece is None or piece.filled + home.size > ring.slot_bytes:
            piece = begin()
        piece.add(ring, home, bucket, at, block_size)
    for piece in pieces:
        piece.close(ring)
    return pieces


def _cuts(home: Home, param: Tensor, slot_bytes: int, block_size: int) -> Iterable[tuple[int, int]]:
    length = CUT
    while _part_bytes(home.fields, 2 * length, block_size) <= slot_bytes:
        length *= 2
    step = length
    while step > CUT:  # the longest multiple that fits
        step //= 2
        if _part_bytes(home.fields, length + step, block_size) <= slot_bytes:
            length += step
    # Equal parts: a small one would leave the link idle while its slot waits for a large one's.
    parts = -(-param.numel() // length)
    length = aligned(-(-param.numel() // parts), CUT)
    return ((i, min(i + length, param.numel())) for i in range(0, param.numel(), length))


def copied_bytes(home: Home, param: Tensor, slot_bytes: int, block_size: int) -> tuple[int, int]:
    """Returns the bytes that a step copies up and down for a parameter."""
    if home.size <= slot_bytes:
        return home.size, home.size
    size = sum(one.size for one in home.fields)
    counts = sum(one.size for one in home.fields if one.name == STEP.name)
    parts = len(list(_cuts(home, param, slot_bytes, block_size)))
    return size + (parts - 1) * counts, size


def _part_bytes(fields: Iterable[Field], length: int, block_size: int) -> int:
    size = 0
    for one in fields:
        begin, end = one.elements(0, length, block_size)
        size += aligned((end - begin) * one.dtype.itemsize)
    return size


def smallest_cut(fields: Iterable[Field], block_size: int) -> int:
    """Returns the bytes of state of the smallest part that a parameter is cut into."""
    return _part_bytes(fields, CUT, block_size)


class Staging(Run):
    """The steps of parts, each between the copies of its states."""

    def calls(self, steps: Sequence[tuple[Bucket, Call]]) -> Calls:
        """Returns the calls that step the parts, in their order."""
        return [(bucket, partial(self.step, i, step)) for i, (bucket, step) in enumerate(steps)]
