"""Draws the memory ladder: the peak of each rung by kind, what was predicted, and the loss."""

import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # writes files, needs no display
import matplotlib.pyplot as plt

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
INK, FAINT = "#24292f", "#6e7781"
WIDTH, ROW, HEAD, TOP, BOTTOM = 12, 0.42, 0.62, 1.3, 0.55  # inches; HEAD: of a part, in rows
LEFT, RIGHT = 0.26, 0.6  # edges of the bars, in widths of the figure
COLUMNS = (1.19, 1.385, 1.555, 1.74, 1.92, 2.13)  # right edges of numbers, in widths of the bars


def part(rung: dict) -> str:
    """What a rung belongs to: whose it is, and what becomes of the loss."""
    if rung["tolerance"] is None:
        return "another training, shown without a verdict"
    if rung["optimizer"].startswith("torch."):
        own_means = rung["checkpoint"] or rung["accumulate"] > 1
        return "torch, with its own means" if own_means else "torch"
    if rung["same_bits"] is not None:
        return "Headroom, the same losses to the last bit at every level"
    exact = rung["weights"] == "float32" and "8bit" not in rung["optimizer"]
    if exact and not rung["autocast"]:
        return "Headroom, the same arithmetic"
    return "Headroom, rounded to 16 and 8 bits: as close as another seed"


def places(results: list[dict]) -> tuple[list[float], dict[float, str]]:
    """Heights of the rungs, and of the headings above those that begin another part."""
    rows, heads, last, place = [], {}, None, -1.0
    for result in results:
        place += 1
        if part(result) != last:
            last = part(result)
            place += HEAD
            heads[place - HEAD / 2 - 0.5] = last
        rows.append(place)
    return rows, heads


def draw(results: list[dict], path: Path) -> None:
    one = results[0]
    large = max(r["peak_bytes"] for r in results) >= 2**32
    unit, name, digits = (2**30, "GiB", 1) if large else (2**20, "MiB", 0)
    rows, heads = places(results)
    height = TOP + ROW * (rows[-1] + 1) + BOTTOM
    figure = plt.figure(figsize=(WIDTH, height), dpi=160)
    axes = figure.add_axes((LEFT, BOTTOM / height, RIGHT - LEFT, 1 - (TOP + BOTTOM) / height))

    peaks = [r["peak_bytes"] / unit for r in results]
    ends = [0.0] * len(rows)
    for kind, color in COLORS.items():
        sizes = [r["bytes"][kind] / unit for r in results]
        if max(sizes) > 0.002 * max(peaks):  # else nothing of it could be seen
            label = LABELS.get(kind, kind.replace("_", " "))
            axes.barh(rows, sizes, left=ends, height=0.64, color=color, label=label)
            ends = [end + size for end, size in zip(ends, sizes)]
    predicted = [r["predicted_peak_bytes"] / unit for r in results]
    axes.scatter(
        predicted, rows, marker="D", s=30, color=INK, edgecolors="white", linewidths=0.8, zorder=3,
        label="predicted peak",
    )  # fmt: skip

    shares = [r["peak_bytes"] / one["peak_bytes"] for r in results]
    texts = {
        "predicted\npeak": [f"{peak:,.{digits}f} {name}" for peak in predicted],
        "measured\npeak": [f"{peak:,.{digits}f} {name}" for peak in peaks],
        "of torch\nalone" if part(one) == "torch" else "of the\nfirst": [
            f"{share:.0%}" for share in shares
        ],
        "bytes per\nparameter": [f"{r['bytes_per_parameter']:.1f}" for r in results],
        "held-out\nbits/byte": [f"{r['held_out_bits_per_byte']:.3f}" for r in results],
        "tokens\nper second": [f"{r['tokens_per_second']:,.0f}" for r in results],
    }
    place = {"transform": axes.get_yaxis_transform(), "va": "center"}
    for x, (head, column) in zip(COLUMNS, texts.items()):
        axes.text(x, -0.75, head, color=FAINT, fontsize=8.5, **place | {"va": "bottom"}, ha="right")
        weight = "bold" if head.startswith("of ") else "normal"
        for row, text in zip(rows, column):
            axes.text(x, row, text, color=INK, fontsize=10, fontweight=weight, ha="right", **place)
    for row, head in heads.items():
        start = (0.012 - LEFT) / (RIGHT - LEFT)
        axes.text(start, row, head, color=FAINT, fontsize=9, style="italic", **place)
        axes.plot((start, COLUMNS[-1]), (row - 0.31,) * 2, color="#d0d7de", linewidth=0.7,
                  transform=place["transform"], clip_on=False)  # fmt: skip

    axes.set_yticks(rows, [textwrap.fill(r["title"], 34, break_on_hyphens=False) for r in results])
    axes.set_ylim(rows[-1] + 0.5, -0.5)
    axes.set_xlim(0, 1.04 * max(peaks))
    axes.set_xlabel(
        f"{name} at the peak of a step, by kind: all that torch allocates",
        color=FAINT,
        fontsize=8.5,
    )
    axes.tick_params(length=0, colors=FAINT, labelsize=8.5)
    axes.tick_params(axis="y", labelcolor=INK, labelsize=10)
    axes.grid(axis="x", color="#d0d7de", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)

    title = f"The same model, data and steps in {min(shares):.0%} of the memory"
    figure.text(
        0.012, 1 - 0.14 / height, title, va="top", fontsize=13, fontweight="bold", color=INK
    )
    model = f"A GPT of {one['model_parameters'] / 1e6:,.1f}M parameters"
    steps = f"{one['steps']} steps of {one['batch']} x {one['context']} bytes"
    figure.text(
        0.012, 1 - 0.42 / height,
        f"{model}, {steps}, {one['device'].upper()}. A rung with + keeps the changes above it.",
        va="top", fontsize=9.5, color=FAINT,
    )  # fmt: skip
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="upper left", bbox_to_anchor=(0.004, 1 - 0.6 / height), ncols=9, frameon=False,
        fontsize=9, handlelength=1, handleheight=1, columnspacing=1.6, labelcolor=INK,
    )  # fmt: skip
    figure.savefig(path, facecolor="white")
    plt.close(figure)
