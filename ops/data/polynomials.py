"""Foretells the plans of batches of many sizes from a few: while a step makes the same allocations,
the bytes of each are a polynomial of the sizes of the batch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..memory.events import Timeline
from ..planning import Plan
from ..planning.device import device_share
from ..planning.masks import hidden_by
from ..step.trees import mapped, tensors_in

__all__ = ["TOLERANCE", "Form", "Peaks", "Polynomials"]

# The monomials: in each size up to its square, which attention has, and of degree 3 in all, for
# squares of the length in each of many rows.
DEGREE, TOTAL_DEGREE = 2, 3
CHECKS = 2  # plans of sizes drawn at random, and one of the largest
TOLERANCE = 1e-3  # of what was foretold, as a fraction of the plan

Point = tuple[int, ...]
"""The sizes that differ between the batches of a form."""


class Form:
    """Batches that differ in nothing but sizes.

    Attributes:
        key: what the batches of a form have in common.
        batches: a batch of each size, by all its sizes.
    """

    def __init__(self, batch: Any) -> None:
        named = list(_named(batch))
        dtypes = tuple((name, x.dtype, x.dim()) for name, x in named)
        self.key: Hashable = (dtypes, hidden_by(batch))
        self.batches: dict[tuple[int, ...], Any] = {}
        self._names = [f"{name}[{d}]" for name, x in named for d in range(x.dim())]
        self._columns: list[int] | None = None

    def add(self, batch: Any) -> tuple[int, ...]:
        """Adds a batch, unless there is one of its sizes, and returns these."""
        sizes = sizes_of(batch)
        if sizes not in self.batches:
            # A copy: a batch of a worker holds files of shared memory open.
            copies: dict[int, Tensor] = {}
            self.batches[sizes] = mapped(batch, lambda x: copies.setdefault(id(x), x.clone()))
        return sizes

    @property
    def columns(self) -> list[int]:
        """Returns the sizes that differ between batches, but for those that another one tells."""
        if self._columns is None:
            rows = list(self.batches)
            self._columns = []
            for column in range(len(self._names)):
                if not any(_tells(rows, other, column) for other in (None, *self._columns)):
                    self._columns.append(column)
        return self._columns

    def point(self, sizes: tuple[int, ...]) -> Point:
        """Returns those of all sizes that differ between batches."""
        return tuple(sizes[column] for column in self.columns)

    def has(self, sizes: tuple[int, ...]) -> bool:
        """Returns whether sizes go together as they do in the batches."""
        rows = [*self.batches, sizes]
        return all(
            column in self.columns or any(_tells(rows, o, column) for o in (None, *self.columns))
            for column in range(len(self._names))
        )

    def named(self, sizes: tuple[int, ...]) -> dict[str, int]:
        """Returns the sizes that differ, by tensor and dimension."""
        return {self._names[column]: sizes[column] for column in self.columns}


def sizes_of(batch: Any) -> tuple[int, ...]:
    """Returns all sizes of all tensors of a batch."""
    return tuple(size for _, x in _named(batch) for size in x.shape)


def _named(batch: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(batch, Mapping):
        items = [(str(key), value) for key, value in batch.items()]
    elif isinstance(batch, (tuple, list)):
        items = [(f"batch[{number}]", value) for number, value in enumerate(batch)]
    else:
        items = [("batch", batch)]
    for name, value in items:
        found = [*tensors_in(value)]
        for number, x in enumerate(found):
            yield (f"{name}.{number}" if len(found) > 1 else name), x


def _tells(rows: Sequence[tuple[int, ...]], given: int | None, column: int) -> bool:
    """Returns whether a size is a linear function of a given one in all rows; of None: the same."""
    y = rows[0][column]
    if given is None:
        return all(row[column] == y for row in rows)
    x = rows[0][given]
    other = next((row for row in rows if row[given] != x), None)
    if other is None:
        return False
    dx, dy = other[given] - x, other[column] - y
    return all((row[column] - y) * dx == (row[given] - x) * dy for row in rows)


@dataclass(frozen=True)
class Peaks:
    """The peaks of a step.

    Attributes:
        first: the peak of tensors in the first step.
        steady: that in later steps.
        share: what the device holds besides.
    """

    first: int
    steady: int
    share: int

    @property
    def total(self) -> int:
        return self.steady + self.share


def _peaks_of(plan: Plan) -> Peaks:
    return Peaks(plan.first_step, plan.steady, plan.device_share.bytes)


class Polynomials:
    """The peaks of all batches of a form.

    Args:
        form: whose batches they are.
        plan: makes the plan of a batch.
        covered: is called with the number of batches whose peaks are known now.

    Attributes:
        peaks: by the sizes that differ.
        error: the largest difference that a check found, as a fraction of the plan.
    """

    def __init__(
        self, form: Form, plan: Callable[[Any], Plan], covered: Callable[[int], Any]
    ) -> None:
        self._plan, self._covered = plan, covered
        self._batches = {form.point(sizes): batch for sizes, batch in form.batches.items()}
        self._plans: dict[Point, Plan] = {}
        self._regions: list[_Region] = []
        self._draws = random.Random(0)
        self.peaks: dict[Point, Peaks] = {}
        self.error = 0.0
        self._cover(sorted(self._batches))

    @property
    def plans(self) -> int:
        """Returns how many plans were made."""
        return len(self._plans)

    def between(self, point: Point) -> Peaks | None:
        """Returns what a batch takes that is none of the form's; None where nothing is known."""
        region = next((region for region in self._regions if region.has(point)), None)
        return None if region is None else region.peaks(point)

    def _cover(self, points: Sequence[Point]) -> None:
        """Finds the peaks of these batches."""
        region = self._region(points)
        if region is not None:
            self._regions.append(region)
            for point in points:
                known = self._plans.get(point)
                self.peaks[point] = _peaks_of(known) if known else region.peaks(point)
            self._covered(len(points))
        elif len(points) <= 2:
            self.peaks |= {point: _peaks_of(self._planned(point)) for point in points}
            self._covered(len(points))
        else:
            for half in _halves(points):
                self._cover(half)

    def _region(self, points: Sequence[Point]) -> _Region | None:
        """Returns polynomials that hold for these batches, or None if none do."""
        terms = _Terms(points)
        anchors = terms.anchors(points)
        if len(points) <= len(anchors):
            anchors = list(points)
        timelines = [self._planned(point).timeline for point in anchors]
        if len({_structure(timeline) for timeline in timelines}) > 1:
            return None
        region = _Region(terms, anchors, timelines)
        others = [point for point in points if point not in set(anchors)]
        checks = self._draws.sample(others, min(CHECKS, len(others)))
        checks += sorted(others, key=lambda point: region.peaks(point).steady)[-1:]
        worst = 0.0
        for point in [*anchors, *checks]:
            truth, found = _peaks_of(self._planned(point)), region.peaks(point)
            for name in ("first", "steady", "total"):
                worst = max(worst, abs(getattr(found, name) / getattr(truth, name) - 1))
        if worst > TOLERANCE:
            return None
        self.error = max(self.error, worst)
        return region

    def _planned(self, point: Point) -> Plan:
        if point not in self._plans:
            self._plans[point] = self._plan(self._batches[point])
        return self._plans[point]


