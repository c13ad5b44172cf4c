"""Draws the memory ladder: the peak of each rung by kind, what was predicted, and the loss; and
the frontier that `headroom.fit` chooses from, its peaks against the time of a step."""

import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # writes files, needs no display
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from frontier import draw_frontier
from rungs import firsts
from style import FAINT, INK, LINE, Unit, is_torch, plain

# Okabe and Ito's colors, which color-blind readers can tell apart.
COLORS = {
    "parameters": "#0072B2",
    "master_weights": "#5B4FA2",
    "optimizer_state": "#009E73",
    "gradients": "#56B4E9",
    "activations": "#E69F00",
    "buffers": "#7A5C3E",
    "batch": "#CC79A7",
    "temporaries": "#9AA3AE",
}
LABELS = {"activations": "saved activations"}
WIDTH, ROW, TOP, TICKS, BOTTOM = 12, 0.42, 1.3, 0.38, 0.55  # inches
HEAD = 0.62  # of a part, in rows
LEFT, RIGHT = 0.26, 0.6  # edges of the bars, in widths of the figure
COLUMNS = (1.19, 1.385, 1.555, 1.74, 1.92, 2.13)  # right edges of numbers, in widths of the bars
SHARE = 2  # the bold one of them
FRONTIER, APART = 3.2, 0.85  # inches: the height of the second chart, and what is above it
EDGES = 0.06, 0.985  # of the second chart, in widths of the figure


def part(rung: dict, one: dict) -> str:
    """What a rung belongs to, given the first of the chart: another size; or whose it is, and what
    becomes of the loss."""
    if rung["size"] != one["size"]:
        return f"{trained(rung)}, on a scale of its own"
    if rung["fit"] is not None:
        most = rung["fit"]["budget_bytes"] / 2**20
        return f"headroom.fit within {most:,.1f} MiB, which chose: {rung['fit']['choice']}"
    if rung["tolerance"] is None:
        return "another training, shown without a verdict"
    if is_torch(rung):
        own_means = rung["checkpoint"] or rung["accumulate"] > 1
        return "torch, with its own means" if own_means else "torch"
    if rung["same_bits"] is not None:
        return "Headroom, the same losses to the last bit at every level"
    exact = rung["weights"] == "float32" and "8bit" not in rung["optimizer"]
    if exact and not rung["autocast"]:
        return "Headroom, the same arithmetic"
    return "Headroom, rounded to 16 and 8 bits: as close as another seed"


def trained(rung: dict) -> str:
    """The model of a rung and its batches, in words."""
    tokens = "bytes" if rung["vocab"] == 256 else f"words (vocabulary: {rung['vocab']:,})"
    return (
        f"A GPT of {rung['model_parameters'] / 1e6:,.1f}M parameters, {rung['steps']} steps of "
        f"{rung['batch']} x {rung['context']} {tokens}"
    )


def by_size(results: list[dict]) -> list[list[dict]]:
    """The rungs of each size, which are drawn in a panel, on one scale."""
    made: dict[str, list[dict]] = {}
    for result in results:
        made.setdefault(result["size"], []).append(result)
    return list(made.values())


def places(rungs: list[dict], one: dict) -> tuple[list[float], dict[float, str]]:
    """Heights of a panel's rungs, and of the headings above those that begin another part."""
    rows, heads, last, place = [], {}, None, -1.0
    for rung in rungs:
        place += 1
        if part(rung, one) != last:
            last = part(rung, one)
            place += HEAD
            heads[place - HEAD / 2 - 0.5] = last
        rows.append(place)
    return rows, heads


def draw(results: list[dict], path: Path) -> None:
    large = max(r["peak_bytes"] for r in results) >= 2**32
    unit = Unit(2**30, "GiB", 1) if large else Unit(2**20, "MiB", 0)
    panels = by_size(results)
    placed = [places(rungs, results[0]) for rungs in panels]
    heights = [ROW * (rows[-1] + 1) for rows, _ in placed]
    fitted = next((r for r in results if r["fit"] is not None), None)
    bars = TOP + sum(heights) + TICKS * (len(panels) - 1)
    whole = bars + BOTTOM + (APART + FRONTIER if fitted else 0)
    figure, top, areas = plt.figure(figsize=(WIDTH, whole), dpi=160), TOP, []
    for rungs, (rows, heads), height in zip(panels, placed, heights):
        axes = area(figure, top, height)
        draw_bars(axes, rungs, rows, unit)
        draw_numbers(axes, rungs, rows, unit)
        draw_headings(axes, heads)
        areas.append(axes)
        top += height + TICKS
    if fitted:
        same = [r for r in results if r["size"] == fitted["size"]]
        draw_frontier(area(figure, bars + APART, FRONTIER, *EDGES), fitted, same, unit)
    draw_names_of_columns(areas[0], results)
    areas[-1].set_xlabel(
        f"{unit.name} at the peak of a step, by kind: all that torch allocates",
        color=FAINT,
        fontsize=8.5,
    )
    draw_top(figure, areas, results)
    figure.savefig(path, facecolor="white")
    plt.close(figure)


