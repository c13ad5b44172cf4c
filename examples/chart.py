"""The ladder as a picture: where each rung's memory goes, and what it reaches."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # writes files, needs no display
import matplotlib.pyplot as plt

# Okabe and Ito's colours, told apart by colour-blind readers too.
COLORS = {
    "parameters": "#0072B2",
    "gradients": "#56B4E9",
    "optimizer state": "#009E73",
    "saved activations": "#E69F00",
}
INK, FAINT = "#24292f", "#6e7781"
WIDTH, ROW, TOP, BOTTOM = 10, 0.5, 1.15, 0.6  # inches
COLUMNS = (
    (1.23, "measured\npeak"),
    (1.47, "held-out\nbits per byte"),
    (1.70, "tokens\nper second"),
)


def draw(results: list[dict], path: Path) -> None:
    large = max(r["peak_bytes"] for r in results) >= 2**32
    unit, name, digits = (2**30, "GiB", 1) if large else (2**20, "MiB", 0)
    height = TOP + ROW * len(results) + BOTTOM
    figure, axes = plt.subplots(figsize=(WIDTH, height), dpi=160)
    figure.subplots_adjust(left=0.2, right=0.66, top=1 - TOP / height, bottom=BOTTOM / height)
    rows = range(len(results))
    ends = [0.0] * len(results)
    for kind, color in COLORS.items():
        sizes = [r["bytes"][kind] / unit for r in results]
        axes.barh(rows, sizes, left=ends, height=0.62, color=color, label=kind)
        ends = [end + size for end, size in zip(ends, sizes)]
    peaks = [r["peak_bytes"] / unit for r in results]
    axes.scatter(peaks, rows, marker="D", s=32, color=INK, zorder=3, label="measured peak")

    # x in widths of the axes, y in rows
    right = {"transform": axes.get_yaxis_transform(), "ha": "right"}
    for x, head in COLUMNS:
        axes.text(x, -0.6, head, color=FAINT, fontsize=8.5, va="bottom", **right)
    for row, result in enumerate(results):
        texts = (
            f"{peaks[row]:,.{digits}f} {name}",
            f"{result['held_out_bits_per_byte']:.4f}",
            f"{result['tokens_per_second']:,.0f}",
        )
        for (x, _), text in zip(COLUMNS, texts):
            axes.text(x, row, text, color=INK, fontsize=10, va="center", **right)

    axes.set_yticks(rows, [r["title"] for r in results], fontsize=10.5)
    axes.set_ylim(len(results) - 0.5, -0.5)
    axes.set_xlim(0, 1.04 * max(peaks + ends))
    note = f"{name}; bars are counted by kind; a rung with + keeps the changes above it"
    axes.set_xlabel(note, color=FAINT, fontsize=8.5)
    axes.tick_params(length=0, colors=FAINT, labelsize=8.5)
    axes.tick_params(axis="y", labelcolor=INK, labelsize=10.5)
    axes.grid(axis="x", color="#d0d7de", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    title = (
        "The same training, less memory: {:,.1f}M parameters, {} x {} bytes a step, {} steps, {}"
    )
    one = results[0]
    shape = (one["model_parameters"] / 1e6, one["batch"], one["context"], one["steps"])
    figure.text(
        0.012, 1 - 0.14 / height, title.format(*shape, one["device"].upper()),
        va="top", fontsize=11.5, fontweight="bold", color=INK,
    )  # fmt: skip
    figure.legend(
        loc="upper left", bbox_to_anchor=(0.004, 1 - 0.36 / height), ncols=5, frameon=False,
        fontsize=9, handlelength=1, handleheight=1, columnspacing=1.6, labelcolor=INK,
    )  # fmt: skip
    figure.savefig(path, facecolor="white")
    plt.close(figure)
