"""The memory ladder as a part of a report: one bar per rung, by kind, beside its measured peak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._core.text import quoted
from .kinds import color_of
from .limits import checked, number, text

__all__ = ["described", "is_ladder"]

RUNGS = 500
NUMBERS = (
    "seconds",
    "step_seconds",
    "held_out_bits_per_byte",
    "tokens_per_second",
    "bytes_per_parameter",
)
PREDICTED = "predicted_peak_bytes"


def is_ladder(value: Mapping[str, Any]) -> bool:
    """Returns whether JSON is what ``examples/ladder.py`` or :func:`headroom.ladder` writes."""
    return isinstance(value.get("rungs"), list) and "versions" in value


def described(value: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a report shows of a ladder. A rung is compared with the first of its size, which
    is ``first_peak_bytes``; the least peak is that of the size of the first rung. Peaks were
    measured, or predicted if the ladder's ``"peaks"`` say so.

    Raises:
        ValueError: a rung has no title, bytes or peak, or they are not what they should be.
    """
    found = value["rungs"]
    if not 1 <= len(found) <= RUNGS:
        raise ValueError(f"it has {len(found)} rungs, wanted 1 to {RUNGS}")
    rungs = [_rung(rung) for rung in found]
    sizes = [_size(rung) for rung in found]
    first: dict[str | None, float] = {}
    for rung, size in zip(rungs, sizes):
        rung["first_peak_bytes"] = first.setdefault(size, rung["peak_bytes"])
    least = min(rung["peak_bytes"] for rung, size in zip(rungs, sizes) if size == sizes[0])
    kinds = list(dict.fromkeys(kind for rung in rungs for kind in rung["bytes"]))
    return {
        "summary": {
            "rungs": rungs,
            "first_peak_bytes": rungs[0]["peak_bytes"],
            "least_peak_bytes": least,
            "peak": "predicted peak" if value.get("peaks") == "predicted" else "measured peak",
        },
        "colors": {kind: color_of(kind) for kind in kinds},
    }


def _size(rung: Mapping[str, Any]) -> str | None:
    """Returns the name of what a rung trains, if it says so."""
    size = rung.get("size")
    return None if size is None else text(size, "the size of a rung")


def _rung(rung: Any) -> dict[str, Any]:
    sizes = checked(rung, Mapping, "a rung").get("bytes")
    if not isinstance(sizes, Mapping) or len(sizes) > 20:
        raise ValueError("a rung has no bytes by kind")
    row: dict[str, Any] = {
        "title": quoted(text(rung.get("title"), "the title of a rung"), 80),
        "peak_bytes": number(rung.get("peak_bytes"), "the peak of a rung"),
        "bytes": {quoted(kind, 40): number(size, "bytes") for kind, size in sizes.items()},
    }
    for name in (*NUMBERS, PREDICTED):
        if rung.get(name) is not None:
            row[name] = number(rung[name], f"{name} of a rung", -1e300, 1e300)
    return row
