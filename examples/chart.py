"""Draws the memory ladder: the memory of each rung by kind, its loss and its speed."""

import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # writes files, needs no display
import matplotlib.pyplot as plt

# Okabe and Ito's colors, which color-blind readers can tell apart.
COLORS = {
    "parameters": "#0072B2",
    "gradients": "#56B4E9",
    "optimizer state": "#009E73",
    "saved activations": "#E69F00",
}
PER_PARAMETER = [kind for kind in COLORS if kind != "saved activations"]
INK, FAINT = "#24292f", "#6e7781"
WIDTH, ROW, TOP, BOTTOM = 12, 0.4, 1.15, 0.6  # inches
LEFT, SPLIT, NEXT, RIGHT = 0.215, 0.545, 0.635, 0.825  # edges of the two panels, in widths


def draw(results: list[dict], path: Path) -> None:
    large = max(r["peak_bytes"] for r in results) >= 2**32
    unit, name, digits = (2**30, "GiB", 1) if large else (2**20, "MiB", 0)
    height = TOP + ROW * len(results) + BOTTOM
    figure = plt.figure(figsize=(WIDTH, height), dpi=160)
    panels = figure.subplots(
        1, 2, sharey=True,
        gridspec_kw={
            "left": LEFT, "right": RIGHT, "top": 1 - TOP / height, "bottom": BOTTOM / height,
            "width_ratios": (SPLIT - LEFT, RIGHT - NEXT),
            "wspace": 2 * (NEXT - SPLIT) / (SPLIT - LEFT + RIGHT - NEXT),
        },
    )  # fmt: skip
    whole, held = panels
    rows = range(len(results))
    bars(whole, [{k: r["bytes"][k] / unit for k in COLORS} for r in results])
    peaks = [r["peak_bytes"] / unit for r in results]
    whole.scatter(peaks, rows, marker="D", s=26, color=INK, zorder=3, label="measured peak")
    sizes = [{k: r["bytes"][k] / r["model_parameters"] for k in PER_PARAMETER} for r in results]
    bars(held, sizes)

    column(whole, 1.2, "measured\npeak", [f"{peak:,.{digits}f} {name}" for peak in peaks])
    column(held, 1.21, "bytes per\nparameter", [f"{sum(row.values()):.1f}" for row in sizes])
    losses = [f"{r['held_out_bits_per_byte']:.3f}" for r in results]
    column(held, 1.55, "held-out\nbits/byte", losses)
    column(held, 1.9, "tokens\nper second", [f"{r['tokens_per_second']:,.0f}" for r in results])

    whole.set_yticks(rows, [textwrap.fill(r["title"], 28) for r in results])
    whole.set_ylim(len(results) - 0.5, -0.5)
    whole.set_xlabel(f"{name} in a step, by kind", color=FAINT, fontsize=8.5)
    held.set_xlabel("bytes per parameter, activations left out", color=FAINT, fontsize=8.5)
    for axes in panels:
        axes.tick_params(length=0, colors=FAINT, labelsize=8.5)
        axes.grid(axis="x", color="#d0d7de", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[:].set_visible(False)
    whole.tick_params(axis="y", labelcolor=INK, labelsize=10.5)
    held.tick_params(axis="y", labelleft=False)
    title = (
        "The same training, less memory: {:,.1f}M parameters, {} x {} bytes a step, {} steps, {}"
    )
    one = results[0]
    shape = (one["model_parameters"] / 1e6, one["batch"], one["context"], one["steps"])
    figure.text(
        0.012, 1 - 0.14 / height, title.format(*shape, one["device"].upper()),
        va="top", fontsize=11.5, fontweight="bold", color=INK,
    )  # fmt: skip
    figure.text(
        0.012, 0.13 / height, "A rung with + keeps\nthe changes above it.",
        va="bottom", fontsize=8.5, color=FAINT,
    )  # fmt: skip
    figure.legend(
        *whole.get_legend_handles_labels(),
        loc="upper left", bbox_to_anchor=(0.004, 1 - 0.36 / height), ncols=5, frameon=False,
        fontsize=9, handlelength=1, handleheight=1, columnspacing=1.6, labelcolor=INK,
    )  # fmt: skip
    figure.savefig(path, facecolor="white")
    plt.close(figure)


def bars(axes: plt.Axes, rows: list[dict[str, float]]) -> None:
    ends = [0.0] * len(rows)
    for kind in rows[0]:
        sizes = [row[kind] for row in rows]
        axes.barh(range(len(rows)), sizes, left=ends, height=0.62, color=COLORS[kind], label=kind)
        ends = [end + size for end, size in zip(ends, sizes)]


def column(axes: plt.Axes, x: float, head: str, texts: list[str]) -> None:
    """Right-aligned at x, in widths of the axes."""
    place = {"transform": axes.get_yaxis_transform(), "ha": "right"}
    axes.text(x, -0.6, head, color=FAINT, fontsize=8.5, va="bottom", **place)
    for row, text in enumerate(texts):
        axes.text(x, row, text, color=INK, fontsize=10, va="center", **place)
