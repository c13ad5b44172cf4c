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


class Ticket(threading.Event):
    """Is set when a copy has ended, at a time that follows the rate of the link."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = time.perf_counter()
        self.ended = 0.0


class Throttled(Engine):
    """Copies beside what the caller computes, on a thread for each direction, and sleeps where it
    would be faster than ``rate`` bytes/s. What the system's clock and scheduler lose is made up for
    in the copies that follow."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self._queues: dict[str, SimpleQueue[Any]] = {"up": SimpleQueue(), "down": SimpleQueue()}
        for queue in self._queues.values():
            threading.Thread(target=self._run, args=(queue,), daemon=True).start()

    def _copy(
        self, queue: str, target: torch.Tensor, source: torch.Tensor, after: Iterable[Any]
    ) -> Ticket:
        ticket = Ticket()
        self._queues[queue].put((target, source, tuple(filter(None, after)), ticket))
        return ticket

    def mark(self) -> None:
        return None  # the caller computes by itself

    def wait(self, ticket: Ticket | None) -> None:
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
                before.wait()
            due = max([due, ticket.asked, *(before.ended for before in after)])
            for first in range(0, source.numel(), CHUNK):
                size = min(CHUNK, source.numel() - first)
                ctypes.memmove(target.data_ptr() + first, source.data_ptr() + first, size)
                due += size / self.rate
                if (left := due - time.perf_counter()) > 0:
                    time.sleep(left)
            ticket.ended = due
            del target, source, work  # whoever waits may free them
            ticket.set()
