"""Reads traces of torch's CUDA allocator: what was allocated and freed, in order.

A snapshot is what ``torch.cuda.memory._snapshot()`` returns or ``_dump_snapshot()`` writes. Sizes
are those that were asked for, before the allocator rounds them, so that the peak is
``requested_bytes.all.peak`` of ``torch.cuda.memory_stats()``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .lines import DEPTH, is_inner, line_of
from .stream import Event

__all__ = ["MARK", "events_of", "lines_of"]

MARK = "headroom::mark:"
_NAME = 256  # characters of a function that are kept; C++ has names of any length


def events_of(snapshot: Mapping[str, Any], device: int = 0, first: int = 0) -> list[Event]:
    """Returns the allocations, frees and marks on a device, in order.

    Memory counts as freed when its last stream is done with it ("free_completed"). ``first`` is the
    number of the first mark of which anything is known.
    """
    traces = snapshot["device_traces"]
    trace = traces[device] if device < len(traces) else []
    return list(_events(trace, first))


def _events(trace: list[Mapping[str, Any]], first: int) -> Iterator[Event]:
    marked = first - 1
    for entry in trace:
        action = entry["action"]
        text = str(entry.get("user_metadata", ""))
        if text.startswith(MARK):
            # Where annotations are not known, metadata says which mark was the last before.
            number = int(text[len(MARK) :])
            for missed in range(marked + 1, number + 1):
                yield Event("mark", missed)
            marked = max(marked, number)
        if action == "alloc":
            stack, phase = lines_of(entry.get("frames", ()))
            yield Event("alloc", entry["addr"], entry["size"], phase=phase, stack=stack)
        elif action == "free_completed":
            yield Event("free", entry["addr"], entry["size"])


def lines_of(frames: Any) -> tuple[tuple[str, ...], str | None]:
    """Returns the user's lines of frames, innermost first, and the phase if they tell it."""
    lines, phase = [], None
    for frame in frames:
        path = frame["filename"]
        cut = path.rpartition("site-packages/")[2]
        if cut.startswith("torch/optim/optimizer.py") and frame["name"] in ("wrapper", "step"):
            phase = "optimizer"
        if len(lines) < DEPTH and not is_inner(cut) and not is_inner(path):
            lines.append(line_of(path, frame["line"], frame["name"][:_NAME]))
    return tuple(lines), phase
