"""Shows where the time of steps goes: ``torch.profiler`` with our ranges, counts and tables.

:func:`headroom.profile` records; :class:`ProfileResult` is what it finds, and
:mod:`headroom.profiling.result` says what the file of it holds.
"""

from .rates import PUBLISHED, PeakRate
from .recorder import Profile, profile
from .result import Figures, ModuleRow, OpRow, ProfileResult, StepRow

__all__ = [
    "PUBLISHED",
    "Figures",
    "ModuleRow",
    "OpRow",
    "PeakRate",
    "Profile",
    "ProfileResult",
    "StepRow",
    "profile",
]
