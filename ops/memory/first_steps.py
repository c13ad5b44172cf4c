"""Measures the first steps of a training: the peak of two, and the time of those behind them."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import nn

from ..host import default_arena
from .track import track

__all__ = ["FirstSteps"]

TRACKED = 2  # the first makes the optimizer's state, and the second has all of it in its forward
TIMED = 64  # of the latest steps whose times are kept


class FirstSteps:
    """Measures the peak of the first two steps of a training and the times of later ones.

    Call :meth:`step_began` and :meth:`step_ended` around each step, :meth:`pause` before something
    else than a step, such as an evaluation, and :meth:`abandon` if a step raises or is not
    finished. On the CPU allocations are recorded by :func:`headroom.memory.track`, which slows the
    steps down: hence others are timed. On CUDA the allocator counts what it has reserved, because
    a budget bounds that.

    Args:
        model, optimizer: those that are trained.
        device: where.
        context: bytes that the process takes on a CUDA device besides the allocator's, which count
            as well.
        records: whether the peak is measured; not where nothing would end a recording after an
            error.

    Attributes:
        count: of the steps that ended.
        peak: bytes, or None.
        host_peak: the most that the host arena held meanwhile, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        device: torch.device,
        *,
        context: int = 0,
        records: bool = True,
    ) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device
        self._context = context
        self._records = records
        self._recording: Any = None
        self._runs = False  # a step
        self._whole = True  # nothing came between its parts
        self._began = 0.0
        self._times: list[float] = []
        self.count = 0
        self.peak: int | None = None
        self.host_peak: int | None = None

    @property
    def seconds(self) -> float | None:
        """Returns the median time of the latest steps, or None."""
        return statistics.median(self._times) if self._times else None

    def step_began(self, batch: Any = None) -> None:
        """Notes that a step begins. Does nothing within one, such as at its second batch.

        Args:
            batch: tensors that were there before, and count.
        """
        if self._runs:
            return
        self._runs = self._whole = True
        if self.count < TRACKED:
            self._record(batch)
        else:
            self._began = self._now()

    def step_ended(self) -> None:
        """Notes that an optimizer step has ended. Does nothing if none has begun, and leaves out a
        step in which something else ran."""
        counts = self._runs and self._whole
        self._runs = False
        if not counts:
            return
        self.count += 1
        if self.count == TRACKED:
            self.pause()
        elif self.count > TRACKED:
            self._times.append(self._now() - self._began)
            del self._times[:-TIMED]

    def pause(self) -> None:
        """Stops to record until the next step begins."""
        self._whole = False
        recording = self._stopped()
        if recording is not None and self.count:
            if self._device.type == "cuda":
                peak = torch.cuda.max_memory_reserved(self._device) + self._context
            else:
                peak = recording.peak_bytes
            self.peak = max(peak, self.peak or 0)
            self.host_peak = max(default_arena().peak, self.host_peak or 0)

    def abandon(self) -> None:
        """Stops to record, and leaves out the step that runs, which the next one takes the place
        of."""
        self._runs = False
        self._stopped()

    def _stopped(self) -> Any:
        """Returns what recorded until now, or None."""
        recording, self._recording = self._recording, None
        if recording is not None and self._device.type != "cuda":
            recording.__exit__(None, None, None)
        return recording

    def _record(self, batch: Any) -> None:
        if self._recording is not None or not self._records:
            return
        default_arena().reset_peak()
        if self._device.type == "cuda":
            if self.count == 0:  # what ran before; later it would part free memory from states
                torch.cuda.empty_cache()
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
