"""What the pictures of the memory ladder share."""

from typing import NamedTuple

from matplotlib.axes import Axes

INK, FAINT, LINE = "#24292f", "#6e7781", "#d0d7de"


class Unit(NamedTuple):
    """In what the chart counts bytes."""

    size: int
    name: str
    digits: int

    def format(self, size: int) -> str:
        return f"{size / self.size:,.{self.digits}f} {self.name}"


def is_torch(rung: dict) -> bool:
    return rung["optimizer"].startswith("torch.") and rung["save"] is None


def plain(axes: Axes, grid: str) -> None:
    """Takes the frame away, and draws the grid of the axes "x", "y" or "both"."""
    axes.tick_params(length=0, colors=FAINT, labelsize=8.5)
    axes.grid(axis=grid, color=LINE, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
