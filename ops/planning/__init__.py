"""Predicts the memory of a training step before it runs: :func:`headroom.plan`.

``headroom.plan`` is a function. Importing a package of that name would replace it: hence the name
of this one.
"""

from ..step.errors import PlanError
from .advice import Advice
from .api import fits, max_batch, plan
from .result import DeviceShare, Plan
from .sharding import DDP, FSDP

__all__ = [
    "DDP",
    "FSDP",
    "Advice",
    "DeviceShare",
    "Plan",
    "PlanError",
    "fits",
    "max_batch",
    "plan",
]
