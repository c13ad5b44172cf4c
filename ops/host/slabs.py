"""Slabs that are used again and again, for what leaves a device in every step."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from .engine import Engine


class Slabs:
    """Slabs that calls give back and others of the same size take again: to map and register memory
    takes longer than to copy into it.

    Args:
        take: returns a slab, given its bytes and, by its name, the device.
        engine_of: returns the engine of a device.
    """

    def __init__(
        self,
        take: Callable[..., Tensor],
        engine_of: Callable[[torch.device], Engine],
    ) -> None:
        self._take, self.engine_of = take, engine_of
        self._idle: dict[tuple[torch.device, int], list[Tensor]] = {}
        self._lock = threading.RLock()  # graphs are freed on any thread, and in a collection

    def take(self, size: int, device: torch.device) -> Tensor:
        """Returns a slab, which copies may still read or write that the device waits for."""
        with self._lock:
            if found := self._idle.get((device, size)):
                return found.pop()
            # Sizes that are not asked for again shall not add up.
            freed = 0
            while freed < size and self._idle:
                (_, other), slabs = self._idle.popitem()
                freed += other * len(slabs)
        return self._take(size, device=device)

    def give(self, slab: Tensor, device: torch.device) -> None:
        """Lets others have a slab. The device must wait for all copies from and to it."""
        with self._lock:
            self._idle.setdefault((device, slab.numel()), []).append(slab)

    def trim(self) -> None:
        """Gives back to the arena what no graph holds."""
        with self._lock:
            self._idle.clear()
