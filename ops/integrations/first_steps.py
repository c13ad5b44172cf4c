"""Tells what the first steps of a training took, beside what was predicted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .._core.sizes import format_bytes
from ..fitting import Fitted
from ..memory.first_steps import FirstSteps
from ..planning.device import context_bytes

__all__ = ["ToldSteps"]


class ToldSteps(FirstSteps):
    """Measures the peak of the first two steps of a training and the time of the third, and tells
    it then, or when :meth:`end` is called.

    Args:
        model, optimizer, device, records: as in :class:`headroom.memory.first_steps.FirstSteps`.
        fitted: what predicted them.
        extra: bytes that the loop itself holds besides.
        batches: of a step, for each that was planned.
        tell: is called with what was found, as text.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        device: torch.device,
        fitted: Fitted,
        extra: int,
        batches: float,
        tell: Callable[[str], Any],
        *,
        records: bool = True,
    ) -> None:
        context = context_bytes(device)
        super().__init__(model, optimizer, device, context=context, records=records)
        seconds = fitted.predicted_seconds
        self._predicted_peak = (fitted.predicted_peak or 0) + extra
        self._predicted_seconds = None if seconds is None else seconds * batches
        self._tell, self.has_ended = tell, False

    def step_began(self, batch: Any = None) -> None:
        """Notes that a step begins, as long as there is something to measure."""
        if not self.has_ended:
            super().step_began(batch)

    def step_ended(self) -> None:
        """Notes that an optimizer step has ended, and tells after the third what was measured."""
        super().step_ended()
        if self.seconds is not None:
            self.end()

    def end(self) -> None:
        """Tells what was measured, once."""
        self.pause()
        if self.has_ended or (self.peak is None and self.seconds is None):
            return
        self.has_ended = True
        parts = []
        if self.peak is not None:
            predicted = format_bytes(self._predicted_peak)
            parts.append(f"measured peak {format_bytes(self.peak)}, predicted {predicted}")
        if self.seconds is not None:
            seconds = self._predicted_seconds
            predicted = "" if seconds is None else f", predicted {seconds * 1e3:.1f} ms"
            parts.append(f"measured step {self.seconds * 1e3:.1f} ms{predicted}")
        self._tell(f"headroom.fit: {'; '.join(parts)}")
