"""Describes and runs a training step: its loss, its passes, and what is heard of it while it runs.

Planning runs such a step on fakes, fitting measures it, and the loops of other libraries call it.
"""

from .errors import PlanError

__all__ = ["PlanError"]
