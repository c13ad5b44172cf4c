"""Reads snapshots: those of :mod:`headroom.memory.snapshots`, with kinds, and those of torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ..._core.sizes import parse_bytes
from ..collecting import no_collections
from ..cuda_trace import lines_of
from ..events import PHASES, Allocation, Span, Timeline
from .tags import Tag, tag_of
from .unpickle import read_pickle

__all__ = ["Block", "OutOfMemory", "Segment", "Snapshot", "load_snapshot"]

_LIVE = ("active_allocated", "active_pending_free", "active_awaiting_free")
_GROWS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_MOST = 2**63  # numbers are below
_PATH = 4096  # characters of a path, at most
_WORDS = {dict: "a dict", list: "a list", str: "text"}


class Block(NamedTuple):
    """A part of a segment. ``allocation`` is None where it is free."""

    address: int
    size: int
    requested: int
    state: str
    allocation: Allocation | None = None


class Segment(NamedTuple):
    """A range of memory that the allocator took from the device at once."""

    address: int
    size: int
    stream: int
    is_expandable: bool
    blocks: list[Block]

    @property
    def free_bytes(self) -> int:
        """Returns the bytes of its free blocks."""
        return sum(block.size for block in self.blocks if block.allocation is None)


class OutOfMemory(NamedTuple):
    """A request that failed: after how many events, when, how much was asked for, and how much the
    device had free."""

    event: int
    time_us: int
    bytes: int
    device_free: int


class Snapshot:
    """A snapshot of memory: what was allocated and freed, and what is live.

    Attributes:
        data: the snapshot as in the file, for the functions of ``torch/cuda/_memory_viz.py``.
        devices: names of the devices that have something in it.
        device: that the other attributes are about; see :meth:`of`.
        has_kinds: whether it says what memory is for. Else every kind is "temporaries".
        remarks: sentences on what it does not hold.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        device: str | None = None,
        readers: dict[int, _Reader] | None = None,
    ) -> None:
        self.data = data
        about = data.get("headroom")
        self._about = about if isinstance(about, dict) else {}
        self._names = _names(data, self._about)
        self._segments: dict[int, list[tuple[int, Any]]] = {}
        for number, segment in enumerate(data["segments"]):
            self._segments.setdefault(segment["device"], []).append((number, segment))
        rows = [row for row in range(len(self._names)) if self._size(row)] or [0]
        self.devices = [self._names[row] for row in rows]
        if device is None:
            self._row = max(rows, key=self._size)
        elif device in self.devices:
            self._row = self._names.index(device)
        else:
            raise ValueError(f"device is {device!r}, wanted one of {', '.join(self.devices)}")
        self.device = self._names[self._row]
        # Of all devices at once, so that whatever is wrong in a file is said when it is read.
        self._readers = readers or {
            row: _Reader(self._trace(row), self._segments.get(row, []), row) for row in rows
        }
        self._read = self._readers[self._row]
        self.has_kinds = self._read.has_kinds
        self.remarks = [text for text in _listed(self._about, "remarks") if isinstance(text, str)]
        settings = data.get("allocator_settings")
        if isinstance(settings, dict) and settings.get("trace_alloc_overflowed"):
            most = settings.get("trace_alloc_max_entries")
            count = f"{most:,}" if isinstance(most, int) else "some"
            self.remarks.append(f"Only the last {count} events were kept.")

    def of(self, device: str) -> Snapshot:
        """Returns the same snapshot about another of :attr:`devices`."""
        return Snapshot(self.data, device, self._readers)

    def _trace(self, row: int) -> list[Any]:
        traces = self.data["device_traces"]
        return _checked(traces[row] if row < len(traces) else [], list, f"device_traces[{row}]")

    def _size(self, row: int) -> int:
        return len(self._trace(row)) + len(self._segments.get(row, ()))

    @cached_property
    def timeline(self) -> Timeline:
        """Returns allocations over the events, with what each was for. What was live before the
        first event starts at 0."""
        spans = self._read.spans(_listed(self._about, "spans"))
        return Timeline(self._read.allocations, spans, self.device, list(self.remarks))

    @property
    def times(self) -> list[int]:
        """Returns microseconds since 1970 of each event of the timeline; the first is that of the
        state before them."""
        return self._read.times[: self.timeline.events]

    @property
    def segments(self) -> list[Segment]:
        """Returns what the allocator holds at the end."""
        return self._read.segments

    @property
    def out_of_memory(self) -> list[OutOfMemory]:
        """Returns the requests that failed."""
        return self._read.failures

    def at_peak(self) -> list[Allocation]:
        """Returns what is live when the most bytes are, the largest first."""
        return self.timeline.live()

    def at_end(self) -> list[Allocation]:
        """Returns what is live after the last event, the largest first."""
        return self.timeline.live(self.timeline.events - 1)

    def reserved_over_events(self) -> list[int]:
        """Returns the bytes of all segments at each event of the timeline."""
        now = sum(segment.size for segment in self.segments)
        changes = self._read.reserved
        found, left = [], now - sum(changes)
        for change in changes[: self.timeline.events]:
            left += change
            found.append(left)
        return found


