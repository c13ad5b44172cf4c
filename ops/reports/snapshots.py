"""Segments of a snapshot as a part of a report: what the allocator holds, and how it is cut up."""

from __future__ import annotations

from typing import Any

from ..memory.snapshots import Snapshot
from .text import Texts

__all__ = ["segments_of"]

SEGMENTS = 300  # that are drawn
BLOCKS = 20_000
WAITING = ("active_pending_free", "active_awaiting_free")
FREE, USED, PENDING = 0, 1, 2


def segments_of(snapshot: Snapshot) -> dict[str, Any]:
    """Returns the memory that the allocator holds at the end, and how it is cut up. The largest
    segments are listed, all are counted."""
    texts = Texts()
    sizes = [0, 0, 0]  # of blocks by their state
    reserved = requested = stuck = largest = 0
    rows, left = [], BLOCKS
    for segment in sorted(snapshot.segments, key=lambda one: -one.size):
        runs: list[list[int]] = []
        for block in segment.blocks:
            a = block.allocation
            state = FREE if a is None else PENDING if block.state in WAITING else USED
            sizes[state] += block.size
            if state == USED:
                requested += block.requested
            elif state == FREE:
                largest = max(largest, block.size)
            if len(rows) < SEGMENTS and len(runs) < left:
                lines = () if a is None else ((a.module or a.op or a.kind), *a.stack)
                runs.append(
                    [block.address - segment.address, block.size, state, texts.stack(lines)]
                )
        reserved += segment.size
        stuck += segment.free_bytes if segment.free_bytes < segment.size else 0
        if len(rows) < SEGMENTS:
            left -= len(runs)
            rows.append([segment.size, int(segment.is_expandable), runs])
    summary = {
        "reserved_bytes": reserved,
        "allocated_bytes": sizes[USED],
        "requested_bytes": requested,
        "rounding_bytes": sizes[USED] - requested,
        "pending_bytes": sizes[PENDING],
        "free_bytes": sizes[FREE],
        "stuck_bytes": stuck,
        "largest_free_block_bytes": largest,
        "segments": len(snapshot.segments),
        "expandable_segments": sum(segment.is_expandable for segment in snapshot.segments),
    }
    return {"summary": summary, "rows": rows, "strings": texts.strings, "stacks": texts.stacks}
