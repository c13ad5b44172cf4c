"""Predicts how long steps and epochs take with some settings of a loader, and finds the best.

A step of W > 0 workers ends when the slowest of three has: this process, which computes the step
and receives its batch; a worker, which has W steps for a batch; and the processors, which all of
them share, whether they are allowed by affinity or by a quota. Without workers the step waits until
its batch has been made. What a worker takes is measured with its way through shared memory, on one
thread and in a process of its own: so lock of the interpreter, native threads and the copies of
large batches count in it as they do in a run. What only waits, for files or a network, takes a
worker's time and no processor's, so that more workers than processors may pay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .costs import LoaderCosts
from .settings import Settings

__all__ = ["Host", "Model"]

EPOCHS = 3  # that a run has, at least, so that workers which persist are started for so many
WORTH = 0.03  # of the time; what gains less is not worth another worker
DEEPEST = 8  # batches that are made ahead, per worker


@dataclass(frozen=True)
class Host:
    """The processors and the memory that the system allows.

    Attributes:
        cpus: processors whose time this process may take, such as 1.5.
        free_bytes: memory of the host that may be taken; None: not known.
        shared_bytes: of the memory that batches are passed through; None: not known.
        gpus: of this process.
    """

    cpus: float
    free_bytes: int | None
    shared_bytes: int | None
    gpus: int


class Model:
    """Foretells times and bytes from costs.

    Args:
        costs: what was measured.
        host: what the system allows.
        least_workers: below which the loader would not do the same.
        can_persist: whether workers may outlive an epoch.
    """

    def __init__(
        self, costs: LoaderCosts, host: Host, least_workers: int, can_persist: bool
    ) -> None:
        self.costs, self.host = costs, host
        self.least_workers, self.can_persist = least_workers, can_persist

    def step_seconds(self, workers: int) -> float:
        """Returns the seconds of a step in the middle of an epoch, its waiting counted in."""
        costs = self.costs
        if not workers:
            return costs.step_seconds + costs.load_seconds
        assert costs.worker_seconds is not None
        work = costs.worker_cpu_seconds + costs.receive_seconds + costs.step_cpu_seconds
        return max(
            costs.step_seconds + costs.receive_seconds,
            costs.worker_seconds / workers,
            work / self.host.cpus,
        )

    def start_seconds(self, settings: Settings) -> float:
        """Returns what workers add to an epoch by being started, ended, and empty at first."""
        costs = self.costs
        if not settings.num_workers or costs.worker_seconds is None:
            return 0.0
        once = settings.num_workers * costs.start_seconds + costs.first_seconds
        if settings.persistent_workers:
            once /= EPOCHS
        return once + costs.worker_seconds

    def seconds(self, settings: Settings) -> float:
        """Returns the seconds of a step, with its share of what an epoch costs besides."""
        found = self.step_seconds(settings.num_workers)
        if self.costs.batches:
            found += self.start_seconds(settings) / self.costs.batches
        return found

    def host_bytes(self, settings: Settings) -> int:
        """Returns the memory of the host that workers and their batches take."""
        workers = settings.num_workers
        return workers * self.costs.worker_bytes + self.batch_bytes(settings)

    def batch_bytes(self, settings: Settings) -> int:
        """Returns the bytes of the batches that are made ahead."""
        return settings.num_workers * (settings.prefetch_factor or 0) * self.costs.batch_bytes

    def pinned_bytes(self, settings: Settings) -> int:
        """Returns the bytes of batches in pinned memory: those ahead, and the one in use."""
        if not settings.pin_memory:
            return 0
        return self.batch_bytes(settings) + self.costs.batch_bytes

    def has_room(self, settings: Settings) -> bool:
        """Returns whether the host has the memory that the settings take."""
        host = self.host
        return (
            host.free_bytes is None
            or self.host_bytes(settings) + self.pinned_bytes(settings) <= host.free_bytes
        ) and (host.shared_bytes is None or self.batch_bytes(settings) <= host.shared_bytes)

    def settings(self, workers: int, pin_memory: bool) -> Settings:
        """Returns the best settings with so many workers: as many batches ahead as the slowest of
        them takes steps, unless there is no room for them."""
        found = Settings(pin_memory=pin_memory).but(num_workers=workers)
        if not workers:
            return found
        ahead = 1 + self.costs.slowest_seconds / max(self.step_seconds(workers), 1e-9)
        factor = min(DEEPEST, max(2, math.ceil(ahead / workers)))
        found = found.but(prefetch_factor=factor)
        while not self.has_room(found) and found.prefetch_factor != 1:
            found = found.but(prefetch_factor=(found.prefetch_factor or 2) - 1)
        lasting = found.but(persistent_workers=True)
        gain = 1 - self.seconds(lasting) / self.seconds(found)
        return lasting if self.can_persist and gain > WORTH / 3 else found

    def workers(self) -> range:
        """Returns the numbers of workers that are looked at."""
        least = self.least_workers
        if self.costs.worker_seconds is None:
            return range(least, least + 1)
        return range(least, max(least, 4, math.ceil(4 * self.host.cpus)) + 1)

    def best(self, pin_memory: bool) -> Settings:
        """Returns the settings of the fewest workers that nearly none are faster than."""
        tried = [self.settings(workers, pin_memory) for workers in self.workers()]
        tried = [one for one in tried if self.has_room(one)] or tried[:1]
        fastest = min(map(self.seconds, tried))
        return next(one for one in tried if self.seconds(one) <= (1 + WORTH) * fastest)
