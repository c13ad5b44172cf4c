"""Memory of training steps: who owns it, when, and how much at the peak.

:func:`track` measures steps while they run, :func:`assert_peak_below` and
:func:`assert_no_growth` are for tests. :mod:`headroom.memory.events` is what measuring,
planning and reporting share: allocations and :class:`Timeline`.
"""

from .._core.sizes import format_bytes, parse_bytes
from ..step.pytree import tensors_in
from .checks import assert_no_growth, assert_peak_below
from .events import KINDS, PHASES, Allocation, Owner, Span, Timeline
from .saved import saved
from .snapshots import Snapshot, load_snapshot, snapshot
from .track import Tracked, track

__all__ = [
    "Allocation",
    "KINDS",
    "Owner",
    "PHASES",
    "Snapshot",
    "Span",
    "Timeline",
    "Tracked",
    "assert_no_growth",
    "assert_peak_below",
    "format_bytes",
    "load_snapshot",
    "parse_bytes",
    "saved",
    "snapshot",
    "tensors_in",
    "track",
]
