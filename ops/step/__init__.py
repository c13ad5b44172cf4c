"""What a training step is, written once: its loss, its passes, and what lies around them.

Planning runs such a step on fakes, fitting measures it, and the loops of other libraries call it.
"""

from .errors import PlanError

__all__ = ["PlanError"]
