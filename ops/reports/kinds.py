"""Names and colors of the kinds of memory in pictures, the same everywhere."""

from __future__ import annotations

from ..memory.events import KINDS

__all__ = ["COLORS", "LADDER", "UNKNOWN", "color_of"]

# Okabe and Ito's colors, which color-blind readers can tell apart, and two shades of them.
COLORS = {
    "parameters": "#0072B2",
    "master_weights": "#5B4FA2",
    "optimizer_state": "#009E73",
    "gradients": "#56B4E9",
    "buffers": "#7A5C3E",
    "batch": "#CC79A7",
    "activations": "#E69F00",
    "communication": "#D55E00",
    "workspaces": "#F0E442",
    "temporaries": "#9AA3AE",
}
assert COLORS.keys() == KINDS.keys()

UNKNOWN = "unknown"
"""The kind of all allocations of a snapshot that does not say what memory is for."""

LADDER = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer state": "optimizer_state",
    "saved activations": "activations",
}
"""The kinds that the memory ladder counts, by what they are called there."""


def color_of(kind: str) -> str:
    """Returns the color of a kind, also of one of the ladder, as ``#rrggbb``."""
    return COLORS.get(LADDER.get(kind, kind), COLORS["temporaries"])
