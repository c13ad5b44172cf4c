"""Counts what fakes take of the host arena, and what is copied to and from it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..host.engine import Inline
from ..host.slabs import Slabs
from ..memory.events import Allocation
from .recorder import Recorder

__all__ = ["HostUse"]


class HostUse(Inline):
    """The host of a plan: slabs without memory, and an engine that copies nothing.

    Attributes:
        allocations: of the arena, at the events of the recorder.
        slabs: to be given to fakes.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.is_asynchronous = recorder.device.type == "cuda"
        self.allocations: list[Allocation] = []
        self.slabs = Slabs(self._take, lambda device: self)
        self._recorder = recorder

    @property
    def bytes_copied(self) -> int:
        return self.bytes_up + self.bytes_down

    def _take(self, size: int, device: torch.device) -> Tensor:
        recorder = self._recorder
        made = Allocation(
            len(self.allocations),
            size,
            recorder.now,
            kind="activations",
            module=recorder.module,
            phase=recorder.phase,
            step=recorder.step,
        )
        self.allocations.append(made)
        with _disable_current_modes():
            slab = torch.empty(size, dtype=torch.uint8, device="meta")
        weakref.finalize(slab, self._freed, made)
        return slab

    def _freed(self, allocation: Allocation) -> None:
        allocation.end = self._recorder.now

    def up(self, target: Tensor, source: Tensor, after: Iterable[Any] = ()) -> None:
        self.bytes_up += source.numel()

    def down(self, target: Tensor, source: Tensor, after: Iterable[Any] = ()) -> None:
        self.bytes_down += target.numel()
