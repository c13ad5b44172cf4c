"""What the first steps of a training took, beside what was predicted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .._core.sizes import format_bytes
from ..memory import track

__all__ = ["FirstSteps"]

TRACKED = 2  # the first makes the optimizer's state, and the second has all of it in its forward


class FirstSteps:
    """Measures the peak of the first two steps of a training and the time of the third.

    Call :meth:`begin` before the first step, :meth:`step_ended` after each, :meth:`end` when the
    training ends, and :meth:`abandon` if it raises. On the CPU allocations are recorded by
    :func:`headroom.memory.track`, which slows the steps down: hence the third is timed. On CUDA the
    allocator counts.

    Args:
        model, optimizer: those that are trained.
        device: where.
        predicted_peak: bytes.
        predicted_seconds: of a step.
        tell: is called with what was found, as text.

    Attributes:
        peak: bytes, or None.
        seconds: of a step, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        device: torch.device,
        predicted_peak: int,
        predicted_seconds: float,
        tell: Callable[[str], Any],
    ) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device
        self._predicted = predicted_peak, predicted_seconds
        self._tell = tell
        self._tracked: Any = None
        self._steps = 0
        self._began = 0.0
        self._told = False
        self.peak: int | None = None
        self.seconds: float | None = None

    def begin(self) -> None:
        """Starts to record."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        tracked = track(self._model, self._optimizer, device=self._device)
        try:
            tracked.__enter__()
        except RuntimeError:  # a profiler runs already, or a track of the user's
            return
        self._tracked = tracked

    def step_ended(self) -> None:
        """An optimizer step has ended."""
        self._steps += 1
        if self._steps == TRACKED:
            self._stop()
            self._began = self._now()
        elif self._steps == TRACKED + 1:
            self.seconds = self._now() - self._began
            self.end()

    def end(self) -> None:
        """Tells what was measured, once."""
        self._stop()
        if self._told or (self.peak is None and self.seconds is None):
            return
        self._told = True
        peak, seconds = self._predicted
        parts = []
        if self.peak is not None:
            parts.append(f"measured peak {format_bytes(self.peak)}, predicted {format_bytes(peak)}")
        if self.seconds is not None:
            parts.append(
                f"measured step {self.seconds * 1e3:.1f} ms, predicted {seconds * 1e3:.1f} ms"
            )
        self._tell(f"headroom.fit: {'; '.join(parts)}")

    def abandon(self) -> None:
        """Stops to record, after an error."""
        if self._tracked is not None:
            self._tracked.__exit__(None, None, None)
            self._tracked = None

    def _stop(self) -> None:
        if self._device.type == "cuda" and self.peak is None and self._steps:
            self.peak = torch.cuda.max_memory_allocated(self._device)
        if self._tracked is not None:
            tracked, self._tracked = self._tracked, None
            tracked.__exit__(None, None, None)
            if self._steps:
                self.peak = tracked.peak_bytes

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
