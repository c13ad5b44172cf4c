"""Counts skipped steps on the device. The host reads the counts without waiting for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["LateCounts", "count_step", "new_counts"]


def new_counts(device: torch.device) -> Tensor:
    """Returns int64 zeros: the number of skipped steps, and of skipped steps in a row up to now."""
    return torch.zeros(2, dtype=torch.int64, device=device)


def count_step(counts: Tensor, found_inf: Tensor) -> None:
    """Counts a step as skipped if ``found_inf`` is not 0. Does not wait if both lie on one
    device."""
    skipped = found_inf.detach().reshape(()).to(counts.device) != 0
    counts.add_(skipped)
    counts[1:].mul_(skipped)


class LateCounts:
    """Brings counts to the host without waiting: on CUDA they arrive some steps later."""

    def __init__(self) -> None:
        self._pending: deque[tuple[Any, Tensor]] = deque()

    def send(self, count: Tensor) -> None:
        """Begins to copy the present value of a count. Does nothing while a CUDA graph is captured,
        which cannot copy to the host."""
        if not count.is_cuda:
            self._pending.append((None, count.clone()))
        elif not torch.cuda.is_current_stream_capturing():
            copy = torch.empty(count.shape, dtype=count.dtype, device="cpu", pin_memory=True)
            copy.copy_(count, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._pending.append((event, copy))

    def arrived(self) -> Iterator[int]:
        """Yields the counts that have arrived, in their order."""
        while self._pending:
            event, count = self._pending[0]
            if event is not None and (
                torch.cuda.is_current_stream_capturing() or not event.query()
            ):
                return
            self._pending.popleft()
            yield int(count)

    def clear(self) -> None:
        self._pending.clear()
