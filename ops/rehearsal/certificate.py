"""Certificates: what a rehearsal took, with all that torch's allocator did, so that the peaks can
be computed again without the program, by an allocator that was written independently.

**The format** is one JSON object with the keys

- ``format``: "headroom.certificate/1";
- ``report``: what ``headroom rehearse --report`` writes;
- ``program_sha256``: of the file that was run, or null;
- ``expandable_segments``: whether the allocator's segments grew;
- ``sizes``: the bytes that each allocation asked for, in order, and ``streams``: whose it was; each
  stream and each private pool has a number;
- ``events``: n is the n-th allocation, counted from 1; the first -n says that the program has
  freed it, the second that no stream uses it any more; 0 gives unused segments back;
- ``sha256``: of all other keys, as JSON without spaces and with sorted keys, which notices damage
  and is no signature.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headroom._core.atomic import write_json
from headroom._core.sizes import format_bytes
from headroom.planning.allocator import Allocator, Block
from headroom.planning.allocator_settings import AllocatorSettings

from .earlier import check_report

__all__ = ["FORMAT", "Verified", "verify", "write"]

FORMAT = "headroom.certificate/1"
_LARGEST = 1 << 62  # bytes of an allocation
_GIVEN_BACK = ("segment_free", "segment_unmap")


class Verified(NamedTuple):
    """A certificate, and the peaks of its trace."""

    report: dict[str, Any]
    allocated: int
    reserved: int

    @property
    def holds(self) -> bool:
        """Returns whether the peaks of the report are those of the trace, to the byte."""
        peaks = self.report["peak_allocated"], self.report["peak_reserved"]
        return peaks == (self.allocated, self.reserved)


def write(
    path: str | os.PathLike[str],
    report: Mapping[str, Any],
    recorded: Mapping[str, Any] | None,
    program: str,
) -> None:
    """Writes a certificate that holds.

    Args:
        report: of a rehearsal.
        recorded: what its allocator did on the first device, as torch records it.
        program: the file that was run, if it is one.

    Raises:
        ValueError: nothing was recorded, or its replay has other peaks; nothing is written.
    """
    if recorded is None:
        raise ValueError("the program has not used the device")
    content = {
        "format": FORMAT,
        "report": report,
        "program_sha256": _sha256(Path(program).read_bytes()) if os.path.isfile(program) else None,
        "expandable_segments": recorded["allocator_settings"]["expandable_segments"],
        **_trace(recorded["device_traces"][0]),
    }
    found = _replayed(content)
    if not found.holds:
        peaks = (report["peak_allocated"], report["peak_reserved"])
        first, second = (" and ".join(map(format_bytes, each)) for each in (peaks, found[1:]))
        raise ValueError(
            f"{first} were allocated and reserved, and a replay of what was recorded has {second}: "
            "memory was taken without torch's allocator, or the allocator has settings "
            "(PYTORCH_ALLOC_CONF) that are not replayed, or the program has recorded it itself"
        )
    write_json(path, content | {"sha256": _checksum(content)})


def verify(path: str | os.PathLike[str]) -> Verified:
    """Reads a certificate, and replays its trace.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no certificate, or damaged; says which.
    """
    name = os.fspath(path)
    try:
        content = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is no certificate: it is no JSON, or a part of one") from error
    form = content.get("format") if isinstance(content, dict) else None
    if form != FORMAT:
        raise ValueError(
            f"{name} is no certificate: its format is {repr(form)[:60]}, wanted {FORMAT!r}, which "
            "headroom rehearse --certificate writes"
        )
    if content.pop("sha256", None) != _checksum(content):
        raise ValueError(f"{name} is damaged: its checksum is that of another content")
    try:
        return _replayed(content)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"{name} is damaged: {reason}") from error


def _checksum(content: Mapping[str, Any]) -> str:
    return _sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _trace(entries: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Returns the keys of a certificate about what torch has recorded."""
    sizes: list[int] = []
    streams: list[int] = []
    events: list[int] = []
    numbers: dict[tuple[Any, ...], int] = {}
    live: dict[int, int] = {}
    for entry in entries:
        action, address = entry["action"], entry.get("addr")
        if action == "alloc":
            owner = entry["stream"], entry.get("pool_id")  # which torch 2.11 does not say
            sizes.append(entry["size"])
            streams.append(numbers.setdefault(owner, len(numbers)))
            live[address] = len(sizes)
            events.append(len(sizes))
        elif action in ("free_requested", "free_completed"):
            if address not in live:
                raise ValueError(
                    "memory was freed whose allocation was not recorded: rehearse fewer steps, and "
                    "a program that does not itself record what is allocated"
                )
            events.append(-live[address])
            if action == "free_completed":
                del live[address]
        elif action in _GIVEN_BACK and events[-1:] != [0]:
            events.append(0)
    return {"sizes": sizes, "streams": streams, "events": events}


def _replayed(content: Mapping[str, Any]) -> Verified:
    """Returns the peaks of a trace.

    Raises:
        ValueError: an event makes no sense.
    """
    sizes, streams, events = (content[key] for key in ("sizes", "streams", "events"))
    wrong = [n for n in (*sizes, *streams, *events) if type(n) is not int or abs(n) > _LARGEST]
    if wrong or len(streams) != len(sizes) or not all(size > 0 for size in sizes):
        raise ValueError("its sizes, streams and events are not those of a trace")
    report, expandable = content["report"], content["expandable_segments"]
    check_report(report)
    if expandable and 0 in events:
        raise ValueError("segments were expandable and given back, which is not replayed")
    allocator = Allocator(AllocatorSettings(expandable=expandable))
    blocks: list[Block | None] = []
    requested: set[int] = set()
    for event in events:
        if event == 0:
            allocator.empty_cache()
        elif event == len(blocks) + 1 <= len(sizes):
            blocks.append(allocator.allocate(sizes[event - 1], streams[event - 1]))
        else:
            block = blocks[-event - 1] if 0 < -event <= len(blocks) else None
            if block is None:
                raise ValueError(f"its event {event} is no allocation, and frees none")
            if -event in requested:
                allocator.complete_free(block)
                blocks[-event - 1] = None
            else:
                allocator.request_free(block)
                requested.add(-event)
    return Verified(dict(report), allocator.allocated_peak, allocator.reserved_peak)
