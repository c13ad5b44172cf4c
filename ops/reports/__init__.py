"""Pictures and tables of what :mod:`headroom.memory` and :mod:`headroom.planning` wrote, and their
differences."""

from .diff import Diff, diff

__all__ = ["Diff", "diff"]
