"""Stages states on the device: what fills a slot of the ring, and the calls that step it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from torch import Tensor

from ..._core.overlap import flat
from ...host import cutting
from ...host.ring import Copy, Piece, Ring, Run, aligned
from ..plan import Bucket, Call, Calls
from ..states import STEP
from .homes import Field, Home, taken_by_ops


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
        elements: slice,
    ) -> None:
        """Adds some elements of the parameter at a position."""
        param, states = bucket.params[at], {}
        for one in home.fields:
            begin, end = one.elements(elements.start, elements.stop, block_size)
            size = one.dtype.itemsize
            run = ring.slots[self.slot][self.filled : self.filled + (end - begin) * size]
            states[one.name] = run.view(one.dtype) if one.shape else run.view(one.dtype)[0]
            there = home.first + one.first
            copy = Copy(self.filled, home.slab, there + begin * size, run.numel())
            self.up.append(copy)
            # All parts read the same count of steps, and each adds one to a copy of it.
            if one.name != STEP.name or elements.stop == param.numel():
                self.down.append(copy)
            self.filled = aligned(self.filled + run.numel())
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
    those = [homes[owner] for owner in bucket.owners]

    def cuts(at: int) -> Sequence[slice]:
        return _cuts(those[at], bucket.params[at], ring.slot_bytes, block_size)

    for held in cutting.divided([home.size for home in those], ring.slot_bytes, cuts):
        pieces.append(Part(ring.next_slot()))
        for at, elements in held:
            if elements is None:
                pieces[-1].add(ring, those[at], bucket, at, block_size)
            else:
                pieces[-1].add_cut(ring, those[at], bucket, at, block_size, elements)
    for piece in pieces:
        piece.close(ring)
    return pieces


def _cuts(home: Home, param: Tensor, slot_bytes: int, block_size: int) -> list[slice]:
    """Returns the elements of the parts that a parameter is cut into."""
    most = slot_bytes // smallest_cut(home.fields, block_size) * cutting.CUT
    return cutting.equal_cuts(param.numel(), most)


def copied_bytes(home: Home, param: Tensor, slot_bytes: int, block_size: int) -> tuple[int, int]:
    """Returns the bytes that a step copies up and down for a parameter."""
    if home.size <= slot_bytes:
        return home.size, home.size
    size = sum(one.size for one in home.fields)
    counts = sum(one.size for one in home.fields if one.name == STEP.name)
    parts = len(_cuts(home, param, slot_bytes, block_size))
    return size + (parts - 1) * counts, size


def smallest_cut(fields: Iterable[Field], block_size: int) -> int:
    """Returns the bytes of state of the smallest part that a parameter is cut into."""
    size = 0
    for one in fields:
        begin, end = one.elements(0, cutting.CUT, block_size)
        size += aligned((end - begin) * one.dtype.itemsize)
    return size


class Staging(Run):
    """The steps of parts, each between the copies of its states."""

    def calls(self, steps: Sequence[tuple[Bucket, Call]]) -> Calls:
        """Returns the calls that step the parts, in their order."""
        return [(bucket, partial(self.step, i, step)) for i, (bucket, step) in enumerate(steps)]
