"""Makes snapshots in torch's format, of a history or of what torch recorded, and writes them."""

from __future__ import annotations

import json
import os
import pickle
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..._core.atomic import replacing
from ..collecting import no_collections
from ..cuda_trace import MARK, events_of
from ..events import Allocation, Span
from ..stream import Label, Note, Resolver
from .history import History
from .tags import Tag

__all__ = ["FORMAT", "save", "snapshot_of_history", "tagged"]

FORMAT = "headroom.memory.snapshot/1"
_PAGE = 4096
_LIVE = ("active_allocated", "active_pending_free", "active_awaiting_free")


def save(snapshot: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes a snapshot, whole or not at all.

    Raises:
        OSError: the system refuses, as on a full disk; what was at ``path`` is as it was.
    """
    data = pickle.dumps(snapshot, protocol=4)  # the viewer of older releases reads no later one
    with replacing(path, len(data)) as file:
        view, done = memoryview(data), 0
        while done < len(data):
            done += os.pwrite(file, view[done : done + (1 << 26)], done)


# ---- of a history -------------------------------------------------------------------------------


@no_collections()
def snapshot_of_history(
    history: History, device: str, failed: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Returns the snapshot of what a recorder without segments saw. ``failed`` has ``size`` and
    ``device_free`` of a request that was refused after all events."""
    history.end_what_was_overwritten()
    words, times = _Words(), history.times
    moments = []  # (event, whether it begins, allocation); an end comes before a beginning
    for a in history.allocations:
        if a.start > 0:
            moments.append((a.start, True, a))
        if a.end is not None:
            moments.append((a.end, False, a))
    moments.sort(key=lambda moment: moment[:2])
    trace: list[dict[str, Any]] = []
    for index, begins, a in moments:
        frames, text = words.of(a)
        entry = {
            "action": "alloc" if begins else "free_requested",
            "addr": history.address(a),
            "size": a.bytes,
            "stream": 0,
            "time_us": times[index],
            "frames": frames,
            "compile_context": "N/A",
            "user_metadata": text,
            "category": a.kind,
        }
        trace.append(entry)
        if not begins:
            trace.append(entry | {"action": "free_completed"})
    if failed is not None:
        about = {"stream": 0, "time_us": times[-1], "frames": []}
        trace.append({"action": "oom", **failed, **about, "compile_context": "N/A"})
    trace.append(_of_no_kind(times[-1]))
    # Frees of what nobody knew took a number and have no entry.
    places = [index for index, _, _ in moments]
    last = places[-1] if places else 0
    spans = [
        Span(bisect_left(places, s.start) + 1 if s.start > 0 else 0, s.step, s.phase)
        for s in history.spans
        if s.start <= last
    ]
    return {
        "segments": _segments(history, words),
        "device_traces": [trace],
        "allocator_settings": {},
        "external_annotations": _annotations(0, spans, [times[index] for index in places]),
        "headroom": _about([device], {0: spans}),
    }


class _Words:
    """Frames and text of allocations. What occurs again is the same object, which a pickle stores
    once."""

    def __init__(self) -> None:
        self._frames: dict[Any, list[dict[str, Any]]] = {}
        self._lines: dict[str, dict[str, Any]] = {}
        self._texts: dict[Tag, str] = {}

    def of(self, a: Allocation) -> tuple[list[dict[str, Any]], str]:
        tag = Tag.of(a)
        text = self._texts.get(tag)
        if text is None:
            text = self._texts[tag] = tag.metadata()
        frames = self._frames.get((tag, a.stack))
        if frames is None:
            frames = [tag.frame(), *map(self._line, a.stack)]
            self._frames[tag, a.stack] = frames
        return frames, text

    def _line(self, line: str) -> dict[str, Any]:
        """Returns the frame of ``folder/file.py:12 function``."""
        frame = self._lines.get(line)
        if frame is None:
            place, _, name = line.partition(" ")
            while not place.rpartition(":")[2].isdigit() and name:  # a space in the path
                more, _, name = name.partition(" ")
                place = f"{place} {more}"
            path, _, number = place.rpartition(":")
            frame = {"name": name, "filename": path, "line": int(number or 0)}
            self._lines[line] = frame
        return frame


def _segments(history: History, words: _Words) -> list[dict[str, Any]]:
    """Returns the pages in which allocations were, as segments without gaps."""
    ranges: list[list[int]] = []
    placed = [(history.address(a), a) for a in history.allocations]
    placed.sort(key=lambda pair: pair[0])
    for address, a in placed:
        begin, end = address // _PAGE * _PAGE, -(-(address + a.bytes) // _PAGE) * _PAGE
        if ranges and begin <= ranges[-1][1]:
            ranges[-1][1] = max(ranges[-1][1], end)
        else:
            ranges.append([begin, end])
    live = [(address, a) for address, a in placed if a.end is None]
    segments, at = [], 0
    for begin, end in ranges:
        blocks: list[dict[str, Any]] = []
        place = begin
        while at < len(live) and live[at][0] < end:
            address, a = live[at]
            if address > place:
                blocks.append(_gap(place, address))
            frames, text = words.of(a)
            blocks.append(
                {
                    "address": address,
                    "size": a.bytes,
                    "requested_size": a.bytes,
                    "state": "active_allocated",
                    "frames": frames,
                    "user_metadata": text,
                    "category": a.kind,
                }
            )
            place, at = address + a.bytes, at + 1
        if place < end:
            blocks.append(_gap(place, end))
        active = sum(b["size"] for b in blocks if b["state"] != "inactive")
        segments.append(
            {
                "device": 0,
                "address": begin,
                "total_size": end - begin,
                "allocated_size": active,
                "active_size": active,
                "requested_size": active,
                "stream": 0,
                "segment_type": "large" if end - begin > 1 << 20 else "small",
                "segment_pool_id": (0, 0),
                "is_expandable": False,
                "frames": [],
                "blocks": blocks,
            }
        )
    return segments


def _gap(begin: int, end: int) -> dict[str, Any]:
    size = end - begin
    return {
        "address": begin,
        "size": size,
        "requested_size": 0,
        "state": "inactive",
        "frames": [],
    }


# ---- of what torch recorded ---------------------------------------------------------------------


class _Following(Resolver):
    """Also keeps which allocations are those of the trace, and at which entries phases begin."""

    def __init__(self, notes: Mapping[int, Note]) -> None:
        super().__init__(notes)
        self.of_trace: list[Allocation] = []
        self.seen = 0
        self.places: list[Span] = list(self.spans)

    def see(self, event: Any) -> None:
        self.seen += event.action != "mark"
        super().see(event)
        for span in self.spans[len(self.places) :]:
            self.places.append(span._replace(start=self.seen))

    def _add(self, address: int, size: int, event: Any, phase: str) -> Allocation:
        found = super()._add(address, size, event, phase)
        if event is not None:
            self.of_trace.append(found)
        return found

    def live_at(self, address: int) -> Allocation | None:
        return self._live.get(address)


@no_collections()
def tagged(
    found: dict[str, Any],
    notes: Mapping[int, Note],
    before: Iterable[Label],
    after: Iterable[Label],
    row: int,
) -> dict[str, Any]:
    """Returns what ``torch.cuda.memory._snapshot()`` returned, with kinds and owners in it.

    Args:
        found: is changed.
        notes: by the numbers of the marks in the trace; some may be missing.
        before, after: labels of what existed before the first event, and after the last one.
        row: of ``device_traces``, that the notes are about.
    """
    traces = found["device_traces"]
    trace = traces[row] if row < len(traces) else []
    following = _Following(defaultdict(Note, notes))
    following.note(Note(list(before)))
    live: dict[int, Tag] = {}
    earlier = {a.address: Tag(a.kind, a.module, a.name) for a in before}
    for event in events_of(found, row, min(notes, default=0)):
        following.see(event)
    following.note(Note(list(after)))
    allocations = iter(following.of_trace)
    words = _TorchWords()
    for entry in trace:
        action = entry["action"]
        if action == "alloc":
            live[entry["addr"]] = tag = Tag.of(next(allocations))
            words.put(entry, tag)
        elif action in ("free_requested", "free_completed"):
            tag = live.get(entry["addr"], earlier.get(entry["addr"]))
            if tag is not None:
                words.put(entry, tag)
            if action == "free_completed":
                live.pop(entry["addr"], None)
                earlier.pop(entry["addr"], None)
    for segment in found["segments"]:
        if segment["device"] != row:
            continue
        place = segment["address"]
        for block in segment["blocks"]:
            at = block.get("address", place)
            place = at + block["size"]
            allocation = following.live_at(at)
            if block["state"] in _LIVE and allocation is not None:
                words.put(block, Tag.of(allocation))
    times = [e.get("time_us", 0) for e in trace if e["action"] in ("alloc", "free_completed")]
    annotations = list(found.get("external_annotations") or [])
    found["external_annotations"] = annotations + _annotations(row, following.places, times)
    if row < len(traces):
        trace.append(_of_no_kind(times[-1] if times else 0))
    names = [f"cuda:{index}" for index in range(len(traces))]
    found["headroom"] = _about(names, {row: following.places})
    return found


class _TorchWords:
    """Writes tags into entries; lists of frames that are shared stay shared."""

    def __init__(self) -> None:
        self._frames: dict[Any, Any] = {}
        self._texts: dict[Any, str] = {}

    def put(self, entry: dict[str, Any], tag: Tag) -> None:
        user = entry.get("user_metadata")
        user = user if isinstance(user, str) or not user else json.dumps(user)
        user = "" if not user or user.startswith(MARK) else user
        text = self._texts.get((tag, user))
        if text is None:
            text = self._texts[tag, user] = tag.metadata(user)
        given = entry.get("frames") or []
        frames = self._frames.get((tag, id(given)))
        if frames is None:
            # The list that is the key is kept, so that no other one gets its number.
            frames = self._frames[tag, id(given)] = ([tag.frame(), *given], given)
        entry["frames"], entry["user_metadata"], entry["category"] = frames[0], text, tag.kind


# ---- what both have -----------------------------------------------------------------------------


def _of_no_kind(time_us: int) -> dict[str, Any]:
    """Returns the entry that torch writes where a snapshot is taken. Its category is the one that
    the memory_viz page adds to those it finds, and it stops with an error where it must add it."""
    entry = {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "time_us": time_us}
    return entry | {"frames": [], "compile_context": "N/A", "category": "unknown"}


def _about(devices: list[str], spans: Mapping[int, list[Span]]) -> dict[str, Any]:
    rows = [[list(span) for span in spans.get(row, [])] for row in range(len(devices))]
    return {"format": FORMAT, "devices": devices, "spans": rows}


def _annotations(row: int, spans: Sequence[Span], times: Sequence[int]) -> list[dict[str, Any]]:
    """Returns a range of time for every phase, as torch writes those of ``record_function``."""
    if not times:
        return []
    found = []
    starts = [times[min(max(0, span.start - 1), len(times) - 1)] for span in spans]
    for span, start, end in zip(spans, starts, [*starts[1:], times[-1]]):
        name = f"headroom::step {span.step} {span.phase}"
        for stage, time in (("START", start), ("END", end)):
            found.append({"name": name, "stage": stage, "device": row, "time_us": time})
    return found
