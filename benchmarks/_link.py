"""A link on a machine without one: an engine whose copies run on threads, at a given rate."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterable
from queue import SimpleQueue
from typing import Any

import torch
from headroom.host.engine import Engine

CHUNK = 256 << 10  # bytes that are copied between two looks at the clock


class Throttled(Engine):
    """Copies beside what the caller computes, on a thread for each direction, and sleeps where it
    would be faster than ``rate`` bytes/s."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self._queues: dict[str, SimpleQueue[Any]] = {"up": SimpleQueue(), "down": SimpleQueue()}
        for queue in self._queues.values():
            threading.Thread(target=self._run, args=(queue,), daemon=True).start()

    def _copy(
        self, queue: str, target: torch.Tensor, source: torch.Tensor, after: Iterable[Any]
    ) -> threading.Event:
        ticket = threading.Event()
        self._queues[queue].put((target, source, tuple(after), ticket))
        return ticket

    def mark(self) -> None:
        return None  # the caller computes by itself

    def wait(self, ticket: threading.Event | None) -> None:
        if ticket is not None:
            ticket.wait()

    sync = wait

    def close(self) -> None:
        """Ends the threads, after the copies that were asked for."""
        for queue in self._queues.values():
            queue.put(None)

    def _run(self, queue: SimpleQueue[Any]) -> None:
        due = 0.0
        while (work := queue.get()) is not None:
            target, source, after, ticket = work
            for before in after:
                self.wait(before)
            due = max(due, time.perf_counter())
            for first in range(0, source.numel(), CHUNK):
                size = min(CHUNK, source.numel() - first)
                ctypes.memmove(target.data_ptr() + first, source.data_ptr() + first, size)
                due += size / self.rate
                if (left := due - time.perf_counter()) > 0:
                    time.sleep(left)
            del target, source, work  # whoever waits may free them
            ticket.set()
