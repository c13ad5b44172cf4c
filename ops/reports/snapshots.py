"""Snapshots of the CUDA allocator as parts of a report: memory over time, and segments.

Entries are taken as ``torch.cuda.memory._dump_snapshot`` writes them, also those of other versions
and other programs, as far as they are well-formed. What is not is an error, and nothing is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..memory.events import KINDS, Allocation, Span, Timeline
from ..memory.snapshot import lines_of
from .text import Texts, shortened

__all__ = ["devices_of", "segments_of", "timeline_of"]

LIVE = {"active_allocated": 1, "active_pending_free": 2, "active_awaiting_free": 2}
SEGMENTS = 300  # that are drawn
BLOCKS = 20_000
LARGEST = 1 << 50  # bytes; more is no size of anything
FRAMES = 256  # of a stack, of which the user's are looked for


def devices_of(snapshot: Mapping[str, Any]) -> list[int]:
    """Returns the devices that the snapshot has events or segments of."""
    traced = {index for index, trace in enumerate(snapshot["device_traces"]) if trace}
    held = {segment["device"] for segment in snapshot.get("segments", ())}
    return sorted(traced | held)


class _Frames:
    """The user's lines of frames. Entries share frames, so that each stack is looked at once."""

    def __init__(self) -> None:
        self._of_list: dict[int, tuple] = {}
        self._of_frames: dict[tuple[int, ...], tuple] = {}

    def __call__(self, frames: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], str | None]:
        found = self._of_list.get(id(frames))
        if found is None:
            key = tuple(map(id, frames[:FRAMES]))
            found = self._of_frames.get(key)
            if found is None:
                found = self._of_frames[key] = lines_of(frames[:FRAMES])
            self._of_list[id(frames)] = found
        return found


def timeline_of(snapshot: Mapping[str, Any], device: int) -> Timeline:
    """Returns the live bytes over the events of a device. What was live before the first event is
    counted from it on; sizes are those that were asked for.

    The kind is that of the entry's ``category`` where it names one of ours.
    """
    lines = _Frames()
    traces = snapshot["device_traces"]
    trace = traces[device] if device < len(traces) else []
    allocations: list[Allocation] = []
    before: list[Allocation] = []
    live: dict[int, Allocation] = {}
    spans: list[Span] = [Span(0, 0, "other")]
    index = 0
    overflowed = False
    for entry in trace:
        action = entry["action"]
        if action == "alloc":
            index += 1
            stack, phase = lines(entry.get("frames", ()))
            found = Allocation(
                len(allocations), _size(entry["size"]), index, None, _kind(entry), stack=stack
            )
            if phase is not None:
                found.phase = phase
            if found.phase != spans[-1].phase:
                spans.append(Span(index, 0, found.phase))
            last = live.get(entry["addr"])
            if last is not None:  # its free is missing
                last.end = index
            live[entry["addr"]] = found
            allocations.append(found)
        elif action == "free_completed":
            index += 1
            found = live.pop(entry["addr"], None)
            if found is None:
                stack, _ = lines(entry.get("frames", ()))
                found = Allocation(0, _size(entry["size"]), 0, index, _kind(entry))
                before.append(found)
            found.end = index
    settings = snapshot.get("allocator_settings")
    if isinstance(settings, Mapping):
        overflowed = bool(settings.get("trace_alloc_overflowed"))
    made = set(live)
    for segment in snapshot.get("segments", ()):
        if segment["device"] != device:
            continue
        for address, block in _blocks(segment):
            if block["state"] in LIVE and address not in made:
                stack, _ = lines(block.get("frames", ()))
                size = _size(block.get("requested_size", block["size"]))
                before.append(Allocation(0, size, 0, None, _kind(block), stack=stack))
    everything = before + allocations
    for number, one in enumerate(everything):
        one.id = number
    notes = []
    if overflowed:
        notes.append("The recorder's ring was full: its oldest events are missing.")
    if not trace:
        notes.append("The snapshot has no history: only what was live at its end is shown.")
    return Timeline(everything, spans, f"cuda:{device}", notes)


def _kind(entry: Mapping[str, Any]) -> str:
    kind = entry.get("category")
    return kind if isinstance(kind, str) and kind in KINDS else "temporaries"


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise ValueError(f"a size is {shortened(repr(value), 40)}, wanted bytes")
    return value


def _blocks(segment: Mapping[str, Any]) -> list[tuple[int, Mapping[str, Any]]]:
    """The blocks of a segment with their addresses, which older files leave out."""
    address, found = segment["address"], []
    for block in segment["blocks"]:
        at = block.get("address", address)
        address = at + _size(block["size"])
        found.append((at, block))
    return found


def segments_of(snapshot: Mapping[str, Any], device: int) -> dict[str, Any] | None:
    """Returns the memory that the allocator holds of a device, and how it is cut up; None if the
    snapshot has no segments of it. The largest segments are listed, all are counted."""
    segments = [one for one in snapshot.get("segments", ()) if one["device"] == device]
    if not segments:
        return None
    lines, texts = _Frames(), Texts()
    counts = dict.fromkeys(("reserved", "allocated", "pending", "requested", "stuck", "largest"), 0)
    rows, left = [], BLOCKS
    for segment in sorted(segments, key=lambda one: -_size(one["total_size"])):
        total = _size(segment["total_size"])
        runs: list[list[Any]] = []
        free = 0
        for address, block in _blocks(segment):
            size, state = block["size"], LIVE.get(block["state"], 0)
            if state:
                asked = _size(block.get("requested_size", size))
                counts["allocated" if state == 1 else "pending"] += size
                counts["requested"] += asked if state == 1 else 0
            else:
                free += size
                counts["largest"] = max(counts["largest"], size)
            if len(rows) < SEGMENTS and len(runs) < left:
                stack, _ = lines(block.get("frames", ())) if state else ((), None)
                runs.append([address - segment["address"], size, state, texts.stack(stack)])
        counts["reserved"] += total
        counts["stuck"] += free if free < total else 0
        if len(rows) < SEGMENTS:
            left -= len(runs)
            kind = shortened(str(segment.get("segment_type", "")), 20)
            rows.append([total, kind, int(bool(segment.get("is_expandable"))), runs])
    free = counts["reserved"] - counts["allocated"] - counts["pending"]
    summary = {
        "reserved_bytes": counts["reserved"],
        "allocated_bytes": counts["allocated"],
        "requested_bytes": counts["requested"],
        "rounding_bytes": counts["allocated"] - counts["requested"],
        "pending_bytes": counts["pending"],
        "free_bytes": free,
        "stuck_bytes": counts["stuck"],
        "largest_free_block_bytes": counts["largest"],
        "segments": len(segments),
    }
    return {
        "summary": summary,
        "rows": rows,
        "strings": texts.strings,
        "stacks": texts.stacks,
    }
