"""Stages states on the device: what fills a slot of the ring, and the calls that step it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from torch import Tensor

from ..._core.overlap import flat, laid_out
from ...host.ring import Copy, Piece, Ring, Run, aligned, merged
from ..plan import Bucket, Call, Calls
from ..states import STEP, Layout
from .homes import Field, Home, taken_by_ops

# Elements, at multiples of which parameters are cut: whole blocks, and whole cache lines.
CUT = 4096


class Part(Piece):
    """Parameters, or a part of one, whose states fill a slot."""

    def __init__(self, slot: int, layout: Layout) -> None:
        super().__init__(slot)
        self.bucket = Bucket(layout, [], [], [])
        self.states: dict[Tensor, dict[str, Tensor]] = {}  # in the slot

    def add(self, owner: Tensor, param: Tensor, grad: Tensor) -> None:
        self.bucket.owners.append(owner)
        self.bucket.params.append(param)
        self.bucket.grads.append(grad)


def pieces_of(bucket: Bucket, homes: dict[Tensor, Home], ring: Ring, block_size: int) -> list[Part]:
    """Returns the parameters of a bucket in pieces that fit in a slot, with the states and copies
    of each. Parameters that are larger are cut."""
    pieces: list[Part] = []

    def begin() -> Part:
        pieces.append(Part(ring.next_slot(), bucket.layout))
        return pieces[-1]

    piece: Part | None = None
    for owner, param, grad in zip(bucket.owners, bucket.params, bucket.grads):
        home = homes[owner]
        if home.size > ring.slot_bytes:
            grad = laid_out(grad, param.stride())
            for first, last in _cuts(home, param, ring.slot_bytes, block_size):
                _add_part(begin(), ring, home, owner, param, grad, first, last, block_size)
            piece = None
            continue
        if piece is None or piece.filled + home.size > ring.slot_bytes:
            piece = begin()
        _add_whole(piece, ring, home, owner, param, grad, block_size)
    for piece in pieces:
        piece.up = merged(piece.up)
        piece.down = merged(piece.down)
    return pieces


def _add_whole(
    piece: Part,
    ring: Ring,
    home: Home,
    owner: Tensor,
    param: Tensor,
    grad: Tensor,
    block_size: int,
) -> None:
    views, first = ring.typed[piece.slot], piece.filled
    piece.add(owner, param, grad)
    states = {one.name: one.of(views[one.dtype], first) for one in home.fields}
    piece.states[param] = taken_by_ops(states, param, block_size)
    piece.places.append(home)
    copy = Copy(first, home.slab, home.first, home.size)
    piece.up.append(copy)
    piece.down.append(copy)
    piece.filled += home.size


def _add_part(
    piece: Part,
    ring: Ring,
    home: Home,
    owner: Tensor,
    param: Tensor,
    grad: Tensor,
    first: int,
    last: int,
    block_size: int,
) -> None:
    part = flat(param)[first:last]
    piece.add(owner, part, flat(grad)[first:last])
    piece.places.append(home)
    states = piece.states[part] = {}
    for one in home.fields:
        begin, end = one.elements(first, last, block_size)
        size = one.dtype.itemsize
        run = ring.slots[piece.slot][piece.filled : piece.filled + (end - begin) * size]
        states[one.name] = run.view(one.dtype) if one.shape else run.view(one.dtype)[0]
        there = home.first + one.first
        copy = Copy(piece.filled, home.slab, there + begin * size, run.numel())
        piece.up.append(copy)
        # All parts read the same count of steps, and each adds one to a copy of it.
        if one.name != STEP.name or last == param.numel():
            piece.down.append(copy)
        piece.filled = aligned(piece.filled + run.numel())


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
