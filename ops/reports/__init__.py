"""Pictures and tables of files that :mod:`headroom.memory`, :mod:`headroom.planning` and
:mod:`headroom.profiling` wrote: the command ``headroom report``."""

from .files import Part, read
from .write import report

__all__ = ["Part", "read", "report"]