@no_collections()
def load_snapshot(
    path: str | os.PathLike[str], *, device: str | None = None, max_bytes: int | str = "2 GiB"
) -> Snapshot:
    """Reads a snapshot that :class:`headroom.memory.snapshot` wrote, or torch's ``_dump_snapshot``,
    without running any code that may be in the file.

    Example::

        with headroom.memory.snapshot("run.pickle", device="cpu"):
            x = torch.ones(1000)
        found = headroom.memory.load_snapshot("run.pickle")
        assert found.timeline.peak_bytes == 4000 and found.at_end()[0].bytes == 4000

    Args:
        device: of :attr:`Snapshot.devices`; that with the most events by default.
        max_bytes: the largest file that is read. In memory it takes some 20 times as much.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no snapshot, damaged, larger than ``max_bytes``, or holds objects, which
            could run code; says which.
    """
    most = parse_bytes(max_bytes, "max_bytes")
    try:
        found = _checked(read_pickle(path, most), dict, "its content")
        for key in ("device_traces", "segments"):
            _checked(found.get(key), list, key)
        for number, segment in enumerate(found["segments"]):
            where = f"segments[{number}]"
            _number(_checked(segment, dict, where), "device", where)
        _check_no_list_is_shared(found)
        snapshot = Snapshot(found)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)} is no snapshot: {error}") from error
    return snapshot if device is None else snapshot.of(device)


@dataclass
class _Reader:
    """Goes through the entries and segments of one device."""

    trace: list[Any]
    given: list[tuple[int, Any]]
    row: int
    allocations: list[Allocation] = field(default_factory=list)
    times: list[int] = field(default_factory=lambda: [0])
    reserved: list[int] = field(default_factory=lambda: [0])
    failures: list[OutOfMemory] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    has_kinds: bool = False

    def __post_init__(self) -> None:
        self._live: dict[int, Allocation] = {}
        self._tags: dict[tuple[str | None, ...], Tag | None] = {}
        self._stacks: dict[int, tuple[tuple[str, ...], str | None]] = {}
        self._before: list[Allocation] = []
        index = 0
        for place, entry in enumerate(self.trace):
            where = f"device_traces[{self.row}][{place}]"
            action = _checked(_checked(entry, dict, where).get("action"), str, f"{where}['action']")
            time = _number(entry, "time_us", where, 0)
            if action == "alloc":
                index += 1
                self._step(time)
                address, size = _number(entry, "addr", where), _number(entry, "size", where)
                if (lost := self._live.pop(address, None)) is not None:
                    lost.end = index
                allocation = self._live[address] = self._made(entry, size, index, where)
                self.allocations.append(allocation)
            elif action == "free_completed":
                index += 1
                self._step(time)
                address, size = _number(entry, "addr", where), _number(entry, "size", where)
                gone = self._live.pop(address, None)
                if gone is None:
                    gone = self._made(entry, size, 0, where)
                    self._before.append(gone)
                gone.end = index
            elif action in _GROWS:
                self.reserved[-1] += _GROWS[action] * _number(entry, "size", where)
            elif action == "oom":
                size, free = (_number(entry, key, where, 0) for key in ("size", "device_free"))
                self.failures.append(OutOfMemory(index, time, size, free))
        if len(self.times) > 1:
            self.times[0] = self.times[1]
        for number, segment in self.given:
            self.segments.append(self._segment(segment, f"segments[{number}]"))
        self.allocations = [*self._before, *self.allocations]
        for number, a in enumerate(self.allocations):
            a.id = number

    def _step(self, time: int) -> None:
        self.times.append(time)
        self.reserved.append(0)

    def _made(self, entry: Mapping[str, Any], size: int, start: int, where: str) -> Allocation:
        stack, phase = self._lines(entry.get("frames", ()), where)
        found = Allocation(0, size, start, stack=stack)  # it is numbered when all are known
        tag = self._tag(entry)
        if tag is not None:
            found.kind, found.module, found.op, found.phase, found.step = tag
        elif phase is not None:
            found.phase = phase
        return found

    def _tag(self, entry: Mapping[str, Any]) -> Tag | None:
        text, category = entry.get("user_metadata"), entry.get("category")
        if not text and category is None:
            return None
        # As they are: a copy of a long text per entry would cost more than the file's size.
        key = tuple(each if isinstance(each, str) else None for each in (text, category))
        if key not in self._tags:
            self._tags[key] = tag_of(entry)
        tag = self._tags[key]
        self.has_kinds |= tag is not None
        return tag

    def _lines(self, frames: Any, where: str) -> tuple[tuple[str, ...], str | None]:
        found = self._stacks.get(id(frames))  # the file keeps them, so numbers are not used again
        if found is None:
            _checked(frames, (list, tuple), f"{where}['frames']")
            for place, frame in enumerate(frames):
                inner = f"{where}['frames'][{place}]"
                for key in ("name", "filename"):
                    _checked(_checked(frame, dict, inner).get(key), str, f"{inner}[{key!r}]")
                if len(frame["filename"]) > _PATH:
                    raise _wrong(f"{inner}['filename']", frame["filename"], "a path")
                _number(frame, "line", inner)
            found = self._stacks[id(frames)] = lines_of(frames)
        return found

    def _segment(self, segment: Mapping[str, Any], where: str) -> Segment:
        address, size = _number(segment, "address", where), _number(segment, "total_size", where)
        blocks, place = [], address
        given = _checked(segment.get("blocks"), list, f"{where}['blocks']")
        for number, block in enumerate(given):
            inner = f"{where}['blocks'][{number}]"
            # Older files have no addresses.
            at = _number(_checked(block, dict, inner), "address", inner, place)
            taken = _number(block, "size", inner)
            asked = _number(block, "requested_size", inner, taken)
            place = at + taken
            found, state = None, _checked(block.get("state"), str, f"{inner}['state']")
            if state in _LIVE:
                found = self._live.get(at)
                if found is None:
                    found = self._live[at] = self._made(block, asked, 0, inner)
                    self._before.append(found)
            blocks.append(Block(at, taken, asked, state, found))
        stream = _number(segment, "stream", where, 0)
        return Segment(address, size, stream, bool(segment.get("is_expandable")), blocks)

    def spans(self, rows: list[Any]) -> list[Span]:
        """Returns the phases that the file names, if they make sense."""
        given = rows[self.row] if self.row < len(rows) else None
        spans: list[Span] = []
        for span in given if isinstance(given, list) else ():
            if not isinstance(span, (list, tuple)) or len(span) != 3:
                return []
            start, step, phase = span
            if not isinstance(start, int) or not isinstance(step, int) or phase not in PHASES:
                return []
            if not (spans[-1].start if spans else 0) <= start < len(self.times):
                return []
            spans.append(Span(start, step, phase))
        return spans


