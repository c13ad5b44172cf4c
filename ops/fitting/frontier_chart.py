"""Draws the frontier of a model as one picture: the peak of a step against its time."""

from __future__ import annotations

import heapq
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from .._core import drawing

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", drawing.FAINT)  # Okabe and Ito's
MARKERS = ("o", "s", "^", "D", "v")
# Where a label may stand: the shift from its point in typographic points, and its alignment.
PLACES = (
    (7, 5, "left", "bottom"),
    (-7, -5, "right", "top"),
    (-7, 5, "right", "bottom"),
    (7, -5, "left", "top"),
    (0, 10, "center", "bottom"),
    (0, -10, "center", "top"),
    (14, 16, "left", "bottom"),
    (-14, -16, "right", "top"),
)


@dataclass(frozen=True)
class Series:
    """Ways to run a step that belong together.

    Attributes:
        name: in the legend.
        points: peak in bytes, seconds of a step, and a few words, or "" for a point without any.
        is_frontier: a budget between two points gets the time of the smaller one, which a line of
            stairs shows; else the points stand by themselves.
    """

    name: str
    points: Sequence[tuple[int, float, str]]
    is_frontier: bool = False


def draw_frontier(
    path: str | os.PathLike[str],
    title: str,
    series: Sequence[Series],
    budgets: Sequence[tuple[float, str]] = (),
) -> None:
    """Writes a PNG with the peaks of all series against their times. A label for which there is no
    room beside its point is left out. Budgets are lines at so many bytes, with their names.

    Raises:
        ValueError: no series has a point.
        ImportError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    points = [point for one in series for point in one.points]
    if not points:
        raise ValueError("there is no point to draw")
    unit, name = drawing.byte_unit(max(peak for peak, _, _ in points))
    scale, of_time = _time_unit(max(seconds for _, seconds, _ in points))
    figure = drawing.new_figure(9.5, 5.4)
    axes = figure.subplots()
    placed: list[tuple[float, float, str, str]] = []  # also marks of other series keep labels away
    for number, one in enumerate(series):
        color = COLORS[number % len(COLORS)]
        found = sorted((peak / unit, seconds * scale, text) for peak, seconds, text in one.points)
        _draw(axes, one, found, color, MARKERS[number % len(MARKERS)])
        placed += [(x, y, text, color) for x, y, text in found]
    axes.set_xlim(0, 1.06 * max(x for x, *_ in placed))
    least, most = min(y for _, y, *_ in placed), max(y for _, y, *_ in placed)
    axes.set_ylim(0 if least < most / 2 else 0.9 * least, 1.06 * most)
    axes.set_xlabel(
        f"{name} at the peak of a step: the more to the left and the lower, the better",
        color=drawing.FAINT,
        fontsize=8.5,
    )
    axes.set_ylabel(f"{of_time} of a step", color=drawing.FAINT, fontsize=8.5)
    axes.grid(color=drawing.LINE, linewidth=0.7)
    if len(series) > 1:
        axes.legend(loc="best", frameon=False, fontsize=9, labelcolor=drawing.INK)
    drawing.plain_axes(axes, title)
    top, lines = axes.get_ylim()[1], []
    for size, words in budgets:
        axes.axvline(size / unit, color=drawing.FAINT, linewidth=0.9, linestyle=(0, (4, 3)))
        axes.annotate(
            drawing.safe_text(words), (size / unit, 0), xytext=(-3, 5), textcoords="offset points",
            rotation=90, ha="right", va="bottom", fontsize=8.5, color=drawing.FAINT,
        )  # fmt: skip
        lines.append(((size / unit, 0), (size / unit, top)))
    figure.draw_without_rendering()  # settles the layout, which the labels are placed in
    label_points(figure, axes, placed, lines)
    drawing.save_png(figure, path)


def _draw(axes: Any, series: Series, points: list[Any], color: str, marker: str) -> None:
    x, y = [point[0] for point in points], [point[1] for point in points]
    if series.is_frontier:
        axes.step(x, y, where="post", color=color, linewidth=1.6, alpha=0.55, zorder=2)
    axes.scatter(
        x, y, s=34 if len(x) < 40 else 10, marker=marker, color=color, edgecolors="white",
        linewidths=0.6, zorder=3, label=drawing.safe_text(series.name),
    )  # fmt: skip


def _time_unit(most: float) -> tuple[float, str]:
    return (1.0, "seconds") if most >= 10 else (1e3, "milliseconds")


def label_points(
    figure: Any,
    axes: Any,
    points: Sequence[tuple[float, float, str, str]],
    lines: Sequence[tuple[tuple[float, float], tuple[float, float]]] = (),
) -> None:
    """Writes what stands beside points, each where it covers neither a mark nor another text; what
    finds no such place is left out. The layout of the figure must be settled.

    Args:
        points: x, y, the text or "", and its color.
        lines: from one corner to another, upright or level, which no text covers either.
    """
    from matplotlib.transforms import Bbox

    renderer = figure.canvas.get_renderer()
    marks = axes.transData.transform([(x, y) for x, y, *_ in points])
    legend = axes.get_legend()
    corners = [axes.transData.transform(line) for line in lines]
    taken = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in marks]
    taken += [Bbox([ends.min(0) - 1, ends.max(0) + 1]) for ends in corners]
    if legend is not None:
        taken.append(legend.get_window_extent(renderer))
    area = axes.get_window_extent(renderer)
    for x, y, words, color in points:
        if not words:
            continue
        for right, up, ha, va in PLACES:
            text = axes.annotate(
                drawing.safe_text(words), (x, y), xytext=(right, up), textcoords="offset points",
                ha=ha, va=va, fontsize=8.5, color=color,
            )  # fmt: skip
            box = text.get_window_extent(renderer).padded(1)
            inside = area.x0 <= box.x0 and box.x1 <= area.x1 + 8 and area.y0 <= box.y0
            if inside and box.y1 <= area.y1 and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            text.remove()


class _Trade(Protocol):
    @property
    def peak(self) -> int: ...

    @property
    def seconds(self) -> float: ...


_Point = TypeVar("_Point", bound=_Trade)


def telling(points: Sequence[_Point], most: int) -> list[_Point]:
    """Returns up to ``most`` points of a frontier, 2 or more: both ends, and in turn the point that
    is the furthest from the straight line between those already chosen beside it."""
    if len(points) <= most:
        return list(points)
    last = len(points) - 1
    chosen, heap = [0, last], [_furthest(points, 0, last)]
    while len(chosen) < most:
        _, number, left, right = heapq.heappop(heap)
        chosen.append(number)
        for ends in ((left, number), (number, right)):
            if ends[1] - ends[0] > 1:
                heapq.heappush(heap, _furthest(points, *ends))
    return [points[number] for number in sorted(chosen)]


def _furthest(points: Sequence[_Trade], left: int, right: int) -> tuple[float, int, int, int]:
    """Returns the negative distance, the number and the neighbors of the point between two others
    that is the furthest from the line through them, in a picture with the frontier as diagonal."""
    width = max(1, points[-1].peak - points[0].peak)
    height = max(1e-12, points[0].seconds - points[-1].seconds)

    def place(number: int) -> tuple[float, float]:
        point, start = points[number], points[left]
        return (point.peak - start.peak) / width, (point.seconds - start.seconds) / height

    across, up = place(right)
    length = max(1e-12, math.hypot(across, up))
    distances = [(abs(x * up - y * across) / length, n) for n in range(left + 1, right)
                 for x, y in [place(n)]]  # fmt: skip
    distance, number = max(distances)
    return -distance, number, left, right
