"""Losses that are fused with the layer before them, so that its output never exists.

:func:`headroom.loss.linear_cross_entropy` is also :func:`headroom.linear_cross_entropy`.
"""

from __future__ import annotations

from .distillation import linear_distillation_loss
from .language_model import language_model_loss
from .linear_cross_entropy import linear_cross_entropy
from .log_prob import linear_log_prob

__all__ = [
    "language_model_loss",
    "linear_cross_entropy",
    "linear_distillation_loss",
    "linear_log_prob",
]
