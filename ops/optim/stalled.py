"""Counts the weights that a step was too small to move."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._core.dtensor import local_part

__all__ = ["StalledWeights", "stalled_fraction"]


class StalledWeights:
    """Counts the weights that a step was too small to move, on each device."""

    def __init__(self) -> None:
        self._counts: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """Returns the count on a device, made at the first call."""
        if device not in self._counts:
            self._counts[device] = torch.zeros((), dtype=torch.int64, device=device)
        return self._counts[device]

    def restart(self) -> None:
        for count in self._counts.values():
            count.zero_()

    def total(self) -> int:
        """Returns the sum over the devices. Waits for them."""
        return sum(int(count) for count in self._counts.values())


def stalled_fraction(stalled: StalledWeights | None, state: dict[Any, Any]) -> float:
    """Returns the share of stalled weights among the weights that have a state."""
    if stalled is None:
        raise RuntimeError(
            "stalled_fraction() needs an optimizer that counts: make it with count_stalled=True"
        )
    stepped = sum(
        local_part(param).numel()
        for param, entry in state.items()
        if entry and isinstance(param, Tensor)
    )
    if not stepped:
        raise RuntimeError("stalled_fraction() comes after a step that updated parameters")
    return stalled.total() / stepped
