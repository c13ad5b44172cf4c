"""Says what grew from an earlier rehearsal to this one, by kinds and lines, and what differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headroom.memory.events import Owner
from headroom.reports.diff import Diff, matched

from .history import place_of

__all__ = ["compared"]


def compared(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Diff:
    """Returns the differences of two reports.

    Args:
        name: of the file of ``before``.
    """
    owners = [_owners(report) for report in (before, after)]
    names = dict.fromkeys(owner.kind for side in owners for owner in side)
    kinds = {
        kind: tuple(sum(one.bytes for one in side if one.kind == kind) for side in owners)
        for kind in names
    }
    totals = {
        "live": (before["peak_allocated"], after["peak_allocated"]),
        "reserved": (before["peak_reserved"], after["peak_reserved"]),
        "the host's memory": (before["host"]["peak"], after["host"]["peak"]),
    }
    a, b = (one["versions"] | {"device": one["device"]["name"]} for one in (before, after))
    notes = [
        f"{part}: {a.get(part, 'none')} -> {b.get(part, 'none')}"
        for part in sorted(a | b)
        if a.get(part) != b.get(part)
    ]
    rows = matched(*owners)
    return Diff((name, "now"), "peak", rows, kinds, totals, notes or ["All versions are the same."])


def _owners(report: Mapping[str, Any]) -> list[Owner]:
    """Returns what was live at the peak of a report."""
    owners = []
    for row in report["at_peak"]:
        stack = tuple(row["stack"])
        size, count = row["bytes"], row["count"]
        owners.append(Owner(row["kind"] or "others", None, place_of(stack), stack, size, count))
    return owners
