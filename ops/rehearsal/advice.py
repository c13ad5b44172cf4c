"""Finds options of ``headroom run`` with which a program fits that does not: each is rehearsed."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from headroom._core.sizes import format_bytes
from headroom.techniques.technique import allowable, change_of
from headroom_command.program import typed

from .running import rehearsed

__all__ = ["Place", "advise"]

_EXPANDABLE = "PYTORCH_ALLOC_CONF", "expandable_segments:True"
_PASSED = ("gpu", "memory", "host_memory", "devices", "steps", "loss", "nonzero", "no_weights")
_KEPT = ("fits", "peak_allocated", "peak_reserved", "error", "message")
_NO_LOOP = (
    "none is for the loop of this program, which is its own: call headroom.fit in it, or "
    "headroom.retry_on_oom"
)
_HOST_ALONE = (
    "only the host's memory ran out, and no option of headroom run takes less of it: load weights "
    "to the device at once (device_map), map files (mmap=True), or keep less on the host"
)
_LESS = 0.07  # of the room for torch, where a plan fits and torch's allocator has more in pieces
_HOST_LEFT = 0.9  # of what the program leaves of --host-memory, for a budget


class Place(NamedTuple):
    """Holds where a program began: its environment and its folder, which it may change."""

    env: dict[str, str]
    folder: str

    @classmethod
    def now(cls) -> Place:
        return cls(dict(os.environ), os.getcwd())


class _Way(NamedTuple):
    """Holds what is tried: an environment, options of ``headroom run``, and what these change."""

    env: dict[str, str]
    options: tuple[str, ...]
    changes: str = ""


def advise(
    options: argparse.Namespace, found: dict[str, Any], place: Place
) -> list[dict[str, Any]]:
    """Rehearses a program in one way after the other until it fits in one that changes no result,
    tells of each, and returns what was told.

    Args:
        options: of ``headroom rehearse``, with the program.
        found: the report of the program as it is, which does not fit.
        place: where the program began.
    """
    if not found["refused"]:
        _tell("", f"headroom rehearse: {_HOST_ALONE}")
        return []
    _tell("", "headroom rehearse: the same program in other ways")
    memory, context = (found["device"][name] for name in ("memory", "context"))
    less = memory - int(_LESS * (memory - context))
    tried: list[dict[str, Any]] = []
    for way in _ways(found):
        one = _tried(options, way, place)
        if one["error"] == "OutOfMemoryError" and way.options:
            smaller = "--budget", _text(less), *way.options[2:]
            one = _tried(options, way._replace(options=smaller), place)
        if one["error"] == "UnknownLoop":
            _tell(f"  {_NO_LOOP}")
            break
        tried.append(one)
        _tell(*_lines(one))
        if one["fits"] and not one["changes"]:
            break
    best = next((one for one in tried if one["fits"]), None)
    _tell("  it fits in none of these" if best is None else f"\n{best['command']}")
    return tried


def _ways(found: dict[str, Any]) -> Iterator[_Way]:
    """Yields what may help a program, first what changes no result."""
    of, host = found["device"], found["host"]
    budget, room = ("--budget", _text(of["memory"])), of["memory"] - of["context"]
    if any(one["asked"] + one["allocated"] <= room for one in found["refused"]):
        yield _Way(dict([_EXPANDABLE]), ())
    yield _Way({}, budget)
    if host["limit"] is not None and not host["refused"]:
        left = int(_HOST_LEFT * (host["limit"] - host["peak"]))
        yield _Way({}, (*budget, "--host-budget", _text(left)))
    for name in allowable():
        yield _Way({}, (*budget, "--allow", name), change_of(name))


def _text(size: int) -> str:
    return f"{size >> 20} MiB"


def _tried(options: argparse.Namespace, way: _Way, place: Place) -> dict[str, Any]:
    """Rehearses a program in a way, and returns what the report has of it."""
    given = {name: getattr(options, name) for name in _PASSED}
    if options.capability is not None:
        given["capability"] = options.capability / 10
    program = typed(options)
    begin, started = [f"{name}={value}" for name, value in way.env.items()], program
    if way.options:
        started = ["-m", "headroom", "run", *way.options, *program]
    report = rehearsed(started, given, place.env | way.env, place.folder)
    is_file = os.path.exists(os.path.join(place.folder, program[0]))
    words = ["python", *program] if options.is_module or is_file else program
    words = started[1:] if way.options else words
    return {
        "with": " ".join([*begin, shlex.join(way.options)]).strip(),
        "command": " ".join([*begin, shlex.join(words)]),
        "changes": way.changes,
        **{name: report[name] for name in _KEPT},
    }


def _lines(one: dict[str, Any]) -> Iterator[str]:
    peak = format_bytes(one["peak_allocated"])
    yield f"  {one['with']}: {f'fits, {peak}' if one['fits'] else 'does not fit'}"
    if not one["fits"] and one["message"] and one["error"] != "OutOfMemoryError":
        yield f"    {one['error']}: {one['message']}"
    if one["fits"] and one["changes"]:
        yield f"    changes results: {one['changes']}"


def _tell(*lines: str) -> None:
    print(*lines, sep="\n", file=sys.stderr, flush=True)
