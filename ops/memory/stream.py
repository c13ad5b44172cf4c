"""Joins what an allocator did with what the tensors were, into a timeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..host.arena import Slab
from .events import KINDS, Allocation, Span, Timeline

__all__ = ["Event", "Label", "Note", "Resolver", "resolve"]

_RANKS = (  # what talks to other ranks, by the names of their ranges in torch
    "DistributedDataParallel.",
    "FSDP::",
    "RegisterPostBackwardFunctionBackward",  # of FSDP2: reduces gradients
    "c10d::",
    "gloo:",
    "nccl:",
)
_PRIORITY = {kind: place for place, kind in enumerate(KINDS)}


@dataclass(slots=True)
class Event:
    """One thing that a recorder saw, in the order in which they happened."""

    action: str
    """"alloc", "free", or "mark" for a note, whose number is then the address."""
    address: int
    bytes: int = 0
    op: str | None = None
    module: str | None = None
    phase: str | None = None
    """The phase, where the recorder knows it by itself."""
    stack: tuple[str, ...] = ()
    time_us: int = 0
    """Microseconds since 1970, where the recorder knows them."""


class Label(NamedTuple):
    """The purpose of the memory at an address, at the moment of a note."""

    address: int
    bytes: int
    kind: str
    module: str | None = None
    name: str | None = None
    stack: tuple[str, ...] = ()


@dataclass(slots=True)
class Note:
    """The facts known at a moment, which a mark with its number holds a place for."""

    labels: list[Label] = field(default_factory=list)
    freed: list[tuple[int, bool]] = field(default_factory=list)
    """Addresses of memory that has been freed, with True where no event of it can say so. Without,
    it counts for memory alone that no event allocated."""
    phase: str | None = None
    """The phase that begins here."""
    module: str | None = None
    """The module that runs from here, where the recorder does not know it by itself."""
    ends_step: bool = False
    """The step ends with the next phase."""
    slabs: Sequence[tuple[int, Slab | None]] = ()
    """What arenas of the host have taken, with its address, or given back, with None."""


class Resolver:
    """Follows events and notes, and says of every allocation what it was."""

    def __init__(self, notes: Sequence[Note] | Mapping[int, Note]) -> None:
        self._notes = notes
        self._live: dict[int, Allocation] = {}
        self._index = 0  # of the last event
        self._count = 0  # of allocations
        self._step, self._has_stepped = 0, False
        self._phase = "other"
        self._module: str | None = None
        self._unseen: dict[int, Allocation] = {}  # what labels alone have told of, by address
        self.allocations: list[Allocation] = []
        self.on_host: list[Allocation] = []
        self._slabs: dict[int, Allocation] = {}
        self.spans: list[Span] = [Span(0, 0, "other")]

    def see(self, event: Event) -> None:
        if event.action == "mark":
            self.note(self._notes[event.address])
            return
        phase = event.phase or self._phase
        if event.phase in ("backward", "optimizer"):
            self._phase = event.phase  # until a note says otherwise
        self._index += 1
        last = self.spans[-1]
        if phase != last.phase or self._step != last.step:
            self.spans.append(Span(self._index, self._step, phase))
        # What was there before the recorder is freed without an event: its place is taken then.
        before = self._live.pop(event.address, None)
        if before is not None:
            before.end = self._index
        if event.action == "alloc":
            self._add(event.address, event.bytes, event, phase)

    def _add(self, address: int, size: int, event: Event | None, phase: str) -> Allocation:
        found = Allocation(self._count, size, self._index, phase=phase, step=self._step)
        self._count += 1
        if event is not None:
            found.op, found.stack = event.op, event.stack
            found.module = self._module if event.module is None else event.module
            if event.op is not None and event.op.startswith(_RANKS):
                found.kind = "communication"
        self.allocations.append(found)
        self._live[address] = found
        return found

    def note(self, note: Note) -> None:
        for label in note.labels:
            found = self._live.get(label.address)
            if found is None:
                found = self._add(label.address, label.bytes, None, self._phase)
                self._unseen[label.address] = found
            if _PRIORITY[label.kind] < _PRIORITY[found.kind]:
                found.kind = label.kind
                found.stack = found.stack or label.stack
                if label.name is not None:
                    found.module, found.op = label.module, label.name
        for address, is_elsewhere in note.freed:
            unseen, before = self._unseen.pop(address, None), self._live.get(address)
            if before is not None and (is_elsewhere or before is unseen):
                del self._live[address]
                self._index += 1
                before.end = self._index
        for address, slab in note.slabs:
            if slab is None:
                if (given := self._slabs.pop(address, None)) is not None:
                    given.end = self._index
                continue
            kind = slab.kind.replace(" ", "_")
            self._slabs[address] = taken = Allocation(
                len(self.on_host),
                slab.size,
                self._index,
                kind=kind if kind in KINDS else "temporaries",
                op=slab.owner,
                phase=self._phase,
                step=self._step,
            )
            self.on_host.append(taken)
        if note.module is not None:
            self._module = note.module
        if note.phase is not None:
            if note.phase not in ("forward", "backward"):
                self._module = None
            self._phase = note.phase
            if self._has_stepped:
                self._step, self._has_stepped = self._step + 1, False
        if note.ends_step:
            self._phase, self._has_stepped = "other", True


def resolve(
    before: Iterable[Label],
    events: Iterable[Event],
    notes: Sequence[Note],
    device: str = "cpu",
    remarks: Sequence[str] = (),
    on_host: Mapping[int, Slab] | None = None,
) -> Timeline:
    """Returns the timeline of what was there before, and of what the events did to it.

    A label holds for the whole life of the memory that is at its address at the moment of its note.
    If several do, the first of their kinds in :data:`KINDS` counts.
    """
    resolver = Resolver(notes)
    resolver.note(Note(list(before), slabs=[*(on_host or {}).items()]))
    for event in events:
        resolver.see(event)
    host = Timeline(resolver.on_host, resolver.spans, "host") if resolver.on_host else None
    return Timeline(resolver.allocations, resolver.spans, device, list(remarks), host)
