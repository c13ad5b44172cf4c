"""Simulates the queues of a device, its link and the host: when copies and computation run.

The device computes, copies go up and down, and the host computes, in four queues. Work begins when
the work before it in its queue has ended and what it waits for has; the caller goes on meanwhile,
unless it waits, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

QUEUES = ("compute", "up", "down", "host")


class Link(NamedTuple):
    """The measured way between host and device."""

    up: float  # bytes/s to the device
    down: float  # bytes/s to the host
    latency: float  # seconds of a copy beside those of its bytes
    is_asynchronous: bool = True  # whether copies run beside what the device computes
    up_beside: float | None = None  # bytes/s while a copy down runs; None: as without
    down_beside: float | None = None

    def rate(self, queue: str, is_beside: bool) -> float:
        """Returns the bytes/s of a queue, alone or while the other copies."""
        alone, beside = (
            (self.up, self.up_beside) if queue == "up" else (self.down, self.down_beside)
        )
        return beside if is_beside and beside is not None else alone


class Work(NamedTuple):
    """Takes a queue some time: seconds of computation, or a copy of bytes."""

    queue: str
    seconds: float
    size: int
    after: tuple[int, ...]  # the work, by its number, that must have ended


class Times(NamedTuple):
    """When each work began and ended, in seconds from the first call."""

    begins: list[float]
    ends: list[float]


class Schedule:
    """Work in the order of the calls that give it to a device, as to an engine. Copies of a link
    that is not asynchronous run in the queue of the computation, and so does what the host
    computes: it is the device then."""

    def __init__(self, link: Link) -> None:
        self.link, self.works = link, list[Work]()
        self._synced: tuple[int, ...] = ()  # what the caller has waited for
        self._latest = -1  # of the queue of the computation
        self._computed: float = 0

    def compute(self, seconds: float, after: Iterable[int] = ()) -> int:
        """Gives the device so many seconds to compute. Returns the number of the work."""
        self._computed += seconds
        return self._add("compute", seconds, 0, after)

    def on_host(self, seconds: float, after: Iterable[int] = ()) -> int:
        """Gives the host so many seconds to compute. Returns the number of the work."""
        queue = "host" if self.link.is_asynchronous else "compute"
        return self._add(queue, seconds, 0, after)

    def copy(self, queue: str, size: int, after: Iterable[int] = ()) -> int:
        """Copies bytes ``"up"`` or ``"down"``. Returns the number of the work."""
        if self.link.is_asynchronous:
            return self._add(queue, self.link.latency, size, after)
        seconds = self.link.latency + size / self.link.rate(queue, False)
        return self._add("compute", seconds, 0, after)

    def mark(self) -> tuple[int, ...]:
        """Returns the number of what was last given to compute, if there is any."""
        return () if self._latest < 0 else (self._latest,)

    def sync(self, work: int) -> None:
        """Lets the caller wait: what it gives from now on begins later."""
        self._synced += (work,)

    def _add(self, queue: str, seconds: float, size: int, after: Iterable[int]) -> int:
        self.works.append(Work(queue, seconds, size, (*after, *self._synced)))
        if queue == "compute":
            self._latest = len(self.works) - 1
        return len(self.works) - 1

    def times(self) -> Times:
        """Returns when each work begins and ends."""
        return simulated(self.works, self.link)

    @property
    def makespan(self) -> float:
        """Returns the seconds until all has ended."""
        return max(self.times().ends, default=0)

    @property
    def exposed(self) -> float:
        """Returns how many seconds later than without copies, and without the host, the device has
        computed all."""
        ends = self.times().ends
        return max((ends[i] for i in self.mark()), default=0) - self._computed


class _Running:
    """A work that has begun."""

    def __init__(self, work: Work, link: Link, now: float) -> None:
        self.queue, self.bytes, self.link = work.queue, work.size, link
        self.since, self.seconds = now, work.seconds
        self.rate = link.rate(work.queue, False) if work.queue in ("up", "down") else 1

    @property
    def end(self) -> float:
        return self.since + self.seconds + (self.bytes / self.rate if self.bytes else 0)

    def change(self, is_beside: bool, now: float) -> None:
        """Goes on at the rate that it has beside a copy in the other direction, or alone."""
        rate = self.link.rate(self.queue, is_beside)
        if rate != self.rate:
            waited = min(now - self.since, self.seconds)
            self.bytes -= (now - self.since - waited) * self.rate
            self.seconds -= waited
            self.since, self.rate = now, rate


def simulated(works: Sequence[Work], link: Link) -> Times:
    """Returns when each work begins and ends."""
    queues: dict[str, deque[int]] = {name: deque() for name in QUEUES}
    for i, work in enumerate(works):
        queues[work.queue].append(i)
    found = Times([0] * len(works), [0] * len(works))
    running: dict[str, _Running] = {}
    has_ended = [False] * len(works)
    now: float = 0
    while any(queues.values()):
        for name, queue in queues.items():
            if queue and name not in running and all(has_ended[i] for i in works[queue[0]].after):
                running[name] = _Running(works[queue[0]], link, now)
                found.begins[queue[0]] = now
        for name, other in (("up", "down"), ("down", "up")):
            if name in running:
                running[name].change(other in running, now)
        now = min(one.end for one in running.values())
        for name in [name for name, one in running.items() if one.end <= now]:
            del running[name]
            index = queues[name].popleft()
            found.ends[index], has_ended[index] = now, True
    return found
