"""What torch's allocator did in a rehearsal, as torch records it, with the lines of the program."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch
from headroom.memory import Snapshot
from headroom.memory.collecting import no_collections

__all__ = ["EVENTS", "at_peak", "place_of", "record", "recorded"]

EVENTS = 1_000_000  # the last that are kept
_STARTED = re.compile(r"cli/programs\.py:\d+ _start_")  # from there on a stack is not the program's


def record() -> None:
    """Records from the first allocation on. Each costs some microseconds."""
    torch.cuda._lazy_call(
        lambda: torch.cuda.memory._record_memory_history(stacks="python", max_entries=EVENTS)
    )


@no_collections()
def recorded() -> dict[str, Any] | None:
    """Returns what was recorded, as ``torch.cuda.memory._dump_snapshot`` writes it; None if the
    device was not used."""
    return torch.cuda.memory._snapshot() if torch.cuda.is_initialized() else None


@no_collections()
def at_peak(data: Mapping[str, Any], kinds: Mapping[int, str]) -> list[dict[str, Any]]:
    """Returns what was live at the peak, the largest first, by the lines that allocated it and by
    kind, which is None where it is not known.

    Args:
        data: what was recorded.
        kinds: of memory that is live at the end, by its address.
    """
    snapshot = Snapshot(data)
    known: dict[int, str] = {}
    for segment in snapshot.segments:
        for block in segment.blocks:
            if block.allocation is not None and block.address in kinds:
                known[id(block.allocation)] = kinds[block.address]
    # The last of equal peaks: gradients that are live at the end are those of its step.
    live = snapshot.timeline.bytes_over_events()
    last = len(live) - 1 - live[::-1].index(max(live))
    rows: dict[tuple[Any, ...], list[int]] = {}
    for allocation in snapshot.timeline.live(last):
        own = takewhile(lambda line: not _STARTED.match(line), allocation.stack)
        sums = rows.setdefault((known.get(id(allocation)), tuple(own)), [0, 0])
        sums[0] += allocation.bytes
        sums[1] += 1
    return [
        {"kind": kind, "stack": list(stack), "bytes": size, "count": count}
        for (kind, stack), (size, count) in sorted(rows.items(), key=lambda row: -row[1][0])
    ]


def place_of(stack: Sequence[str]) -> str:
    """Returns the line that allocated, or why there is none."""
    return stack[0] if stack else "no line (a backward pass)"
