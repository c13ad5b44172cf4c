"""A training step of micro-batches, which can be measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..memory import track
from ..step.run import Total, passes, update
from .setting import Setting
from .shares import SAMPLES, shares

__all__ = ["Loop"]


@dataclass
class Loop:
    """What a step needs.

    Attributes:
        setting: how the loss is computed; its batch is not used.
        optimizer: one of :mod:`torch.optim`'s kind.
        scaler: the :class:`torch.amp.GradScaler`, or None.
        max_grad_norm: gradients are clipped to it, or None.
        rule: what the loss is a mean over.
    """

    setting: Setting
    optimizer: Any
    scaler: Any = None
    max_grad_norm: float | None = None
    rule: str = SAMPLES

    def step(self, parts: Sequence[Any]) -> Tensor:
        """Makes a step of the parts of a batch, and returns its loss, detached."""
        model, scaler = self.setting.model, self.scaler
        total = Total()
        passes(
            partial(self.setting.run, model),
            [part for part in zip(parts, shares(parts, self.rule)) if part[1]],
            backward=lambda loss: (loss if scaler is None else scaler.scale(loss)).backward(),
            seen=total.add,
        )
        update(model, self.optimizer, scaler, self.max_grad_norm)
        self.optimizer.zero_grad(set_to_none=True)
        assert total.loss is not None
        return total.loss

    def timed(self, parts: Sequence[Any]) -> tuple[Tensor, float]:
        """Makes a step, and returns its loss and how many seconds it took."""
        began = self._now()
        loss = self.step(parts)
        return loss, self._now() - began

    def measured(self, batch: Any, parts: Sequence[Any]) -> tuple[Tensor, int | None]:
        """Makes a step, and returns its loss and the most bytes that were live; None if something
        else is measuring."""
        device = self.setting.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            loss = self.step(parts)
            return loss, torch.cuda.max_memory_allocated(device)
        tracked = track(self.setting.model, self.optimizer, batch=batch)
        try:
            tracked.__enter__()
        except RuntimeError:  # a profiler, or a track of the user's
            return self.step(parts), None
        try:
            loss = self.step(parts)
        finally:
            tracked.__exit__()
        return loss, tracked.peak_bytes

    def _now(self) -> float:
        if self.setting.device.type == "cuda":
            torch.cuda.synchronize(self.setting.device)
        return time.perf_counter()