def area(
    figure: Figure, top: float, height: float, left: float = LEFT, right: float = RIGHT
) -> Axes:
    """Axes of this height, this far below the top of the figure, both in inches; from `left` to
    `right` in widths of it."""
    whole = figure.get_figheight()
    return figure.add_axes((left, 1 - (top + height) / whole, right - left, height / whole))


def draw_bars(axes: Axes, rungs: list[dict], rows: list[float], unit: Unit) -> None:
    peaks = [r["peak_bytes"] / unit.size for r in rungs]
    ends = [0.0] * len(rows)
    for kind, color in COLORS.items():
        sizes = [r["bytes"][kind] / unit.size for r in rungs]
        if max(sizes) > 0.002 * max(peaks):  # else nothing of it could be seen
            label = LABELS.get(kind, kind.replace("_", " "))
            axes.barh(rows, sizes, left=ends, height=0.64, color=color, label=label)
            ends = [end + size for end, size in zip(ends, sizes)]
    host = [r["host_bytes"] / unit.size for r in rungs]
    if any(host):
        axes.barh(
            rows, host, left=ends, height=0.64, color="white", edgecolor=FAINT, hatch="////",
            linewidth=0, label="on the host",
        )  # fmt: skip
    predicted = [r["predicted_peak_bytes"] / unit.size for r in rungs]
    axes.scatter(
        predicted, rows, marker="D", s=30, color=INK, edgecolors="white", linewidths=0.8, zorder=3,
        label="predicted peak",
    )  # fmt: skip
    axes.set_yticks(rows, [textwrap.fill(r["title"], 34, break_on_hyphens=False) for r in rungs])
    axes.set_ylim(rows[-1] + 0.5, -0.5)
    axes.set_xlim(0, 1.04 * max(map(sum, zip(peaks, host))))
    plain(axes, "x")
    axes.tick_params(axis="y", labelcolor=INK, labelsize=10)


def shares(results: list[dict]) -> list[float]:
    """The peaks, each in terms of that of the first rung of its size."""
    return [r["peak_bytes"] / one["peak_bytes"] for r, one in zip(results, firsts(results))]


def draw_numbers(axes: Axes, rungs: list[dict], rows: list[float], unit: Unit) -> None:
    """The columns beside the bars."""
    columns = (
        [unit.format(r["predicted_peak_bytes"]) for r in rungs],
        [unit.format(r["peak_bytes"]) for r in rungs],
        [f"{share:.0%}" for share in shares(rungs)],
        [f"{r['bytes_per_parameter']:.1f}" for r in rungs],
        [f"{r['held_out_bits_per_byte']:.3f}" for r in rungs],
        [f"{r['tokens_per_second']:,.0f}" for r in rungs],
    )
    for k, (x, column) in enumerate(zip(COLUMNS, columns)):
        weight = "bold" if k == SHARE else "normal"
        for row, text in zip(rows, column):
            axes.text(
                x, row, text, color=INK, fontsize=10, fontweight=weight, ha="right", va="center",
                transform=axes.get_yaxis_transform(),
            )  # fmt: skip


def draw_names_of_columns(axes: Axes, results: list[dict]) -> None:
    names = [
        *("predicted\npeak", "measured\npeak", "of the\nfirst", "bytes per\nparameter"),
        *("held-out\nbits/byte", "tokens\nper second"),
    ]
    if all(map(is_torch, firsts(results))):
        names[SHARE] = "of torch\nalone"
    for x, name in zip(COLUMNS, names):
        axes.text(
            x, -0.75, name, color=FAINT, fontsize=8.5, ha="right", va="bottom",
            transform=axes.get_yaxis_transform(),
        )  # fmt: skip


def draw_headings(axes: Axes, heads: dict[float, str]) -> None:
    """The names of the parts, each under a line."""
    start, transform = (0.012 - LEFT) / (RIGHT - LEFT), axes.get_yaxis_transform()
    for row, head in heads.items():
        axes.text(
            start, row, head, color=FAINT, fontsize=9, style="italic", va="center",
            transform=transform, bbox={"facecolor": "white", "linewidth": 0, "pad": 1},
        )  # fmt: skip
        axes.plot((start, COLUMNS[-1]), (row - 0.31,) * 2, color=LINE, linewidth=0.7,
                  transform=transform, clip_on=False)  # fmt: skip


def draw_top(figure: Figure, areas: list[Axes], results: list[dict]) -> None:
    """The title, what is trained, and the legend."""
    height, one = figure.get_figheight(), results[0]
    title = f"The same model, data and steps in {min(shares(results)):.0%} of the memory"
    figure.text(
        0.012, 1 - 0.14 / height, title, va="top", fontsize=13, fontweight="bold", color=INK
    )
    how = "A rung with + keeps the changes above it."
    figure.text(
        0.012, 1 - 0.42 / height, f"{trained(one)}, {one['device'].upper()}. {how}",
        va="top", fontsize=9.5, color=FAINT,
    )  # fmt: skip
    shown = {}
    for axes in areas:
        handles, labels = axes.get_legend_handles_labels()
        shown = dict(zip(labels, handles)) | shown
    figure.legend(
        shown.values(), shown,
        loc="upper left", bbox_to_anchor=(0.004, 1 - 0.6 / height), ncols=9, frameon=False,
        fontsize=9, handlelength=1, handleheight=1, columnspacing=1.6, labelcolor=INK,
    )  # fmt: skip
