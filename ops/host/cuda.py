"""The copy engine of a CUDA device: a stream for each direction, made once."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .engine import Engine

# A device's copies in one direction run one after another, whatever the priority of their streams:
# a small one of the training loop waits for no more than a piece.
PIECE = 32 << 20


class Recorded:
    """Stands for what a stream had been given when its event was recorded. The event goes back to
    its engine, and is recorded again, once nobody holds this."""

    __slots__ = ("event", "_pool")

    def __init__(self, event: Any, pool: list[Any]) -> None:
        self.event, self._pool = event, pool

    def __del__(self) -> None:
        self._pool.append(self.event)


class Streams(Engine):
    """The engine of a CUDA device. It allocates nothing, neither on the device nor on the host, but
    the events that are not free to be used again.

    The streams are never those of a computation: torch's allocator does not know that memory is
    used there, and whoever frees it waits for the tickets first.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self._events: list[Any] = []

    @cached_property
    def _streams(self) -> dict[str, Any]:
        """Makes the streams for the first copy: an optimizer may be planned for a device that is
        not there."""
        return {queue: torch.cuda.Stream(self.device) for queue in ("up", "down")}

    def _copy(
        self, queue: str, target: Tensor, source: Tensor, after: Iterable[Recorded]
    ) -> Recorded:
        stream = self._streams[queue]
        for ticket in after:
            stream.wait_event(ticket.event)
        with torch.cuda.stream(stream):
            for first in range(0, target.numel(), PIECE):
                piece = slice(first, first + PIECE)
                target[piece].copy_(source[piece], non_blocking=True)
        return self._recorded(stream)

    def _recorded(self, stream: Any) -> Recorded:
        event = self._events.pop() if self._events else torch.cuda.Event()
        event.record(stream)
        return Recorded(event, self._events)

    def mark(self) -> Recorded:
        # Asked for each time: the stream of the computation may change between two calls.
        return self._recorded(torch.cuda.current_stream(self.device))

    def wait(self, ticket: Recorded) -> None:
        torch.cuda.current_stream(self.device).wait_event(ticket.event)

    def sync(self, ticket: Recorded) -> None:
        ticket.event.synchronize()
