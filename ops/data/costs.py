"""Measures what the batches of a loader cost: in this process, and in a worker."""

from __future__ import annotations

import contextlib
import copy
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from .._core.randomness import loader_kept
from ..step.trees import tensors_in
from .settings import Settings, is_iterable, settings_of, with_settings

__all__ = ["LoaderCosts", "measured"]

SECONDS = 1.0  # that one of the trials takes, unless three batches take longer
MOST = 64  # batches of a trial
PAGE = 4096


@dataclass(frozen=True)
class LoaderCosts:
    """The measured costs of a batch and a step. Seconds are of the clock, but for those of
    processors.

    Attributes:
        load_seconds: to make a batch in this process.
        slowest_seconds: the longest that it took.
        worker_seconds: from one batch of a worker to its next, when nobody makes it wait: with the
            way through shared memory. None: workers cannot be used.
        worker_cpu_seconds: of a processor that the worker takes for it.
        receive_seconds: of a processor that this process takes to get a batch of a worker.
        start_seconds: to start a worker, and to end it.
        first_seconds: how much longer the first batch of a worker takes than another.
        worker_bytes: memory of the host that a worker has for itself.
        batch_bytes: of the tensors of a batch.
        is_pinned: whether they are in pinned memory.
        step_seconds: of a step without the time that it waits for its batch.
        step_cpu_seconds: of processors that the step takes.
        blocked_seconds: that a step waits for the loader as it is.
        batches: of an epoch; None: not known.
        failure: why workers cannot be used.
    """

    load_seconds: float
    slowest_seconds: float
    worker_seconds: float | None
    worker_cpu_seconds: float
    receive_seconds: float
    start_seconds: float
    first_seconds: float
    worker_bytes: int
    batch_bytes: int
    is_pinned: bool
    step_seconds: float
    step_cpu_seconds: float
    blocked_seconds: float
    batches: int | None
    failure: str = ""


@dataclass
class _Here:
    """A run of the loader in this process."""

    load: float = 0.0
    slowest: float = 0.0
    step: float = 0.0
    step_cpu: float = 0.0
    size: int = 0
    pinned: bool = False


@dataclass
class _There:
    """A run of the loader with one worker."""

    seconds: float = 0.0
    cpu: float = 0.0
    receive: float = 0.0
    start: float = 0.0
    first: float = 0.0
    size: int = 0


def measured(
    loader: DataLoader[Any],
    step: Callable[[Any], Any] | None,
    timed_step: tuple[float, float] | None = None,
    blocked: float | None = None,
) -> LoaderCosts:
    """Returns what batches and steps cost. Random numbers go on as if nothing had run, and so do
    the samplers of torch; the dataset is a shallow copy, so that files that it opens lazily are
    not handed to workers later.

    Args:
        step: is called with batches, or None.
        timed_step: seconds of a step, of the clock and of processors, where they are known.
        blocked: seconds that a step waits for the loader, where they are known.
    """
    with loader_kept(loader):
        trials = _Trials(loader)
        here, there = [], []
        failure = ""
        now = settings_of(loader)
        for _ in range(2):  # the lesser of two is less of what else the machine does
            here.append(_in_this_process(trials.loader(Settings()), step))
            if failure:
                continue
            try:
                there.append(_in_a_worker(trials.loader(Settings(1, 2), _Stamped)))
            except Exception as error:  # of any type: whatever pickling or a worker raises
                lines = str(error).strip().splitlines() or [type(error).__name__]
                failure = lines[-1]
        if timed_step is None:
            timed_step = _least(here, "step"), _least(here, "step_cpu")
        step_seconds, step_cpu = timed_step
        if blocked is None:
            blocked = _least(here, "load")
            if now.num_workers:
                blocked = _blocked(trials.loader(now), step, step_seconds)
    try:
        batches = len(loader)
    except TypeError:
        batches = None
    return LoaderCosts(
        load_seconds=_least(here, "load"),
        slowest_seconds=_least(here, "slowest"),
        worker_seconds=None if failure else _least(there, "seconds"),
        worker_cpu_seconds=0.0 if failure else _least(there, "cpu"),
        receive_seconds=0.0 if failure else _least(there, "receive"),
        start_seconds=0.0 if failure else _least(there, "start"),
        first_seconds=0.0 if failure else _least(there, "first"),
        worker_bytes=0 if failure else max(one.size for one in there),
        batch_bytes=here[0].size,
        is_pinned=here[0].pinned,
        step_seconds=step_seconds,
        step_cpu_seconds=step_cpu,
        blocked_seconds=blocked,
        batches=batches,
        failure=failure,
    )


def _least(runs: list[Any], name: str) -> float:
    return min(getattr(run, name) for run in runs)


