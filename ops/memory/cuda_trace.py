"""Reads snapshots of torch's CUDA allocator: what was allocated and freed, in order.

A snapshot is what ``torch.cuda.memory._snapshot()`` returns or ``_dump_snapshot()`` writes. Sizes
are those that were asked for, before the allocator rounds them, so that the peak is
``requested_bytes.all.peak`` of ``torch.cuda.memory_stats()``.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .stream import Event, Label

__all__ = ["MARK", "events_of", "lines_of", "live_before", "load_snapshot"]

MARK = "headroom::mark:"
_LIVE = ("active_allocated", "active_pending_free", "active_awaiting_free")
_DEPTH = 8
_INNER = ("torch/", "headroom/memory/")
_HERE = os.path.dirname(__file__) + os.sep  # also where the package is not installed


class _NoObjects(pickle.Unpickler):
    """A snapshot holds numbers, text, lists, tuples and dicts. A file with anything else could run
    code when it is read."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(
            f"a snapshot holds no objects, and this file has {module}.{name}"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("a snapshot holds no references to other files")


def load_snapshot(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a snapshot that ``torch.cuda.memory._dump_snapshot`` wrote, without running any code
    that may be in the file.

    Raises:
        ValueError: the file is no snapshot.
    """
    try:
        found = _NoObjects(io.BytesIO(Path(path).read_bytes())).load()
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f"{os.fspath(path)} is no snapshot: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("device_traces"), list):
        raise ValueError(f"{os.fspath(path)} is no snapshot: it has no device_traces")
    return found


def events_of(snapshot: Mapping[str, Any], device: int = 0) -> list[Event]:
    """Returns the allocations, frees and marks on a device, in order.

    Memory counts as freed when its last stream is done with it ("free_completed").
    """
    traces = snapshot["device_traces"]
    trace = traces[device] if device < len(traces) else []
    return list(_events(trace))


def _events(trace: list[Mapping[str, Any]]) -> Iterator[Event]:
    marked = -1
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
        if cut.startswith(_INNER) or path.startswith(("<", _HERE)):
            continue
        if len(lines) < _DEPTH:
            short = os.sep.join(path.split(os.sep)[-2:])
            lines.append(f"{short}:{frame['line']} {frame['name']}")
    return tuple(lines), phase


def live_before(snapshot: Mapping[str, Any], device: int = 0) -> list[Label]:
    """Returns what was live before the first event of the trace: what is live at its end, less what
    it allocated, and what it freed without having allocated it."""
    made: set[int] = set()
    found: dict[int, int] = {}
    for event in events_of(snapshot, device):
        if event.action == "alloc":
            made.add(event.address)
        elif event.action == "free":
            if event.address in made:
                made.discard(event.address)
            else:
                found[event.address] = event.bytes
    for segment in snapshot.get("segments", ()):
        if segment["device"] != device:
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            at = block.get("address", address)
            address = at + block["size"]
            if block["state"] in _LIVE and at not in made:
                found[at] = block.get("requested_size", block["size"])
    return [Label(address, size, "temporaries") for address, size in found.items()]
