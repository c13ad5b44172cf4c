"""Helps to draw pictures: ink, axes without frames, units of bytes, files that are whole or not.

matplotlib is imported when a picture is drawn.
"""

from __future__ import annotations

import os
from typing import Any

from .atomic import replacing

INK, FAINT, LINE = "#1f2328", "#59636e", "#d8dee4"
UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


def new_figure(width: float, height: float) -> Any:
    """Returns an empty figure of a size in inches, which needs no display.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a PNG needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(width, height), dpi=120, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_png(figure: Any, path: str | os.PathLike[str]) -> None:
    """Writes a figure, the same bytes for the same figure.

    Raises:
        OSError: the file cannot be written; what was there before stays.
    """
    with replacing(path) as file, os.fdopen(os.dup(file), "wb") as stream:
        figure.savefig(stream, format="png", metadata={"Software": None})


def safe_text(text: str) -> str:
    """Returns text that is drawn as it stands: a dollar would begin mathematics."""
    return text.replace("$", r"\$")


def plain_axes(axes: Any, title: str) -> None:
    """Gives axes a title at the left and takes their frame and ticks away."""
    axes.set_title(safe_text(title), loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.tick_params(length=0, colors=FAINT, labelsize=8.5)
    axes.spines[:].set_visible(False)
    axes.set_axisbelow(True)


def byte_unit(most: float) -> tuple[int, str]:
    """Returns the bytes and the name of the unit for numbers up to ``most`` bytes."""
    return next(((size, name) for size, name in UNITS if most >= size), UNITS[-1])
