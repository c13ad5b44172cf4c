"""Counts skipped steps on the device. The host reads the counts without waiting for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["LateCounts", "count_step", "new_counts", "skip_flag"]


def new_counts(device: torch.device) -> Tensor:
    """Returns int64 zeros: the number of skipped steps, and of skipped steps in a row up to now."""
    return torch.zeros(2, dtype=torch.int64, device=device)


def skip_flag(found_inf: Tensor, device: torch.device) -> Tensor:
    """Returns an int64 1 on the device if ``found_inf`` is not 0, else 0."""
    return (found_inf.detach().reshape(()).to(device) != 0).to(torch.int64)


def count_step(counts: Tensor, skipped: Tensor) -> None:
    """Counts a step by its :func:`skip_flag`. Neither allocates nor waits."""
    counts.add_(skipped)
    counts[1:].mul_(skipped)


class LateCounts:
    """Brings counts to the host without waiting: on CUDA they arrive some steps later."""

    def __init__(self) -> None:
        self._pending: deque[tuple[Any, Tensor]] = deque()

    def room_for(self, count: Tensor) -> Tensor | None:
        """Returns the memory that a count is copied to, or None while a CUDA graph is captured,
        which cannot copy to the host."""
        if not count.is_cuda:
            return torch.empty_like(count)
        if torch.cuda.is_current_stream_capturing():
            return None
        return torch.empty(count.shape, dtype=count.dtype, device="cpu", pin_memory=True)

    def send(self, count: Tensor, copy: Tensor | None = None) -> None:
        """Begins to copy the present value of a count to ``copy``, which :meth:`room_for` made.
        Does nothing while a CUDA graph is captured."""
        copy = self.room_for(count) if copy is None else copy
        if copy is None:
            return
        copy.copy_(count, non_blocking=True)
        event = None
        if count.is_cuda:
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
