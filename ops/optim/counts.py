"""Counts, on the device, the steps that changed nothing because a gradient was infinite or NaN, and
the weights that a step was too small to move."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


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


class DeviceCounts:
    """Keeps counts on each device, of which the first is of all."""

    _shape: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._counts: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """Returns the counts on a device, made at the first call."""
        if device not in self._counts:
            self._counts[device] = torch.zeros(self._shape, dtype=torch.int64, device=device)
        return self._counts[device]

    def total(self) -> int:
        """Returns the sum over the devices. Waits for them."""
        return sum(int(counts.view(-1)[0]) for counts in self._counts.values())


class SkippedSteps(DeviceCounts):
    """Counts skipped steps on each device: all, and those in a row up to now. The counts reach the
    host late."""

    _shape = (2,)

    def __init__(self) -> None:
        super().__init__()
        self._late = LateCounts()
        self._unseen = 0  # steps since a count was last sent to the host
        self._warned: set[str] = set()  # the occasions of warnings

    def prepared(self, found_inf: Tensor, limit: int) -> Callable[[], list[int]]:
        """Returns the call that counts a step, which is skipped if ``found_inf`` is not 0. It
        allocates nothing, and returns the numbers of skipped steps in a row that have reached the
        host since the last one and are ``limit`` or more."""
        counts = self.on(found_inf.device)
        skipped = (found_inf.detach().reshape(()) != 0).to(torch.int64)
        in_a_row = counts[1]

        def add() -> None:
            counts.add_(skipped)
            in_a_row.mul_(skipped)

        if torch.compiler.is_compiling():
            add()
            return list
        is_due = self._unseen + 1 >= limit
        copy = self._late.room_for(in_a_row) if is_due else None

        def count() -> list[int]:
            add()
            self._unseen = 0 if is_due else self._unseen + 1
            if copy is not None:
                self._late.send(in_a_row, copy)
            return [skipped for skipped in self._late.arrived() if skipped >= limit]

        return count

    def warn(
        self, occasion: str, words: str, culprit: Callable[[], str | None], stacklevel: int
    ) -> None:
        """Warns once for each occasion."""
        if occasion in self._warned:
            return
        self._warned.add(occasion)
        name = culprit()
        of = f"; the first gradient that is not finite now is that of {name}" if name else ""
        warnings.warn(
            f"{words} skipped because gradients were infinite or NaN{of}. A skipped step "
            "changes nothing. Look for a NaN in the data or the forward pass, or lower the "
            "learning rate",
            stacklevel=stacklevel,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"_counts": self._counts, "_warned": self._warned}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()
        self.__dict__.update(state)


class StalledWeights(DeviceCounts):
    """Counts the weights that a step was too small to move, on each device."""

    stepped = 0  # weights that the step was to update

    def restart(self) -> None:
        self.stepped = 0
        for count in self._counts.values():
            count.zero_()


def stalled_fraction(stalled: StalledWeights | None) -> float:
    """Returns the share of stalled weights among those that the step was to update."""
    if stalled is None:
        raise RuntimeError(
            "stalled_fraction() needs an optimizer that counts: make it with count_stalled=True"
        )
    if not stalled.stepped:
        raise RuntimeError("stalled_fraction() comes after a step that updated parameters")
    return stalled.total() / stalled.stepped
