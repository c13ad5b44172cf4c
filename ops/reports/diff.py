"""Compares two snapshots, timelines or plans by kind and by stack, never by address."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .._core.grouping import grouped
from .._core.sizes import format_bytes, parse_bytes
from .._core.text import shortened
from ..memory.events import KINDS, Owner, Timeline
from ..memory.snapshots import Snapshot, load_snapshot

__all__ = ["Diff", "Row", "diff", "matched"]

FORMAT = "headroom.diff/1"
_MOMENTS = ("peak", "end")


class Row(NamedTuple):
    """The allocations of one kind, owner and stack on both sides."""

    kind: str
    module: str | None
    op: str | None
    stack: tuple[str, ...]
    """Of the second side, or of the first where it is gone."""
    bytes_a: int
    bytes_b: int
    count_a: int
    count_b: int

    @property
    def growth(self) -> int:
        """Returns how many bytes more the second side has."""
        return self.bytes_b - self.bytes_a

    @property
    def change(self) -> str:
        """Returns "new", "gone", "grown", "shrunk" or "same"."""
        if not self.count_a or not self.count_b:
            return "gone" if self.count_a else "new"
        return "grown" if self.growth > 0 else "shrunk" if self.growth else "same"

    @property
    def name(self) -> str:
        """Returns the owner in a few words."""
        return Owner(self.kind, self.module, self.op, self.stack, 0, 0).name


@dataclass
class Diff:
    """The result of :func:`diff`.

    Attributes:
        names: of the two sides.
        at: "peak" or "end", the moment of each side that is compared.
        rows: whatever differs, what grew most first.
        kinds: bytes of every kind, of each side.
        totals: for "live", "peak" and, of snapshots, "reserved", "free in segments" and "largest
            gap": bytes of each side.
    """

    names: tuple[str, str]
    at: str
    rows: list[Row]
    kinds: dict[str, tuple[int, int]]
    totals: dict[str, tuple[int, int]]
    notes: list[str] = field(default_factory=list)

    @property
    def growth(self) -> int:
        """Returns how many bytes more are live on the second side at the moment that is
        compared."""
        before, after = self.totals["live"]
        return after - before

    def fails(self, fail_above: int | str) -> bool:
        """Returns whether it grew by more than this, such as "50 MiB"."""
        return self.growth > parse_bytes(fail_above, "fail_above")

    def table(self, top: int = 10) -> str:
        """Returns the differences as text of at most 80 columns."""
        columns = [shortened(name, 12) for name in self.names]
        lines = [f"{'':<26}{columns[0]:>13}{columns[1]:>13}{'growth':>13}"]
        for name, (a, b) in self.totals.items():
            shown = f"live at the {self.at}" if name == "live" else name
            lines.append(_cells(shown, a, b))
        lines += ["", f"{'kind':<26}"]
        lines += [_cells(kind, a, b) for kind, (a, b) in self.kinds.items() if a or b]
        if not self.rows:
            lines += ["", "Nothing differs by stack."]
        else:
            lines += ["", f"{'growth':>12}  {'pieces':<12}what"]
        for row in self.rows[:top]:
            pieces = f"{row.count_a} -> {row.count_b}"
            about = f"{row.change}, {row.kind}: {row.name}"
            lines.append(f"{format_bytes(row.growth, '+'):>12}  {pieces:<12}{shortened(about, 54)}")
            lines += [f"{'':<26}{shortened(line, 54)}" for line in row.stack[:3]]
        if rest := self.rows[top:]:
            growth = format_bytes(sum(row.growth for row in rest), "+")
            lines.append(f"{growth:>12}  {'':<12}{len(rest)} more")
        return "\n".join([*lines, *([""] if self.notes else []), *self.notes])

    __str__ = table

    def to_dict(self) -> dict[str, Any]:
        """Returns the differences in what :mod:`json` writes."""
        return {
            "format": FORMAT,
            "names": list(self.names),
            "at": self.at,
            "growth": self.growth,
            "totals": {name: list(sides) for name, sides in self.totals.items()},
            "kinds": {kind: list(sides) for kind, sides in self.kinds.items()},
            "rows": [
                row._asdict()
                | {"stack": list(row.stack)}
                | {"growth": row.growth, "change": row.change}
                for row in self.rows
            ],
            "notes": self.notes,
        }


def diff(a: Any, b: Any, *, at: str = "peak", device: str | None = None) -> Diff:
    """Returns what grew from one run to another, by kind and stack.

    Example::

        with headroom.memory.snapshot("before.pickle", device="cpu"):
            kept = [torch.ones(1000)]
        with headroom.memory.snapshot("after.pickle", device="cpu"):
            kept = [torch.ones(1000) for _ in range(3)]
        found = headroom.reports.diff("before.pickle", "after.pickle", at="end")
        print(found)
        assert found.growth == 8000 and found.fails("4 KiB")

    Allocations belong together if kind and stack are the same, or, without a stack, kind, module
    and op. What then is on one side only is matched again with line numbers left out, because code
    that was edited above moves them. Addresses and order do not matter.

    Args:
        a, b: the earlier and the later run, each a path of a snapshot, or what has a ``timeline``:
            a :class:`headroom.memory.Snapshot`, a plan, what was tracked; or a
            :class:`headroom.memory.Timeline`.
        at: "peak", what is live when the most is; or "end", what is live after the last event,
            such as for what leaks.
        device: of each snapshot; by default the one with the most events.

    Raises:
        OSError, ValueError: as :func:`headroom.memory.load_snapshot`; ``at`` is neither.
        TypeError: a side is none of these.
    """
    if at not in _MOMENTS:
        raise ValueError(f"at is {at!r}, wanted one of {', '.join(_MOMENTS)}")
    sides = [_Side(value, at, device) for value in (a, b)]
    first, second = sides
    names = first.name, second.name
    both = {kind: (first.kinds[kind], second.kinds[kind]) for kind in KINDS}
    totals = {
        name: (size, second.totals[name])
        for name, size in first.totals.items()
        if name in second.totals
    }
    notes = [
        f"{side.name} does not say what memory is for: every kind is temporaries."
        for side in sides
        if not side.has_kinds
    ]
    return Diff(names, at, matched(first.owners, second.owners), both, totals, notes)


class _Side:
    """One run at one moment."""

    def __init__(self, value: Any, at: str, device: str | None) -> None:
        self.name = type(value).__name__.lower()
        if isinstance(value, (str, os.PathLike)):
            self.name = os.path.basename(os.fspath(value))
            value = load_snapshot(value)
        if device is not None and isinstance(value, Snapshot):
            value = value.of(device)
        timeline = value if isinstance(value, Timeline) else getattr(value, "timeline", None)
        if device is not None and isinstance(timeline, Timeline) and timeline.device != device:
            raise ValueError(f"device is {device!r}, and {self.name} is of {timeline.device!r}")
        if not isinstance(timeline, Timeline):
            raise TypeError(
                f"got {type(value).__name__}, wanted the path of a snapshot, or something with a "
                "timeline: a snapshot, a plan, what was tracked"
            )
        index = timeline.peak_index if at == "peak" else timeline.events - 1
        self.kinds = timeline.by_kind(index)
        self.owners = timeline.owners(index)
        self.totals = {"live": sum(self.kinds.values()), "peak": timeline.peak_bytes}
        self.has_kinds = getattr(value, "has_kinds", True)
        if isinstance(value, Snapshot) and value.segments:
            gaps = [
                block.size for s in value.segments for block in s.blocks if not block.allocation
            ]
            self.totals["reserved"] = sum(segment.size for segment in value.segments)
            self.totals["free in segments"] = sum(gaps)
            self.totals["largest gap"] = max(gaps, default=0)


def matched(first: list[Owner], second: list[Owner]) -> list[Row]:
    """Returns what differs between owners, what grew most first. They are matched by their lines,
    and what is then left without line numbers."""
    a, b = grouped(first, _key), grouped(second, _key)
    shared = a.keys() & b.keys()
    rows = [_row(a[key], b[key]) for key in a if key in shared]
    left = grouped((o for key, group in a.items() if key not in shared for o in group), _loose)
    right = grouped((o for key, group in b.items() if key not in shared for o in group), _loose)
    keys = dict.fromkeys([*left, *right])
    rows += [_row(left.get(key, []), right.get(key, [])) for key in keys]
    differ = [row for row in rows if row.change != "same"]
    return sorted(differ, key=lambda row: (-row.growth, row.kind, row.stack, row.name))


def _key(owner: Owner) -> tuple[Any, ...]:
    if owner.stack:
        return owner.kind, owner.stack
    return owner.kind, owner.module, owner.op


def _loose(owner: Owner) -> tuple[Any, ...]:
    """Returns a key without the line numbers of ``folder/file.py:12 function``."""
    kind, *rest = _key(owner)
    if owner.stack:
        rest = [tuple(re.sub(r":\d+(?= |$)", "", line) for line in owner.stack)]
    return (kind, *rest)


def _row(a: list[Owner], b: list[Owner]) -> Row:
    shown = max(b or a, key=lambda owner: owner.bytes)
    sums = [sum(owner.bytes for owner in side) for side in (a, b)]
    counts = [sum(owner.count for owner in side) for side in (a, b)]
    return Row(shown.kind, shown.module, shown.op, shown.stack, *sums, *counts)


def _cells(name: str, a: int, b: int) -> str:
    return f"{name:<26}{format_bytes(a):>13}{format_bytes(b):>13}{format_bytes(b - a, '+'):>13}"
