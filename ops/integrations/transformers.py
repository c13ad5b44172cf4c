"""Adapts transformers: its Trainer, to optimizers by name, to a budget and to the loss that makes
no logits, and its attention, to sequences that are packed into rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.lazy import lazy
from ..patching.attention import register_attention
from .trainer_loss import fuse_loss, loss_function
from .trainer_optimizers import register

if TYPE_CHECKING:
    from .trainer_fit import HeadroomCallback, fit_trainer
else:  # which imports transformers
    __getattr__, __dir__ = lazy(__name__, {"..trainer_fit": ("HeadroomCallback", "fit_trainer")})

__all__ = [
    "HeadroomCallback",
    "fit_trainer",
    "fuse_loss",
    "loss_function",
    "register",
    "register_attention",
]
