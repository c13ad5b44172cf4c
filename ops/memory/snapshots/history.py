"""A timeline with the addresses and times of what was recorded, which snapshots hold."""

from __future__ import annotations

from collections.abc import Sequence

from ..events import Allocation
from ..stream import Event, Note, Resolver

__all__ = ["History"]


class History(Resolver):
    """Follows events and notes as its base does, and keeps where allocations were.

    Attributes:
        times: microseconds since 1970 of each event; the first is that of the state before them.
    """

    def __init__(self, notes: Sequence[Note]) -> None:
        super().__init__(notes)
        self.times = [0]
        self._addresses: dict[int, int] = {}  # by the id of the allocation

    def see(self, event: Event) -> None:
        super().see(event)
        self.times += [event.time_us or self.times[-1]] * (self._index + 1 - len(self.times))

    def _add(self, address: int, size: int, event: Event | None, phase: str) -> Allocation:
        found = super()._add(address, size, event, phase)
        self._addresses[found.id] = address
        return found

    def address(self, allocation: Allocation) -> int:
        """Returns where an allocation is or was."""
        return self._addresses[allocation.id]

    def end_what_was_overwritten(self) -> None:
        """Ends allocations in whose place there is another one: another thread freed them, which
        recorders do not see."""
        last_at, last = 0, None
        for at, a in sorted(self._live.items()):
            if last is not None and last_at + last.bytes > at:
                gone_at, gone = (at, a) if a.id < last.id else (last_at, last)
                gone.end = max(a.start, last.start)
                del self._live[gone_at]
                if gone is a:
                    continue
            last_at, last = at, a
