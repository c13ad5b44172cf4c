"""Checks the sizes and forms of JSON from files before anything is made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..memory.events import PHASES, Allocation

__all__ = ["EVENTS", "SUM", "check_timeline", "checked", "number", "text"]

EVENTS = 8_000_000  # of a timeline
SUM = 1 << 62  # of all bytes, which are added in 64 bits
_WORDS: dict[type, str] = {str: "text", list: "a list", Mapping: "an object"}


def number(value: Any, what: str, least: float = 0, most: float = SUM) -> Any:
    """Returns an int, or a float where it is one, that is within limits.

    Raises:
        ValueError: it is no number, or outside them.
    """
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not least <= value <= most:
        shown = repr(value)[:60]
        raise ValueError(f"{what} is {shown}, wanted a number from {least:g} to {most:g}")
    return value


def checked(value: Any, kind: type, what: str) -> Any:
    """Returns a value, which must be a text, a list or an object.

    Raises:
        ValueError: it is another.
    """
    if not isinstance(value, kind):
        raise ValueError(f"{what} is a {type(value).__name__}, wanted {_WORDS[kind]}")
    return value


def text(value: Any, what: str) -> str:
    """Returns a text.

    Raises:
        ValueError: it is none.
    """
    return checked(value, str, what)


def check_timeline(value: Any) -> None:
    """Refuses the JSON of a timeline that would take much more memory than the file is large.

    Raises:
        ValueError: says what is wrong.
    """
    checked(value, Mapping, "its timeline")
    known = list(Allocation.__dataclass_fields__)
    fields = value.get("fields")
    if not isinstance(fields, list) or not {"id", "bytes", "stack"} <= set(map(str, fields)):
        raise ValueError("its fields lack id, bytes or stack")
    if unknown := [field for field in fields if field not in known]:
        raise ValueError(f"it has the field {str(unknown[0])[:60]!r}, of a newer version")
    stacks = checked(value.get("stacks"), list, "stacks")
    for stack in stacks:
        for line in stack if isinstance(stack, list) else [None]:
            text(line, "a line of a stack")
    total = 0
    for row in checked(value.get("allocations"), list, "allocations"):
        if not isinstance(row, list) or len(row) != len(fields):
            raise ValueError(f"an allocation is {repr(row)[:60]}, wanted {len(fields)} values")
        one = dict(zip(fields, row))
        total += _whole(one["bytes"], "the bytes of an allocation", SUM)
        start = _whole(one.get("start", 0), "the start of an allocation", EVENTS)
        end = one.get("end")
        if end is not None and _whole(end, "the end of an allocation", EVENTS) < start:
            raise ValueError(f"an allocation ends at {end}, before its start {start}")
        _whole(one["stack"], "the stack of an allocation", len(stacks) - 1)
        _whole(one.get("step", 0), "the step of an allocation", SUM)
        for name in ("module", "op"):
            if one.get(name) is not None:
                text(one[name], f"the {name} of an allocation")
    if total > SUM:
        raise ValueError("its allocations have more than 2**62 bytes")
    last = 0
    for span in value.get("spans", ()):
        if not isinstance(span, list) or len(span) != 3 or span[2] not in PHASES:
            raise ValueError(f"a span is {repr(span)[:60]}, wanted [start, step, phase]")
        if _whole(span[0], "the start of a span", EVENTS) < last:
            raise ValueError("its spans are not in order")
        last = span[0]
        _whole(span[1], "the step of a span", SUM)
    text(value.get("device"), "the device")
    for note in value.get("notes", ()):
        text(note, "a note")


def _whole(value: Any, what: str, most: int) -> int:
    if type(value) is not int:
        raise ValueError(f"{what} is {repr(value)[:60]}, wanted a whole number")
    return number(value, what, 0, most)
