"""Memory over time as a report shows it: a timeline of any length in a few hundred kilobytes.

Every size is counted on the whole timeline. Only then are neighboring events joined into points, of
which each shows the event with the most live bytes, so that no peak is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._core.text import quoted
from ..memory.events import KINDS, Span, Timeline
from .kinds import UNKNOWN
from .limits import SUM
from .text import Texts

__all__ = ["described"]

POINTS = 6000  # of the picture over time
CELLS = 12_000_000  # points times owners that are followed over time
OWNERS = 3000  # rows of the table
AT_A_POINT = 6  # owners that are named at a point
GROUPS = 9  # modules or lines that have a color of their own
BANDS = 1500  # phases that are shown over time


def described(
    timeline: Timeline, reserved: Sequence[int] = (), has_kinds: bool = True
) -> dict[str, Any]:
    """Returns what a report shows of a timeline, in what :mod:`json` writes. ``reserved`` is what
    the allocator holds at each event, where that is known. Without ``has_kinds``, nobody has said
    what memory is for, and all of it is "unknown".

    ``summary`` has the numbers that ``headroom report --json`` prints, ``series`` the live bytes by
    kind, by module and by line at each point, as differences from the point before, ``top`` the
    largest owners at each point, and ``owners`` who is live at the peak. ``lines`` has, for each
    point, bytes that are not live on the device: reserved by the allocator, or on the host.
    """
    columns = _Columns(timeline)
    kinds = {kind: kind if has_kinds else UNKNOWN for kind in KINDS}
    points = _points(columns)
    texts = Texts()
    rows = columns.at_peak()
    shown = [owner for owner, _, _ in rows[:OWNERS]]
    top, named = columns.top_at(points, shown)
    place = {owner: number for number, owner in enumerate([*shown, *named])}
    owners = []
    sizes = {owner: (size, count) for owner, size, count in rows}
    for owner in place:
        kind, module, op, stack = columns.keys[owner]
        size, count = sizes.get(owner, (0, 0))
        lines = texts.stack(stack)
        names = texts.optional(module), texts.optional(op)
        owners.append([list(KINDS).index(kind), *names, lines, size, count])
    rest = [[0, 0] for _ in KINDS]
    for owner, size, count in rows[OWNERS:]:
        if owner in place:
            continue  # it is listed, because a point names it
        kind = list(KINDS).index(columns.keys[owner][0])
        rest[kind][0] += size
        rest[kind][1] += count
    return {
        "summary": _summary(timeline, columns, kinds),
        "kinds": list(kinds.values()),
        "events": timeline.events,
        "peak": timeline.peak_index,
        "points": _differences(points.tolist()),
        "series": {
            "kind": {
                kinds[kind]: _differences(series.tolist())
                for kind, series in columns.kinds_at(points).items()
            },
            "module": columns.groups_at(points, [_module(key) for key in columns.keys]),
            "line": columns.groups_at(points, [_line(key) for key in columns.keys]),
        },
        "lines": _lines(timeline, reserved, points.tolist()),
        "top": [
            None if here == before else [[place[owner], size] for owner, size in here]
            for before, here in zip([None, *top], top)
        ],
        "bands": [list(span) for span in _bands(timeline)],
        "owners": owners,
        "rest": rest,
        "strings": texts.strings,
        "stacks": texts.stacks,
        "notes": [quoted(note, 400) for note in timeline.notes[:50]],
    }


def _lines(timeline: Timeline, reserved: Sequence[int], points: list[int]) -> dict[str, list[int]]:
    found = {}
    if reserved:
        found["reserved"] = _differences([reserved[point] for point in points])
    if timeline.host is not None:
        held = timeline.host.bytes_over_events()  # to the last that changes it
        found["on the host"] = _differences([held[min(p, len(held) - 1)] for p in points])
    return found


def _summary(timeline: Timeline, columns: _Columns, kinds: dict[str, str]) -> dict[str, Any]:
    span = timeline.span(timeline.peak_index)
    return {
        "device": quoted(timeline.device),
        "peak_bytes": timeline.peak_bytes,
        "peak_event": timeline.peak_index,
        "peak_phase": span.phase,
        "peak_step": span.step,
        "peak_by_kind": {
            kinds[kind]: size for kind, size in columns.kinds_of_peak().items() if size
        },
        "end_bytes": columns.last,
        "allocations": len(timeline.allocations),
        "events": timeline.events,
        **({} if timeline.host is None else {"host_peak_bytes": timeline.host.peak_bytes}),
    }


def _differences(values: list[int]) -> list[int]:
    return [b - a for a, b in zip([0, *values], values)]


def _bands(timeline: Timeline) -> list[Span]:
    """Returns the phases, without those that are too short to be seen where there are many."""
    spans = timeline.spans
    if len(spans) <= BANDS:
        return spans
    least = timeline.events / BANDS
    ends = [*(span.start for span in spans[1:]), timeline.events]
    wide = [span for span, end in zip(spans, ends) if end - span.start >= least]
    return wide[:BANDS]


def _module(key: tuple) -> str:
    """Returns the module that owns it, with one level below a list of blocks: "layers.3"."""
    if key[1] is None:
        return "no module"
    parts = key[1].split(".")
    digit = next((place for place, part in enumerate(parts) if part.isdigit()), 1)
    return quoted(".".join(parts[: digit + 1]) or "(model)", 60)


def _line(key: tuple) -> str:
    """Returns the innermost line of the user's, or else the operation."""
    return quoted(key[3][0] if key[3] else key[2] or "unknown", 80)


