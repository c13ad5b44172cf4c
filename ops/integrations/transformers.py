"""Adapts transformers' Trainer: fits it to a budget, with the loss that makes no logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.lazy import lazy
from .trainer_loss import fuse_loss, loss_function

if TYPE_CHECKING:
    from .trainer_fit import HeadroomCallback, fit_trainer
else:  # which imports transformers
    __getattr__, __dir__ = lazy(__name__, {"..trainer_fit": ("HeadroomCallback", "fit_trainer")})

__all__ = ["HeadroomCallback", "fit_trainer", "fuse_loss", "loss_function"]
