"""Counts the steps that changed nothing because a gradient was infinite or NaN."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._core.skips import LateCounts, count_step, new_counts, skip_flag

__all__ = ["SkippedSteps"]


class SkippedSteps:
    """Counts skipped steps on each device. The counts reach the host late."""

    def __init__(self) -> None:
        self._counts: dict[torch.device, Tensor] = {}  # new_counts() by device
        self._late = LateCounts()
        self._unseen = 0  # steps since a count was last sent to the host
        self._warned: set[str] = set()  # the occasions of warnings

    def on(self, device: torch.device) -> Tensor:
        """Returns the counts on a device, made at the first call."""
        if device not in self._counts:
            self._counts[device] = new_counts(device)
        return self._counts[device]

    def total(self) -> int:
        """Returns the number of skipped steps. Waits for the device."""
        return sum(int(counts[0]) for counts in self._counts.values())

    def prepared(self, found_inf: Tensor, limit: int) -> Callable[[], list[int]]:
        """Returns the call that counts a step, which is skipped if ``found_inf`` is not 0. It
        allocates nothing, and returns the numbers of skipped steps in a row that have reached the
        host since the last one and are ``limit`` or more."""
        counts = self.on(found_inf.device)
        skipped = skip_flag(found_inf, counts.device)
        if torch.compiler.is_compiling():
            count_step(counts, skipped)
            return list
        is_due = self._unseen + 1 >= limit
        row = counts[1]
        copy = self._late.room_for(row) if is_due else None

        def count() -> list[int]:
            count_step(counts, skipped)
            self._unseen = 0 if is_due else self._unseen + 1
            if copy is not None:
                self._late.send(row, copy)
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
