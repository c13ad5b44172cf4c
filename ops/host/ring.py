"""A ring of slots on the device, which bytes of slabs pass through: each piece is copied up, used,
and copied down."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .engine import Engine, Ticket

ALIGNMENT = 64  # of tensors in a run of bytes; kernels want 16


def aligned(size: int, to: int = ALIGNMENT) -> int:
    """Returns a size rounded up to a multiple."""
    return -(-size // to) * to


class Copy(NamedTuple):
    """Bytes that lie in a slot and in a slab."""

    here: int  # the first, in the slot
    slab: Tensor
    there: int  # the first, in the slab
    size: int


Runs = tuple[Tensor, Tensor]  # the bytes of a copy: in the slot, and in the slab


class Typed(dict[torch.dtype, Tensor]):
    """Bytes as tensors of each dtype that is asked for."""

    def __init__(self, run: Tensor) -> None:
        self._run = run

    def __missing__(self, dtype: torch.dtype) -> Tensor:
        view = self[dtype] = self._run.view(dtype)
        return view


def slots_with(engine: Engine) -> int:
    """Returns how many slots a ring has: one is filled and one is emptied while a step runs on the
    third. Where nothing runs beside a copy, one serves all."""
    return 3 if engine.is_asynchronous else 1


class Ring:
    """Slots of memory on a device, which pieces pass through in turn."""

    def __init__(self, device: torch.device, slot_bytes: int, engine: Engine) -> None:
        self.engine, self.slot_bytes = engine, slot_bytes
        size = slots_with(engine) * slot_bytes
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.slots = self.memory.split(slot_bytes)
        self.typed = [Typed(slot) for slot in self.slots]
        # What was computed before may still use the memory, which the allocator has lent again.
        # Of each slot, the ticket after which it is free.
        self.busy: list[Any] = [engine.mark()] * len(self.slots)
        self._turn = 0

    def next_slot(self) -> int:
        """Returns the slot for the next piece: all take turns, also from one bucket to the next,
        so that a bucket does not wait for the last copy of the one before."""
        slot, self._turn = self._turn, (self._turn + 1) % len(self.slots)
        return slot


class Place:
    """A run of bytes in a slab.

    Attributes:
        engine: what copies to it.
        written: the ticket of the last copy to it.
    """

    def __init__(self, slab: Tensor, first: int, size: int, engine: Engine) -> None:
        self.slab, self.first, self.size, self.engine = slab, first, size, engine
        self.written: Ticket = None

    def wait(self) -> None:
        """Waits until the copies to it have ended: what is there may be read then, or freed."""
        if self.written is not None:
            self.engine.sync(self.written)
            self.written = None


@dataclass
class Piece:
    """Fills a slot: the copies that bring bytes there, and take them back.

    Attributes:
        places: what its copies come from, and go to.
        filled: bytes of the slot.
    """

    slot: int
    places: list[Place] = field(default_factory=list)
    up: list[Copy] = field(default_factory=list)
    down: list[Copy] = field(default_factory=list)
    filled: int = 0
    _runs_up: list[Runs] = field(default_factory=list)
    _runs_down: list[Runs] = field(default_factory=list)

    def close(self, ring: Ring) -> None:
        """Joins copies that follow each other; no more are added."""
        self.up, self.down = merged(self.up), merged(self.down)
        slot = ring.slots[self.slot]
        self._runs_up, self._runs_down = (
            [(slot.narrow(0, c.here, c.size), c.slab.narrow(0, c.there, c.size)) for c in copies]
            for copies in (self.up, self.down)
        )

    def fetch(self, engine: Engine, after: Collection[Ticket]) -> Collection[Ticket]:
        """Copies to the slot, after these tickets, and returns those after which it may be used:
        that of the last copy, or the same ones where nothing is copied."""
        for i, (here, there) in enumerate(self._runs_up):
            ticket = engine.up(here, there, () if i else after)
        return [ticket] if self._runs_up else after

    def store(self, engine: Engine) -> Ticket:
        """Copies from the slot what was computed until now; returns the ticket of the last copy."""
        ticket = computed = engine.mark()
        for i, (here, there) in enumerate(self._runs_down):
            ticket = engine.down(there, here, () if i else (computed,))
        for place in self.places:
            place.written = ticket
        return ticket


def merged(copies: Sequence[Copy]) -> list[Copy]:
    """Joins copies whose bytes follow each other in both places."""
    found: list[Copy] = []
    for copy in copies:
        if not copy.size:
            continue
        last = found[-1] if found else copy
        ends = last.slab, last.here + last.size, last.there + last.size
        if ends[0] is copy.slab and ends[1:] == (copy.here, copy.there):
            found[-1] = last._replace(size=last.size + copy.size)
        else:
            found.append(copy)
    return found


class Run:
    """The steps of pieces, each between its copies: up before, and down after."""

    def __init__(self, ring: Ring, pieces: Sequence[Piece]) -> None:
        self._ring, self._engine, self._pieces = ring, ring.engine, pieces
        # Of the pieces until now, the tickets after which the device may step them.
        self._arrived: list[Collection[Ticket]] = []

    def step(self, index: int, step: Callable[[], None]) -> None:
        """Runs the step of a piece: they are run in their order."""
        has_stepped = False
        try:
            # A slot that is free is filled at once: those of the next pieces, while this one runs.
            last = min(index + len(self._ring.slots), len(self._pieces))
            for ahead in range(len(self._arrived), last):
                self._arrived.append(self._fetch(self._pieces[ahead]))
            for ticket in self._arrived[index]:
                self._engine.wait(ticket)
            step()
            has_stepped = True
            self._store(self._pieces[index])
        except BaseException:
            self._abandon(index, has_stepped)
            raise

    def _fetch(self, piece: Piece) -> Collection[Ticket]:
        after = [self._ring.busy[piece.slot], *(place.written for place in piece.places)]
        tickets = {id(ticket): ticket for ticket in after if ticket is not None}
        return piece.fetch(self._engine, [*tickets.values()])

    def _store(self, piece: Piece) -> None:
        self._ring.busy[piece.slot] = piece.store(self._engine)

    def _abandon(self, index: int, has_stepped: bool) -> None:
        """Stores what was stepped, and waits for the copies that nobody will."""
        try:
            if has_stepped:
                self._store(self._pieces[index])
        finally:
            for tickets in self._arrived:
                for ticket in tickets:
                    self._engine.sync(ticket)
