"""Writes the trace of a cycle: the profiler's own, with tracks of phases and of modules in the
backward pass, which only become known afterwards, and a curve of live bytes."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from .._core.atomic import replacing
from .events import Call, Recording
from .phases import intervals
from .result import ProfileResult

__all__ = ["write_result", "write_trace"]

_BEGIN = b'"traceEvents": ['
_BASE = b'"baseTimeNanoseconds":'
_END = b'"traceName"'
_PROCESS = "headroom"


def write_trace(path: Path, export: Callable[[str], None], recording: Recording) -> None:
    """Writes the trace, compressed, to ``path``, which changes only once all of it is written.

    Args:
        export: writes the profiler's trace to a file of that name.

    Raises:
        OSError: the file, or the temporary file of the profiler, could not be written.
    """
    with tempfile.TemporaryDirectory(prefix="headroom-trace-") as folder:
        plain = os.path.join(folder, "trace.json")
        export(plain)
        head, base = _checked(plain)
        at = head.find(_BEGIN) + len(_BEGIN)
        with (
            open(plain, "rb") as source,
            replacing(path) as file,
            os.fdopen(os.dup(file), "wb") as raw,
            gzip.GzipFile("", "wb", 5, raw, mtime=0) as out,
        ):
            out.write(head[:at])
            for event in _added(recording, base):
                out.write(b"\n" + json.dumps(event).encode() + b",")
            source.seek(at)
            while block := source.read(1 << 20):
                out.write(block)


def _checked(plain: str) -> tuple[bytes, int]:
    """Returns the begin of the profiler's trace, and the time that its times count from. The
    profiler does not say when it could not write all of it."""
    size = os.path.getsize(plain) if os.path.exists(plain) else 0
    if size:
        with open(plain, "rb") as source:
            head = source.read(1 << 16)
            source.seek(-min(size, 1 << 12), os.SEEK_END)
            tail = source.read().rstrip()
        base = _base_time(head)
        if _BEGIN in head and base is not None and _END in tail and tail.endswith(b"}"):
            return head, base
    raise OSError(
        f"torch.profiler could not write all of its trace to {os.path.dirname(plain)}: free space "
        "in the folder of temporary files, or name another in TMPDIR"
    )


def write_result(path: Path, result: ProfileResult) -> None:
    """Writes the result as JSON; the file changes only once all of it is written."""
    text = result.to_json().encode()
    with replacing(path, len(text)) as file, os.fdopen(os.dup(file), "wb") as out:
        out.write(text)


def _base_time(head: bytes) -> int | None:
    at = head.find(_BASE)
    digits = head[at + len(_BASE) : at + len(_BASE) + 32].split(b",")[0].strip()
    return int(digits) if at >= 0 and digits.isdigit() else None


def _added(recording: Recording, base: int) -> Iterator[dict[str, Any]]:
    """Returns events in the format of Chrome's traces, in microseconds."""

    def event(name: str, start: int, end: int, track: str) -> dict[str, Any]:
        times = {"ts": (start - base) / 1e3, "dur": (end - start) / 1e3}
        about = {"ph": "X", "cat": "headroom", "name": name, "pid": _PROCESS, "tid": track}
        return about | times | {"args": {}}

    yield {"ph": "M", "name": "process_name", "pid": _PROCESS, "args": {"name": _PROCESS}}
    yield {"ph": "M", "name": "process_sort_index", "pid": _PROCESS, "args": {"sort_index": -1}}
    for _, step in sorted(recording.steps.items()):
        for start, end, phase in intervals(recording, step):
            yield event(phase, start, end, "phases")
    for name, start, end in _backward(recording.calls):
        yield event(name, start, end, "modules in the backward pass")
    live: dict[str, int] = {}
    for one in recording.memory:
        live[one.device] = live.get(one.device, 0) + one.bytes
        yield {
            "ph": "C",
            "name": f"live bytes on {one.device} since the start",
            "pid": _PROCESS,
            "ts": (one.time - base) / 1e3,
            "args": {"bytes": live[one.device]},
        }


def _backward(calls: Iterable[Call]) -> Iterator[tuple[str, int, int]]:
    """Returns module after module in the backward pass, from their nodes, by thread. Nodes within
    those that compute something again are left out."""
    current: dict[int, tuple[str, int, int]] = {}
    for call in calls:
        if not call.is_node or (call.parent is not None and call.parent.phase == "backward"):
            if call.phase != "backward" and call.thread in current:
                yield current.pop(call.thread)  # the pass has ended
            continue
        name = "(no module)" if call.module is None else call.module or "(model)"
        last = current.get(call.thread)
        if last is not None and last[0] == name:
            current[call.thread] = name, last[1], call.end
            continue
        if last is not None:
            yield last
        current[call.thread] = name, call.start, call.end
    yield from current.values()
