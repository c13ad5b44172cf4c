"""Measures how long a device works."""

from __future__ import annotations

import time
from typing import Any

import torch

__all__ = ["Stopwatch", "now"]


def now() -> float:
    """Returns the seconds on the clock that all measurements on the CPU are taken with."""
    return time.perf_counter()


class Stopwatch:
    """Takes times on a device: by the clock of the CPU, or by events of CUDA's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._laps: list[Any] = []

    def lap(self) -> None:
        """Takes a time."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._laps.append(event)
        else:
            self._laps.append(now())

    def seconds(self) -> list[float]:
        """Returns the seconds from each lap to the next. Waits for the device."""
        pairs = zip(self._laps, self._laps[1:])
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return [first.elapsed_time(second) / 1000 for first, second in pairs]
        return [second - first for first, second in pairs]
