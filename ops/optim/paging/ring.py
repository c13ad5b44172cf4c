"""Stages states on the device: a ring of slots, what fills a slot, and the copies around a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

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

Copy = tuple[Tensor, Tensor]  # bytes of a slot and of the arena


class Ring:
    """Slots of memory on a device, which pieces of the state pass through in turn."""

    def __init__(self, device: torch.device, slot_bytes: int, engine: Engine) -> None:
        self.engine, self.slot_bytes = engine, slot_bytes
        self.memory = torch.empty(SLOTS * slot_bytes, dtype=torch.uint8, device=device)
        self.slots = self.memory.split(slot_bytes)
        # What was computed before may still use the memory, which the allocator has lent again.
        self.busy: list[Any] = [engine.mark()] * SLOTS  # the ticket after which a slot is free


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
        pieces.append(Piece(len(pieces) % SLOTS, Bucket(bucket.layout, [], [], [])))
        return pieces[-1]

    piece: Piece | None = None
    for owner, param, grad in zip(bucket.owners, bucket.params, bucket.grads):
        home = homes[owner]
        if home.size > ring.slot_bytes:
            grad = laid_out(grad, param)
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
    run = ring.slots[piece.slot][piece.filled : piece.filled + home.size]
    piece.add(owner, param, grad)
    piece.states[param] = {field.name: field.of(run) for field in home.fields}
    piece.homes.append(home)
    copy = run, home.slab[home.first : home.first + home.size]
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
        copy = run, home.slab[there + begin * size : there + end * size]
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
    return ((i, min(i + length, param.numel())) for i in range(0, param.numel(), length))


def laid_out(grad: Tensor, param: Tensor) -> Tensor:
    """Returns a gradient whose elements are in the order of those of its parameter, which parts of
    both are cut from."""
    if grad.stride() == param.stride():
        return grad
    return torch.empty_like(param, dtype=grad.dtype).copy_(grad)


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


def _merged(copies: Sequence[Copy]) -> list[Copy]:
    """Joins copies whose bytes follow each other in both places."""
    merged: list[Copy] = []
    for here, there in copies:
        if not here.numel():
            continue
        if merged and _follows(merged[-1][0], here) and _follows(merged[-1][1], there):
            merged[-1] = _joined(merged[-1][0], here), _joined(merged[-1][1], there)
        else:
            merged.append((here, there))
    return merged


def _follows(a: Tensor, b: Tensor) -> bool:
    same = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return same and a.storage_offset() + a.numel() == b.storage_offset()


def _joined(a: Tensor, b: Tensor) -> Tensor:
    return a.as_strided((a.numel() + b.numel(),), (1,), a.storage_offset())


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
        for i, (here, there) in enumerate(piece.up):
            ticket = self._engine.up(here, there, () if i else tickets.values())
        return ticket

    def _store(self, piece: Piece) -> None:
        after = [self._engine.mark()]
        ticket = None
        for i, (here, there) in enumerate(piece.down):
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