def _structure(timeline: Timeline) -> int:
    """Returns a number that is the same for steps with the same allocations but for their bytes."""
    return hash(
        (
            tuple((a.start, a.end, a.kind, a.op) for a in timeline.allocations),
            tuple(timeline.spans),
        )
    )


def _halves(points: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    """Returns points divided along the size that differs the most, relative to its largest."""
    axes = list(zip(*points))
    axis = max(range(len(axes)), key=lambda at: 1 - min(axes[at]) / max(1, max(axes[at])))
    ordered = sorted(points, key=lambda point: (point[axis], point))
    return ordered[: len(ordered) // 2], ordered[len(ordered) // 2 :]


class _Terms:
    """The monomials of sizes, which are taken from the middle of some points to both sides."""

    def __init__(self, points: Sequence[Point]) -> None:
        axes = list(zip(*points))
        self._middle = torch.tensor([(min(x) + max(x)) / 2 for x in axes], dtype=torch.float64)
        self._half = torch.tensor([max(1, max(x) - min(x)) / 2 for x in axes], dtype=torch.float64)
        self._exponents = [
            powers
            for powers in itertools.product(range(DEGREE + 1), repeat=len(axes))
            if sum(powers) <= TOTAL_DEGREE
        ]

    def rows(self, points: Sequence[Point]) -> Tensor:
        """Returns the monomials of points, [points, monomials] in float64."""
        x = torch.tensor(points, dtype=torch.float64).reshape(len(points), -1)
        x = (x - self._middle) / self._half
        powers = torch.tensor(self._exponents, dtype=torch.float64).reshape(
            len(self._exponents), -1
        )
        return (x[:, None, :] ** powers).prod(-1)

    def anchors(self, points: Sequence[Point]) -> list[Point]:
        """Returns as many points as there are monomials, which are spread over all: each is the one
        whose monomials are the furthest from the span of those before. Fewer where these span the
        monomials of all points."""
        rest, found = self.rows(points), []
        while len(found) < len(self._exponents):
            lengths = rest.norm(dim=1)
            at = int(lengths.argmax())
            if lengths[at] < 1e-9:
                break
            found.append(points[at])
            direction = rest[at] / lengths[at]
            rest = rest - (rest @ direction)[:, None] * direction
        return found


class _Region:
    """The allocations of a step as polynomials of the sizes of its batch, within their bounds."""

    def __init__(
        self, terms: _Terms, points: Sequence[Point], timelines: Sequence[Timeline]
    ) -> None:
        self._terms, self._timeline = terms, timelines[0]
        self._low = [min(x) for x in zip(*points)]
        self._high = [max(x) for x in zip(*points)]
        sizes = [[a.bytes for a in timeline.allocations] for timeline in timelines]
        rows = terms.rows(points)
        self._rows = rows
        self._factors = torch.linalg.lstsq(
            rows, torch.tensor(sizes, dtype=torch.float64), driver="gelsd"
        ).solution
        given = self._timeline
        ends = [given.events if a.end is None else a.end for a in given.allocations]
        self._starts = torch.tensor([a.start for a in given.allocations])
        self._ends = torch.tensor(ends)
        last = max(span.step for span in given.spans)
        self._later = min(span.start for span in given.spans if span.step == last)

    def has(self, point: Point) -> bool:
        """Returns whether the plans determine what a batch of these sizes takes."""
        if not all(a <= x <= b for a, x, b in zip(self._low, point, self._high)):
            return False
        row = self._terms.rows([point]).T
        told = self._rows.T @ torch.linalg.lstsq(self._rows.T, row, driver="gelsd").solution
        return bool((told - row).norm() < 1e-6)

    def peaks(self, point: Point) -> Peaks:
        """Returns what a step takes with a batch of these sizes."""
        sizes = (self._terms.rows([point]) @ self._factors)[0].round().to(torch.int64)
        change = torch.zeros(self._timeline.events + 1, dtype=torch.int64)
        change.index_add_(0, self._starts, sizes).index_add_(0, self._ends, -sizes)
        live = change[:-1].cumsum(0)
        first = int(live[: self._later].max()) if self._later else 0
        return Peaks(first, int(live[self._later :].max()), self._share(sizes))

    def _share(self, sizes: Tensor) -> int:
        """Returns what the device holds besides."""
        given = self._timeline
        if given.device != "cuda":
            return 0
        made = [replace(a, bytes=b) for a, b in zip(given.allocations, sizes.tolist())]
        return device_share(
            Timeline(made, given.spans, given.device, workspaces=given.workspaces)
        ).bytes