def _check_no_list_is_shared(data: Mapping[str, Any]) -> None:
    """Raises ValueError if entries or blocks would be read again and again: the cost of a file
    would not be bounded by its size."""
    lists = [*data["device_traces"], *(segment.get("blocks") for segment in data["segments"])]
    filled = [id(each) for each in lists if each]
    if len(set(filled)) < len(filled):
        raise ValueError("devices or segments share a list, which no recorder writes")


def _names(data: Mapping[str, Any], about: Mapping[str, Any]) -> list[str]:
    segments = data["segments"]
    rows = max([len(data["device_traces"]), *(s["device"] + 1 for s in segments)])
    if not rows:
        raise ValueError("it has no devices: nothing was recorded")
    if rows > 4096:
        raise ValueError(f"it has {rows:,} devices")
    given = _listed(about, "devices")
    known = [name if isinstance(name, str) else None for name in given][:rows]
    known += [None] * (rows - len(known))
    names = [name or f"cuda:{row}" for row, name in enumerate(known)]
    return names if len(set(names)) == rows else [f"cuda:{row}" for row in range(rows)]


def _listed(about: Mapping[str, Any], key: str) -> list[Any]:
    found = about.get(key)
    return found if isinstance(found, list) else []


def _checked(value: Any, kind: type | tuple[type, ...], what: str) -> Any:
    """Returns a value, which must be of a kind, or of one of several that are called alike."""
    if not isinstance(value, kind):
        raise _wrong(what, value, _WORDS[kind if isinstance(kind, type) else kind[0]])
    return value


def _number(entry: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    found = entry.get(key, default)
    if type(found) is not int or not 0 <= found < _MOST:
        raise _wrong(f"{where}[{key!r}]", found, "a number from 0 to 2**63")
    return found


def _wrong(what: str, got: Any, wanted: str) -> ValueError:
    shown = repr(got)[:60] if isinstance(got, (int, float, str)) else type(got).__name__
    return ValueError(f"{what} is {shown}, wanted {wanted}")
