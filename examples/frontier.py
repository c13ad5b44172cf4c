"""Draws peaks against the time of a step: what `headroom.fit` can choose, and measured rungs."""

from headroom.fitting.frontier_chart import label_points
from matplotlib.axes import Axes

from style import FAINT, INK, Unit, is_torch, plain

OWN, OTHER = "#D55E00", "#6e7781"  # colors of Headroom and of torch
STAIRS = "what headroom.fit can choose, predicted"
ROOM = 1.12  # from zero to the edges, in terms of the largest that is measured


def draw_frontier(axes: Axes, fitted: dict, rungs: list[dict], unit: Unit) -> None:
    """Draws the rungs of one size. Choices that are slower than all of them, or take more, are
    beyond the edges."""
    found, budget = fitted["fit"], fitted["fit"]["budget_bytes"] / unit.size
    points = [(peak / unit.size, 1e3 * seconds) for peak, seconds, _ in found["frontier"]]
    axes.step(*zip(*points), where="post", color=OWN, linewidth=1.4, alpha=0.6, label=STAIRS)
    axes.axvline(budget, color=INK, linewidth=1, linestyle=(0, (4, 3)), label="its budget")
    marks = [(r["peak_bytes"] / unit.size, 1e3 * r["step_seconds"]) for r in rungs]
    colors = [OTHER if is_torch(rung) else OWN for rung in rungs]
    for whose, color, marker in (("Headroom", OWN, "o"), ("torch", OTHER, "s")):
        shown = [mark for mark, own in zip(marks, colors) if own == color]
        if shown:
            axes.scatter(
                *zip(*shown), s=34, color=color, marker=marker, edgecolors="white",
                linewidths=0.7, zorder=3, label=f"rungs of {whose}, measured",
            )  # fmt: skip
    right, top = (ROOM * max(values) for values in zip(*marks))
    least = min(y for _, y in [*marks, *points])
    bottom = 0.9 * least if least > top / 2 else 0
    axes.set_xlim(0, right)
    axes.set_ylim(bottom, top)
    axes.set_xlabel(
        f"{unit.name} at the peak of a step: the more to the left and the lower, the better",
        color=FAINT,
        fontsize=8.5,
    )
    axes.set_ylabel("milliseconds of a step", color=FAINT, fontsize=8.5)
    plain(axes, "both")
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.012, 1), ncols=4, frameon=False, fontsize=9,
        labelcolor=INK, handlelength=1.6,
    )  # fmt: skip
    axes.figure.draw_without_rendering()  # settles the places of the labels
    named = [(*mark, r["key"], color) for mark, r, color in zip(marks, rungs, colors)]
    label_points(axes.figure, axes, named, [*stairs(points), ((budget, bottom), (budget, top))])


def stairs(points: list[tuple[float, float]]) -> list[tuple]:
    """The lines of the frontier, each from one end to the other."""
    corners = [(right, y) for (_, y), (right, _) in zip(points, points[1:])]
    return [*zip(points, corners), *zip(corners, points[1:])]