class _Trials:
    """Makes loaders of a few batches. Each takes other indices, as long as there are any, because
    what was read once is in the caches of the system."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader, self._at = loader, 0
        self._indices: list[Any] | None = None
        if not is_iterable(loader):
            sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
            self._indices = [*islice(iter(_own(sampler, "sampler")), 5 * MOST)]
            if not self._indices:
                raise ValueError("the loader has no batches")

    def loader(
        self, settings: Settings, collated: Callable[[Any], Any] | None = None
    ) -> DataLoader[Any]:
        chosen = self._indices
        if chosen is not None:
            at = self._at % len(chosen)
            chosen = (chosen[at:] + chosen[:at])[:MOST]
            self._at += MOST
            if len(chosen) < MOST:  # the same ones again, in a short epoch
                chosen = (chosen * MOST)[:MOST]
        made = with_settings(self._loader, settings, chosen)
        if hasattr(made, "next_iter_state"):
            made.next_iter_state = None  # a trial begins anew
        vars(made)["dataset"] = _own(self._loader.dataset, "dataset")
        if collated is not None:
            vars(made)["collate_fn"] = collated(made.collate_fn)
        return made


def _own(value: Any, inner: str) -> Any:
    """Returns a shallow copy of a sampler or a dataset and of those that it wraps, or the value
    where it cannot be copied."""
    try:
        made = copy.copy(value)
    except Exception:  # of any type: such as a generator, or a dataset that does not pickle
        return value
    if inner in getattr(made, "__dict__", {}):
        vars(made)[inner] = _own(vars(made)[inner], inner)
    return made


class _Stamped:
    """Adds to each batch the processor's time that the process which made it has taken."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> tuple[Any, float]:
        batch = self._collate(samples)
        return batch, time.process_time()


def _in_this_process(loader: DataLoader[Any], step: Callable[[Any], Any] | None) -> _Here:
    found, iterator = _Here(), iter(loader)
    loads: list[float] = []
    steps: list[tuple[float, float]] = []
    end = time.perf_counter() + SECONDS
    while len(loads) < 3 or time.perf_counter() < end:
        began = time.perf_counter()
        batch = next(iterator, None)
        if batch is None:
            break
        _touch(batch)
        loads.append(time.perf_counter() - began)
        if step is not None:
            began, cpu = time.perf_counter(), time.process_time()
            step(batch)
            _synchronize()
            steps.append((time.perf_counter() - began, time.process_time() - cpu))
        if len(loads) == 1:
            tensors = [*tensors_in(batch)]
            found.size = sum(x.nbytes for x in tensors)
            found.pinned = any(x.is_pinned() for x in tensors) if tensors else False
    if not loads:
        raise ValueError("the loader has no batches")
    loads = loads[1:] or loads  # the first one opens files
    steps = steps[1:] or steps  # and compiles, and makes the optimizer's state
    found.load, found.slowest = sum(loads) / len(loads), max(loads)
    if steps:
        found.step, found.step_cpu = map(statistics.median, zip(*steps))
    return found


def _in_a_worker(loader: DataLoader[Any]) -> _There:
    found = _There()
    began = time.perf_counter()
    iterator: Any = iter(loader)
    try:
        found.start = time.perf_counter() - began
        first_stamp = stamp = next(iterator)[1]
        came = first = time.perf_counter()
        waited, count = first - began - found.start, 0
        # The last batch is left: asking for more than there are ends the worker.
        while count < MOST - 2 and (count < 3 or came < first + SECONDS):
            cpu = time.thread_time()
            got = next(iterator, None)
            if got is None:
                break
            batch, stamp = got
            _touch(batch)
            found.receive += time.thread_time() - cpu
            count, came = count + 1, time.perf_counter()
        found.size = _private_bytes([worker.pid for worker in iterator._workers])
    finally:
        began = time.perf_counter()
        iterator._shutdown_workers()
        found.start += time.perf_counter() - began
    if not count:  # an epoch of one batch
        found.seconds = found.cpu = waited
        return found
    found.seconds, found.cpu = (came - first) / count, (stamp - first_stamp) / count
    found.receive /= count
    found.first = max(0.0, waited - found.seconds)
    return found


def _blocked(
    loader: DataLoader[Any], step: Callable[[Any], Any] | None, step_seconds: float
) -> float:
    """Returns how long a step waits for its batch, once the first batches are through."""
    iterator = iter(loader)
    waits: list[float] = []
    skipped = loader.num_workers * (loader.prefetch_factor or 2)  # which were made meanwhile
    end = time.perf_counter() + 2 * SECONDS
    while len(waits) < skipped + 3 or time.perf_counter() < end:
        began = time.perf_counter()
        batch = next(iterator, None)
        if batch is None:
            break
        waits.append(time.perf_counter() - began)
        if step is not None:
            step(batch)
            _synchronize()
        elif step_seconds:
            time.sleep(step_seconds)
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()
    waits = waits[skipped:] or waits[-1:]
    return sum(waits) / max(1, len(waits))


def _touch(batch: Any) -> None:
    """Reads a byte of each page, as what uses a batch will: memory that is shared with a worker is
    mapped then."""
    for x in tensors_in(batch):
        if type(x) is Tensor and x.device.type == "cpu" and x.layout is torch.strided:
            x.detach().contiguous().view(-1).view(torch.uint8)[::PAGE].sum()


def _synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _private_bytes(pids: list[int]) -> int:
    """Returns the memory that processes share with no other; 0 if the system does not say."""
    size = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            found = re.findall(r"^Private_\w+:\s+(\d+) kB", text, re.M)
            size += sum(int(kib) << 10 for kib in found)
    return size
