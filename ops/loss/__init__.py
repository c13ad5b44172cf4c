"""Losses that are fused with the layer before them, so that its output never exists.

:func:`headroom.loss.linear_cross_entropy` is also :func:`headroom.linear_cross_entropy`, and so on.
"""

from .distillation import linear_distillation_loss
from .linear_cross_entropy import linear_cross_entropy

__all__ = ["linear_cross_entropy", "linear_distillation_loss"]
