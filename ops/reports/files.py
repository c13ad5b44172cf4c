"""Reads what a report is made of: recognizes a file, reads it without running code, checks it."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._core.sizes import format_bytes
from .._core.text import quoted
from ..memory.events import Timeline
from ..memory.snapshots import Snapshot, load_snapshot
from ..planning.result import Plan
from . import ladder, profile, recording, rehearsal, snapshots
from .limits import EVENTS, check_timeline

__all__ = ["Part", "load", "read"]

SNAPSHOT, JSON = 2 << 30, 256 << 20  # bytes of a file: reading takes several times as much
MORE = "record fewer events (max_entries), or fewer steps"


@dataclass
class Part:
    """One picture of a report, from one file: memory over time, a ladder, a profile, a rehearsal.

    Attributes:
        kind: "recording", "ladder", "profile" or "rehearsal".
        file: the name of the file.
        title: a few words.
        content: what the page shows; ``content["summary"]`` has the numbers of ``--json``.
    """

    kind: str
    file: str
    title: str
    content: dict[str, Any] = field(repr=False)

    @property
    def summary(self) -> dict[str, Any]:
        return {"kind": self.kind, "file": self.file, "title": self.title} | self.content["summary"]


def read(path: str | os.PathLike[str]) -> list[Part]:
    """Returns the parts of a report that a file has: one per device of a snapshot, else one.

    Takes snapshots of ``torch.cuda.memory._dump_snapshot``, plans and timelines that were saved,
    the ladder's JSON, profiles, and reports of rehearsals.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is none of these, damaged or too large; says which and what to do.
    """
    value, made = _recognized(path)
    with _damage(path):
        return made(value, quoted(Path(path).name, 80))


def load(path: str | os.PathLike[str]) -> Snapshot | Plan | Timeline:
    """Returns what is in a file that has memory over time: a snapshot, a plan or a timeline.

    Raises:
        OSError, ValueError: as :func:`read`, also for files without memory over time.
    """
    value, made = _recognized(path)
    with _damage(path):
        if made is _snapshot:
            return value
        if made is _plan:
            return _checked_plan(value)
        if made is _timeline:
            return _checked_timeline(value)
    raise ValueError(f"{os.fspath(path)} has no memory over time: wanted a snapshot or a plan")


@contextmanager
def _damage(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns what forged values raise into a ValueError that names the file."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        text = f"{os.fspath(path)} is damaged: {quoted(reason, 300)}"
        raise ValueError(text) from error
    except RecursionError as error:
        raise ValueError(f"{os.fspath(path)} is damaged: it is nested too deeply") from error


def _recognized(path: str | os.PathLike[str]) -> tuple[Any, Callable[[Any, str], list[Part]]]:
    """Reads a file, and returns its value with what makes parts of it."""
    name = os.fspath(path)
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{name} is not a file")
        with open(path, "rb") as file:
            first = file.read(64).lstrip()[:1]
    except FileNotFoundError as error:
        raise ValueError(f"there is no {name}") from error
    if status.st_size == 0:
        raise ValueError(f"{name} is empty")
    is_json = first in (b"{", b"[")
    most = JSON if is_json else SNAPSHOT
    if status.st_size > most:
        sizes = f"{format_bytes(status.st_size)}, more than {format_bytes(most)}"
        raise ValueError(f"{name} has {sizes}: {MORE}")
    if not is_json and first != b"\x80":
        raise ValueError(
            f"{name} is neither JSON nor a snapshot: wanted a file of "
            "torch.cuda.memory._dump_snapshot, a saved plan, a profile, or ladder.json"
        )
    if is_json:
        value = _json(Path(path), name)
        return value, _kind_of(value, name)
    return _snapshot_in(path), _snapshot


def _snapshot_in(path: str | os.PathLike[str]) -> Snapshot:
    try:
        return load_snapshot(path, max_bytes=SNAPSHOT)
    except (KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        reason = quoted(error, 300)
        raise ValueError(f"{os.fspath(path)} is no snapshot: it is damaged: {reason}") from error


def _json(path: Path, name: str) -> Any:
    try:  # NaN and infinities, such as the loss of a run that diverged, count as not recorded
        return json.loads(path.read_bytes(), parse_constant=lambda constant: None)
    except (ValueError, RecursionError) as error:  # also UnicodeDecodeError, JSONDecodeError
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"{name} is no JSON that can be read: {reason}") from error


def _kind_of(value: Any, name: str) -> Callable[[Any, str], list[Part]]:
    if isinstance(value, Mapping):
        form = value.get("format")
        if isinstance(form, str) and form in FORMATS:
            return FORMATS[form]
        if ladder.is_ladder(value):
            return _ladder
        if "traceEvents" in value:
            raise ValueError(f"{name} is a trace of torch.profiler: open it in ui.perfetto.dev")
        keys = ", ".join(quoted(key, 30) for key in list(value)[:5])
        found = f"its format is {quoted(repr(form), 60)}, its keys are {keys or 'none'}"
    else:
        found = f"it holds a {type(value).__name__}"
    raise ValueError(
        f"{name} is JSON of something else ({found}): wanted a plan, a timeline, a profile, a "
        "ladder or a rehearsal of Headroom"
    )


def _snapshot(value: Snapshot, name: str) -> list[Part]:
    if not any(value.data["device_traces"]) and not value.data["segments"]:
        raise ValueError("it has neither events nor segments; was the recorder on?")
    parts = []
    for device in value.devices:
        one = value if device == value.device else value.of(device)
        if one.timeline.events > EVENTS:
            raise ValueError(f"it has {one.timeline.events:,} events, more than {EVENTS:,}: {MORE}")
        # On the CPU segments are the pages that tensors were in, which nobody reserves.
        is_held = bool(one.segments) and not device.startswith("cpu")
        reserved = one.reserved_over_events() if is_held else []
        if max(reserved, default=0) < one.timeline.peak_bytes:
            reserved = []  # segments were not recorded as they came and went
        content = recording.described(one.timeline, reserved, one.has_kinds)
        content["notes"] += [
            f"Out of memory after event {failure.event:,}: {format_bytes(failure.bytes)} were "
            f"asked for, and the device had {format_bytes(failure.device_free)} free."
            for failure in one.out_of_memory[:20]
        ]
        if is_held:
            segments = snapshots.segments_of(one)
            content["segments"] = segments
            content["summary"]["segments"] = segments["summary"]
        title = name if len(value.devices) == 1 else f"{name}, {quoted(device, 40)}"
        parts.append(Part("recording", name, title, content))
    return parts


def _checked_timeline(value: Mapping[str, Any]) -> Timeline:
    check_timeline(value)
    return Timeline.from_json(dict(value))


def _checked_plan(value: Mapping[str, Any]) -> Plan:
    check_timeline(value.get("timeline"))
    return Plan.from_json(dict(value))


def _timeline(value: Mapping[str, Any], name: str) -> list[Part]:
    content = recording.described(_checked_timeline(value))
    return [Part("recording", name, name, content)]


def _plan(value: Mapping[str, Any], name: str) -> list[Part]:
    plan = _checked_plan(value)
    content = recording.described(plan.timeline)
    share = {
        key: int(size)
        for key, size in vars(plan.device_share).items()
        if key != "source" and size > 0
    }
    options = {quoted(k, 40): quoted(v, 80) for k, v in plan.options.items()}
    content["plan"] = {"device_share": share, "options": options}
    content["summary"] |= {"total_bytes": plan.total_bytes, "device_share": share}
    model = quoted(plan.model, 60)
    title = f"plan of {model}" if model else "plan"
    return [Part("recording", name, title, content)]


def _ladder(value: Mapping[str, Any], name: str) -> list[Part]:
    return [Part("ladder", name, "the memory ladder", ladder.described(value))]


def _profile(value: Mapping[str, Any], name: str) -> list[Part]:
    return [Part("profile", name, f"profile {name}", profile.described(value))]


def _rehearsal(value: Mapping[str, Any], name: str) -> list[Part]:
    content = rehearsal.described(value)
    return [Part("rehearsal", name, f"rehearsal on {content['summary']['device']}", content)]


FORMATS: dict[str, Callable[[Any, str], list[Part]]] = {
    "headroom.plan/1": _plan,
    "headroom.memory.timeline/1": _timeline,
    "headroom.profile": _profile,
    "headroom.rehearsal/1": _rehearsal,
}