class _Columns:
    """The allocations of a timeline as tensors: bytes, first and last event, kind and owner."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline, self.events = timeline, timeline.events
        numbers: dict[tuple, int] = {}
        sizes, starts, ends, owners = [], [], [], []
        for a in timeline.allocations:
            key = a.kind, a.module, a.op, a.stack
            owners.append(numbers.setdefault(key, len(numbers)))
            sizes.append(a.bytes)
            starts.append(a.start)
            ends.append(self.events if a.end is None else a.end)
        if sum(sizes) > SUM:  # they are added in 64 bits
            raise ValueError("its allocations have more than 2**62 bytes")
        self.keys = list(numbers)
        self.bytes, self.start, self.end, self.owner = (
            torch.tensor(column, dtype=torch.int64) for column in (sizes, starts, ends, owners)
        )
        order = list(KINDS)
        of_owner = torch.tensor([order.index(key[0]) for key in self.keys], dtype=torch.int64)
        self.kind = of_owner[self.owner]
        change = self._change(torch.ones_like(self.kind, dtype=torch.bool))
        self.total = change.cumsum(0)[: self.events]
        self.last = int(self.total[-1])

    def _change(self, mask: Tensor) -> Tensor:
        change = torch.zeros(self.events + 1, dtype=torch.int64)
        change.index_add_(0, self.start[mask], self.bytes[mask])
        change.index_add_(0, self.end[mask], -self.bytes[mask])
        return change

    def kinds_at(self, points: Tensor) -> dict[str, Tensor]:
        """Returns the live bytes of each kind at the points. Kinds that never occur are left
        out."""
        found = {}
        for number, kind in enumerate(KINDS):
            mask = self.kind == number
            if mask.any():
                found[kind] = self._change(mask).cumsum(0)[points]
        return found

    def groups_at(self, points: Tensor, names: list[str]) -> dict[str, list[int]]:
        """Returns the live bytes at the points by a name of each owner, as differences: of the
        names with the most bytes, and of all others together."""
        numbers: dict[str, int] = {}
        of_owner = torch.tensor([numbers.setdefault(name, len(numbers)) for name in names])
        at_peak = torch.zeros(len(numbers) or 1, dtype=torch.int64)
        for owner, size, _ in self.at_peak():
            at_peak[of_owner[owner]] += size
        largest = at_peak.argsort(descending=True, stable=True)[:GROUPS].tolist()
        place = torch.full((len(at_peak),), GROUPS)
        for number, group in enumerate(largest):
            place[group] = number
        of = place[of_owner[self.owner]] if names else self.owner
        listed, found = list(numbers), {}
        for number, group in enumerate([*largest, None]):
            number = GROUPS if group is None else number
            series = self._change(of == number).cumsum(0)[points]
            if series.any():
                name = "others" if group is None else listed[group]
                found[name] = _differences(series.tolist())
        return found

    def kinds_of_peak(self) -> dict[str, int]:
        at = torch.tensor([self.timeline.peak_index])
        return {kind: int(series[0]) for kind, series in self.kinds_at(at).items()}

    def at_peak(self) -> list[tuple[int, int, int]]:
        """Returns each owner that is live at the peak, its bytes and its allocations, the largest
        first."""
        peak = self.timeline.peak_index
        live = (self.start <= peak) & (peak < self.end)
        owner = self.owner[live]
        size = torch.zeros(len(self.keys), dtype=torch.int64).index_add_(0, owner, self.bytes[live])
        count = torch.zeros_like(size).index_add_(0, owner, torch.ones_like(owner))
        order = size.argsort(descending=True, stable=True).tolist()
        sizes, counts = size.tolist(), count.tolist()
        return [(one, sizes[one], counts[one]) for one in order if counts[one]]

    def top_at(self, points: Tensor, shown: list[int]) -> tuple[list[list[tuple]], list[int]]:
        """Returns the largest owners at each point, with their bytes, and those of them that are
        not in ``shown``. Of more owners than can be followed, those with the most bytes are."""
        most = max(1, CELLS // len(points))
        weight = torch.zeros(len(self.keys), dtype=torch.int64)
        weight.index_add_(0, self.owner, self.bytes)
        followed = weight.argsort(descending=True, stable=True)[:most].sort().values
        place = torch.full((len(self.keys),), -1, dtype=torch.int64)
        place[followed] = torch.arange(len(followed))
        mask = place[self.owner] >= 0
        column, size = place[self.owner[mask]], self.bytes[mask]
        width = len(followed)
        change = torch.zeros((len(points) + 1) * width, dtype=torch.int64)
        for event, sign in ((self.start, 1), (self.end, -1)):
            row = torch.searchsorted(points, event[mask])  # the first point that sees it
            change.index_add_(0, row * width + column, sign * size)
        live = change.view(len(points) + 1, width)[:-1].cumsum_(0)
        values, places = live.topk(min(AT_A_POINT, width), dim=1)
        owners = followed[places].tolist()
        found = [
            [(owner, size) for owner, size in zip(*row) if size > 0]
            for row in zip(owners, values.tolist())
        ]
        known = set(shown)
        return found, sorted({owner for row in found for owner, _ in row} - known)


def _points(columns: _Columns) -> Tensor:
    """Returns the events that are shown: all, or of each of ``POINTS`` ranges the one with the most
    live bytes."""
    events = columns.events
    if events <= POINTS:
        return torch.arange(events)
    edges = torch.linspace(0, events, POINTS + 1, dtype=torch.float64).long().tolist()
    ranges = zip(edges, edges[1:])
    return torch.tensor([a + int(columns.total[a:b].argmax()) for a, b in ranges])
