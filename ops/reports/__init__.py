"""Pictures and tables of files that :mod:`headroom.memory`, :mod:`headroom.planning` and
:mod:`headroom.profiling` wrote, and their differences."""

from .diff import Diff, diff
from .files import Part, read
from .write import report

__all__ = ["Diff", "Part", "diff", "read", "report"]
