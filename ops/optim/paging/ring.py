"""Stages states on the device: a ring of slots, what fills a slot, and the copies around a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...host.engine import Engine
from ..plan import Bucket, Call
from ..states import STEP
from .homes import Field, Home, aligned, flat

SLOTS = 3  # one is filled and one is emptied while a step runs on the third
CUT = (
    4096  # elements, at multiples of which parameters are cut: whole blocks, and whole cache lines
)


class Copy(NamedTuple):
    """Bytes that lie in a slot and in a slab."""

    here: int  # the first, in the slot
    slab: Tensor
    there: int  # the first, in the slab
    size: int


class Typed(dict[torch.dtype, Tensor]):
    """Bytes as tensors of each dtype that is asked for."""

    def __init__(self, run: Tensor) -> None:
        self._run = run

    def __missing__(self, dtype: torch.dtype) -> Tensor:
        view = self[dtype] = self._run.view(dtype)
        return view


class Ring:
    """Slots of memory on a device, which pieces of the state pass through in turn."""

    def __init__(self, device: torch.device, slot_bytes: int, engine: Engine) -> None:
        self.engine, self.slot_bytes = engine, slot_bytes
        self.memory = torch.empty(SLOTS * slot_bytes, dtype=torch.uint8, device=device)
        self.slots = self.memory.split(slot_bytes)
        self.typed = [Typed(slot) for slot in self.slots]
        # What was computed before may still use the memory, which the allocator has lent again.
        self.busy: list[Any] = [engine.mark()] * SLOTS  # the ticket after which a slot is free
        self._turn = 0

    def next_slot(self) -> int:
        """Returns the slot for the next piece: all take turns, also from one bucket to the next,
        so that a bucket does not wait for the last copy of the one before."""
        slot, self._turn = self._turn, (self._turn + 1) % SLOTS
        return slot


@dataclass
class Piece:
    """Parameters, or a part of one, whose states fill a slot."""

    slot: int
    bucket: Bucket
    states: dict[Tensor, dict[str, Tensor]] = field(default_factory=dict)  # in the slot
    homes: list[Home] = field(default_factory=list)
    up: list[Copy] = field(default_factory=list)
    down: list[Copy] = field(default_factory=list)
    filled: int = 0  # bytes

    def add(self, owner: Tensor, param: Tensor, grad: Tensor) -> None:
        self.bucket.owners.append(owner)
        self.bucket.params.append(param)
        self.bucket.grads.append(grad)


def pieces_of(
    bucket: Bucket, homes: dict[Tensor, Home], ring: Ring, block_size: int
) -> list[Piece]:
    """Returns the parameters of a bucket in pieces that fit in a slot, with the states and copies
    of each. Parameters that are larger are cut."""
    pieces: list[Piece] = []

    def begin() -> Piece:
        pieces.append(Piece(ring.next_slot(), Bucket(bucket.layout, [], [], [])))
        return pieces[-1]

    piece: Piece | None = None
    for owner, param, grad in zip(bucket.owners, bucket.params, bucket.grads):
        home = homes[owner]
        if home.size > ring.slot_bytes:
            for first, last in _cuts(home, param, ring.slot_bytes, block_size):
                _add_part(begin(), ring, home, owner, param, grad, first, last, block_size)
            piece = None
            continue
        if piece is None or piece.filled + home.size > ring.slot_bytes:
            piece = begin()
        _add_whole(piece, ring, home, owner, param, grad)
    for piece in pieces:
        piece.up = _merged(piece.up)
        piece.down = _merged(piece.down)
    return pieces


def _add_whole(
    piece: Piece, ring: Ring, home: Home, owner: Tensor, param: Tensor, grad: Tensor
) -> None:
    views, first = ring.typed[piece.slot], piece.filled
    piece.add(owner, param, grad)
    piece.states[param] = {one.name: one.of(views[one.dtype], first) for one in home.fields}
    piece.homes.append(home)
    copy = Copy(first, home.slab, home.first, home.size)
    piece.up.append(copy)
    piece.down.append(copy)
    piece.filled += home.size


def _add_part(
    piece: Piece,
    ring: Ring,
    home: Home,
    owner: Tensor,
    param: Tensor,
    grad: Tensor,
    first: int,
    last: int,
    block_size: int,
) -> None:
    if grad.stride() != param.stride():
        grad = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
    part = flat(param)[first:last]
    piece.add(owner, part, flat(grad)[first:last])
    piece.homes.append(home)
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


def _part_bytes(fields: Iterable[Field], length: int, block_size: int) -> int:
    size = 0
    for one in fields:
        begin, end = one.elements(0, length, block_size)
        size += aligned((end - begin) * one.dtype.itemsize)
    return size


def smallest_cut(fields: Iterable[Field], block_size: int) -> int:
    """Returns the bytes of state of the smallest part that a parameter is cut into."""
    return _part_bytes(fields, CUT, block_size)


def _merged(copies: Sequence[Copy]) -> list[Copy]:
    """Joins copies whose bytes follow each other in both places."""
    merged: list[Copy] = []
    for copy in copies:
        if not copy.size:
            continue
        last = merged[-1] if merged else copy
        ends = last.slab, last.here + last.size, last.there + last.size
        if ends[0] is copy.slab and ends[1:] == (copy.here, copy.there):
            merged[-1] = last._replace(size=last.size + copy.size)
        else:
            merged.append(copy)
    return merged


class Run:
    """The steps of pieces, each between the copies of its states: up before, and down after."""

    def __init__(self, ring: Ring, pieces: Sequence[Piece]) -> None:
        self._ring, self._engine, self._pieces = ring, ring.engine, pieces
        self._arrived: list[Any] = []  # tickets of the copies up, of the pieces until now

    def calls(self, steps: Sequence[tuple[Bucket, Call]]) -> list[tuple[Bucket, Call]]:
        """Returns the calls that step the pieces, in their order."""

        def call_of(index: int, step: Call) -> Callable[[], None]:
            return lambda: self._step(index, step)

        return [(bucket, call_of(i, step)) for i, (bucket, step) in enumerate(steps)]

    def _step(self, index: int, step: Call) -> None:
        has_stepped = False
        try:
            # A slot that is free is filled at once: those of the next pieces, while this one runs.
            for ahead in range(len(self._arrived), min(index + SLOTS, len(self._pieces))):
                self._arrived.append(self._fetch(self._pieces[ahead]))
            self._engine.wait(self._arrived[index])
            step()
            has_stepped = True
            self._store(self._pieces[index])
        except BaseException:
            self._abandon(index, has_stepped)
            raise

    def _fetch(self, piece: Piece) -> Any:
        after = [self._ring.busy[piece.slot], *(home.written for home in piece.homes)]
        tickets = {id(ticket): ticket for ticket in after if ticket is not None}
        ticket = None
        for i, copy in enumerate(piece.up):
            here, there = self._sides(piece, copy)
            ticket = self._engine.up(here, there, () if i else tickets.values())
        return ticket

    def _sides(self, piece: Piece, copy: Copy) -> tuple[Tensor, Tensor]:
        slot = self._ring.slots[piece.slot]
        return slot[copy.here :][: copy.size], copy.slab[copy.there :][: copy.size]

    def _store(self, piece: Piece) -> None:
        after = [self._engine.mark()]
        ticket = None
        for i, copy in enumerate(piece.down):
            here, there = self._sides(piece, copy)
            ticket = self._engine.down(there, here, () if i else after)
        self._ring.busy[piece.slot] = ticket
        for home in piece.homes:
            home.written = ticket

    def _abandon(self, index: int, has_stepped: bool) -> None:
        """Stores what was stepped, and waits for the copies that nobody will."""
        try:
            if has_stepped:
                self._store(self._pieces[index])
        finally:
            for ticket in self._arrived:
                if ticket is not None:
                    self._engine.sync(ticket)
