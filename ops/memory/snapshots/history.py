"""The last events of a run that is recorded piece by piece, and everything that is live."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence

from ..events import Allocation, Span
from ..stream import Event, Label, Note, Resolver

__all__ = ["History"]


class History(Resolver):
    """Keeps the last ``most`` events and the allocations that were live in them. What is live is
    complete whatever was dropped before.

    Args:
        before: what exists already.
        most: events that are kept.
    """

    def __init__(self, before: Iterable[Label], most: int) -> None:
        super().__init__([])
        self.most, self.dropped = most, 0
        """How many events were dropped: the first that is kept has the next number."""
        self._times: deque[int] = deque()
        self._addresses: dict[int, int] = {}  # by the id of the allocation
        self.note(Note(list(before)))

    def follow(self, events: Iterable[Event], notes: Sequence[Note]) -> None:
        """Goes on with the next events, whose marks are the numbers of these notes."""
        self._notes = notes
        for event in events:
            self.see(event)
        self._notes = []
        self._drop()

    def see(self, event: Event) -> None:
        before = self._index
        super().see(event)
        if self._index > before:
            self._times.append(event.time_us)

    def _add(self, address: int, size: int, event: Event | None, phase: str) -> Allocation:
        found = super()._add(address, size, event, phase)
        self._addresses[found.id] = address
        return found

    def _drop(self) -> None:
        surplus = self._index - self.dropped - self.most
        if surplus <= 0:
            return
        self.dropped += surplus
        for _ in range(surplus):
            self._times.popleft()
        self.allocations = [a for a in self.allocations if a.end is None or a.end > self.dropped]
        self._addresses = {a.id: self._addresses[a.id] for a in self.allocations}
        first = bisect_right([span.start for span in self.spans], self.dropped) - 1
        del self.spans[: max(0, first)]

    def address(self, allocation: Allocation) -> int:
        """Returns where an allocation is or was."""
        return self._addresses[allocation.id]

    def time_us(self, index: int) -> int:
        """Returns the time of an event that was kept."""
        return self._times[index - self.dropped - 1]

    @property
    def last_time_us(self) -> int:
        """Returns the time of the last event; 0 if there was none."""
        return self._times[-1] if self._times else 0

    @property
    def kept_spans(self) -> list[Span]:
        """Returns the phases of the events that were kept."""
        return [span._replace(start=max(span.start, self.dropped)) for span in self.spans]

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
