"""A report as one picture, for pages and papers: memory over time, or the bars of a ladder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from .._core.drawing import FAINT, INK, LINE, byte_unit, new_figure, plain_axes, safe_text, save_png
from .._core.sizes import format_bytes
from .files import Part
from .kinds import COLORS, PHASES, color_of, name_of

__all__ = ["draw"]

MOST = 6  # parts that one picture shows


def draw(parts: Sequence[Part], path: str | os.PathLike[str]) -> None:
    """Writes a PNG with the first parts below one another.

    Raises:
        ImportError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    shown = list(parts)[:MOST]
    heights = [HEIGHTS[part.kind](part.content) for part in shown]
    figure = new_figure(9.5, sum(heights))
    rows = figure.subplots(len(shown), 1, squeeze=False, height_ratios=heights)
    for part, (axes,) in zip(shown, rows):
        DRAWN[part.kind](axes, part)
    save_png(figure, path)


def _add_legend(axes: Any, reverse: bool = False) -> None:
    axes.legend(
        loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8.5,
        handlelength=1, handleheight=1, labelcolor=INK, reverse=reverse,
    )  # fmt: skip


def _recording(axes: Any, part: Part) -> None:
    content = part.content
    facts = content["summary"]
    unit, name = byte_unit(facts["peak_bytes"])
    events = list(accumulate(content["points"]))
    series = content["series"]["kind"]
    values = [[size / unit for size in accumulate(changes)] for changes in series.values()]
    if values:
        axes.stackplot(
            [*events, facts["events"]],
            *([*row, row[-1]] for row in values),
            step="post",
            colors=[color_of(kind) for kind in series],
            labels=[name_of(kind) for kind in series],
            linewidth=0,
        )
        _add_legend(axes, reverse=True)
    axes.axvline(facts["peak_event"], color=INK, linewidth=0.8, linestyle=(0, (3, 3)))
    axes.set_xlim(0, max(1, facts["events"]))
    axes.set_ylim(0, None)
    axes.grid(axis="y", color=LINE, linewidth=0.7)
    axes.set_ylabel(name, color=FAINT, fontsize=8.5)
    axes.set_xlabel("events", color=FAINT, fontsize=8.5)
    plain_axes(axes, f"{part.title}: peak {format_bytes(facts['peak_bytes'])}")


def _ladder(axes: Any, part: Part) -> None:
    rungs = part.content["summary"]["rungs"]
    unit, name = byte_unit(max(rung["peak_bytes"] for rung in rungs))
    rows = list(range(len(rungs)))
    ends = [0.0] * len(rungs)
    for kind, color in part.content["colors"].items():
        sizes = [rung["bytes"].get(kind, 0) / unit for rung in rungs]
        label = safe_text(kind)
        axes.barh(rows, sizes, left=ends, height=0.64, color=color, label=label)
        ends = [end + size for end, size in zip(ends, sizes)]
    peaks = [rung["peak_bytes"] / unit for rung in rungs]
    axes.scatter(
        peaks, rows, marker="D", s=24, color=INK, zorder=3, label=part.content["summary"]["peak"]
    )
    predicted = [(rung.get("predicted_peak_bytes"), row) for row, rung in enumerate(rungs)]
    if known := [(size / unit, row) for size, row in predicted if size is not None]:
        axes.scatter(
            *zip(*known), marker="D", s=44, facecolors="none", edgecolors=INK, zorder=3,
            label="predicted peak",
        )  # fmt: skip
    axes.set_yticks(rows, [safe_text(rung["title"]) for rung in rungs])
    axes.invert_yaxis()
    axes.set_xlabel(name, color=FAINT, fontsize=8.5)
    axes.grid(axis="x", color=LINE, linewidth=0.7)
    _add_legend(axes)
    plain_axes(axes, part.title)


def _profile(axes: Any, part: Part) -> None:
    steps = part.content["steps"]
    ends = [0.0] * len(steps)
    names = list(dict.fromkeys(phase for step in steps for phase in step["phases_us"]))
    for phase in names:
        spent = [step["phases_us"].get(phase, 0) / 1e3 for step in steps]
        color = COLORS[PHASES.get(phase, "temporaries")]
        axes.bar(range(len(steps)), spent, bottom=ends, width=0.8, color=color, label=phase)
        ends = [end + one for end, one in zip(ends, spent)]
    axes.set_ylabel("ms", color=FAINT, fontsize=8.5)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("steps", color=FAINT, fontsize=8.5)
    axes.grid(axis="y", color=LINE, linewidth=0.7)
    if names:
        _add_legend(axes, reverse=True)
    plain_axes(axes, part.title)


DRAWN = {"recording": _recording, "ladder": _ladder, "profile": _profile}
HEIGHTS = {
    "recording": lambda content: 3.4,
    "profile": lambda content: 2.8,
    "ladder": lambda content: 1.4 + 0.3 * len(content["summary"]["rungs"]),
}
