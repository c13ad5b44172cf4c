"""What is trained: the model, a batch and how its loss is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..step.loss import autocast, loss_of

__all__ = ["Setting"]


@dataclass(frozen=True)
class Setting:
    """A model and a batch, with what computes the loss.

    Attributes:
        model: the user's own, which measuring leaves as it is.
        batch: a real batch on ``device``.
        loss, forward: as in :func:`headroom.plan`.
        device: where steps run.
        amp: the dtype of autocast, or None.
        scaler: whether losses are scaled.
        fused_loss: whether a language model of transformers computes its loss without logits.
        has_levels: whether blocks can be set to levels.
    """

    model: nn.Module
    batch: Any
    loss: Callable[..., Tensor] | None = None
    forward: Callable[[nn.Module, Any], Tensor] | None = None
    device: torch.device = torch.device("cpu")
    amp: torch.dtype | None = None
    scaler: bool = False
    fused_loss: bool = False
    has_levels: bool = True

    def run(self, model: nn.Module, batch: Any, *, trains: bool = True) -> Tensor:
        """Returns the loss of a batch, which must require a gradient if ``trains``."""
        with autocast(self.device.type, self.amp):
            return loss_of(model, batch, self.loss, self.forward, trains=trains)

    def but(self, **changes: Any) -> Setting:
        """Returns the setting with some fields replaced."""
        return replace(self, **changes)
