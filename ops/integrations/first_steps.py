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

    Call :meth:`step_began` and :meth:`step_ended` around each step, :meth:`pause` before something
    else than a step, such as an evaluation, :meth:`end` when the training ends, and
    :meth:`abandon` if a step raises or is not finished. On the CPU allocations are recorded by
    :func:`headroom.memory.track`, which slows the steps down: hence the third is timed. On CUDA the
    allocator counts.

    Args:
        model, optimizer: those that are trained.
        device: where.
        predicted_peak: bytes.
        predicted_seconds: of a step; None if nothing was measured.
        tell: is called with what was found, as text.
        records: whether the peak is measured; not where nothing would end a recording after an
            error.

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
        predicted_seconds: float | None,
        tell: Callable[[str], Any],
        *,
        records: bool = True,
    ) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device
        self._predicted = predicted_peak, predicted_seconds
        self._tell, self._records = tell, records
        self._recording: Any = None
        self._runs = False  # a step
        self._whole = True  # nothing came between its parts
        self._steps = 0
        self._began = 0.0
        self._told = False
        self.peak: int | None = None
        self.seconds: float | None = None

    @property
    def has_ended(self) -> bool:
        """Returns whether nothing is left to measure."""
        return self._told

    def step_began(self, batch: Any = None) -> None:
        """Begins to measure a step. Does nothing within one, such as at its second batch.

        Args:
            batch: tensors that were there before, and count.
        """
        if self._runs:
            return
        self._runs = self._whole = True
        if self._steps < TRACKED:
            self._record(batch)
        elif self._steps == TRACKED:
            self._began = self._now()

    def step_ended(self) -> None:
        """Ends the measurement of a step. Does nothing if none has begun, and leaves out a step in
        which something else ran."""
        counts = self._runs and self._whole
        self._runs = False
        if not counts:
            return
        self._steps += 1
        if self._steps == TRACKED:
            self.pause()
        elif self._steps == TRACKED + 1:
            self.seconds = self._now() - self._began
            self.end()

    def pause(self) -> None:
        """Stops to record until the next step begins."""
        self._whole = False
        recording, self._recording = self._recording, None
        if recording is None:
            return
        if self._device.type != "cuda":
            recording.__exit__(None, None, None)
        if self._steps:
            cuda = self._device.type == "cuda"
            peak = torch.cuda.max_memory_allocated(self._device) if cuda else recording.peak_bytes
            self.peak = max(peak, self.peak or 0)

    def end(self) -> None:
        """Tells what was measured, once."""
        self.pause()
        if self._told or (self.peak is None and self.seconds is None):
            return
        self._told = True
        peak, seconds = self._predicted
        parts = []
        if self.peak is not None:
            parts.append(f"measured peak {format_bytes(self.peak)}, predicted {format_bytes(peak)}")
        if self.seconds is not None:
            predicted = "" if seconds is None else f", predicted {seconds * 1e3:.1f} ms"
            parts.append(f"measured step {self.seconds * 1e3:.1f} ms{predicted}")
        self._tell(f"headroom.fit: {'; '.join(parts)}")

    def abandon(self) -> None:
        """Stops to record, and leaves out the step that runs, which the next one takes the place
        of."""
        self._runs = False
        recording, self._recording = self._recording, None
        if recording is not None and self._device.type != "cuda":
            recording.__exit__(None, None, None)

    def _record(self, batch: Any) -> None:
        if self._recording is not None or not self._records:
            return
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._recording = self._device
            return
        tracked = track(self._model, self._optimizer, batch=batch, device=self._device)
        try:
            tracked.__enter__()
        except RuntimeError:  # a profiler runs already, or a track of the user's
            return
        self._recording = tracked

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
