"""Times the steps of a loader with some settings."""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..step.pytree import tensors_in
from .settings import Settings, is_iterable, with_settings

__all__ = ["LoaderTrial", "Trials"]

SECONDS = 0.7  # that a trial is timed, unless three steps take longer
ROUNDS = 2  # the lesser of two trials is less of what else the machine does
MOST = 64  # steps of a trial that are timed
EPOCHS = 3  # that a run has, at least, so that workers which persist are started for so many
PAGE = 4096


@dataclass(frozen=True)
class LoaderTrial:
    """The times of some settings.

    Attributes:
        settings: that were tried.
        steady_seconds: of a step in the middle of an epoch, its waiting counted in.
        work_seconds: of a step without its waiting.
        start_seconds: to start the workers, and to end them.
        first_seconds: that the first step waits for its batch.
    """

    settings: Settings
    steady_seconds: float
    work_seconds: float
    start_seconds: float
    first_seconds: float

    def seconds(self, batches: int | None) -> float:
        """Returns the seconds of a step of an epoch of so many batches, with its share of what the
        start of workers takes."""
        if not batches or not self.settings.num_workers:
            return self.steady_seconds
        start = self.start_seconds / (EPOCHS if self.settings.persistent_workers else 1)
        return self.steady_seconds + (start + self.first_seconds) / batches


class Trials:
    """Times steps with the batches of a loader. Each trial takes other samples, as long as there
    are any, because what was read once is in the caches of the system.

    Args:
        loader: whose batches they are.
        step: what is made of a batch.

    Attributes:
        loader: whose batches they are.
        batches: of an epoch; None: not known.
        batch_bytes: of the tensors of a batch.
        is_pinned: whether they are in pinned memory.
    """

    def __init__(self, loader: DataLoader[Any], step: Callable[[Any], Any]) -> None:
        self.loader, self._step, self._at = loader, step, 0
        self._indices: list[Any] | None = None
        if not is_iterable(loader):
            sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
            self._indices = [*islice(iter(_own(sampler, "sampler")), 5 * MOST)]
        first = next(iter(self._made(Settings(), 1)), None)
        if first is None:
            raise ValueError("the loader has no batches")
        tensors = [*tensors_in(first)]
        self.batch_bytes = sum(x.nbytes for x in tensors)
        self.is_pinned = any(x.is_pinned() for x in tensors)
        try:
            self.batches = len(loader)
        except TypeError:
            self.batches = None

    def tried(self, settings: Settings) -> LoaderTrial:
        """Returns the times of some settings."""
        ahead = settings.num_workers * (settings.prefetch_factor or 0)
        with warnings.catch_warnings():
            # More workers than processors pay where they wait.
            warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
            found = [
                _timed(self._made(settings, ahead + MOST), self._step, ahead) for _ in range(ROUNDS)
            ]
        return LoaderTrial(settings, *map(min, zip(*found)))

    def _made(self, settings: Settings, count: int) -> DataLoader[Any]:
        """Returns a loader of so many batches."""
        chosen = self._indices
        if chosen:
            at = self._at % len(chosen)
            self._at += count
            again = 1 + (at + count) // len(chosen)  # in a short epoch the same ones again
            chosen = (chosen * again)[at : at + count]
        made = with_settings(self.loader, settings, chosen)
        if hasattr(made, "next_iter_state"):
            made.next_iter_state = None  # a trial begins anew
        vars(made)["dataset"] = _own(self.loader.dataset, "dataset")
        return made


def _timed(
    loader: DataLoader[Any], step: Callable[[Any], Any], ahead: int
) -> tuple[float, float, float, float]:
    """Returns the seconds of a step, those without its waiting, those to start and end workers, and
    those that the first step waits. The batches that were made ahead are not timed."""
    began = time.perf_counter()
    iterator: Any = iter(loader)
    start = time.perf_counter() - began
    waits: list[float] = []
    works: list[float] = []
    try:
        for batch in _noted(iterator, waits):
            ended = time.perf_counter()
            step(batch)
            _synchronize()
            works.append(time.perf_counter() - ended)
            timed = len(works) - 1 - ahead
            if timed >= 3 and sum(waits[-timed:]) + sum(works[-timed:]) > SECONDS:
                break
    finally:
        began = time.perf_counter()
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()
        start += time.perf_counter() - began
    # The first step opens files, compiles, and makes the optimizer's state.
    skipped = min(1 + ahead, len(works) - 1)
    work = statistics.median(works[skipped:])
    return statistics.mean(waits[skipped:]) + work, work, start, waits[0]


def _noted(iterator: Iterator[Any], waits: list[float]) -> Iterator[Any]:
    """Yields the batches, and notes how long each was waited for."""
    while True:
        began = time.perf_counter()
        batch = next(iterator, None)
        if batch is None:
            return
        _touch(batch)
        waits.append(time.perf_counter() - began)
        yield batch


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


def _touch(batch: Any) -> None:
    """Reads a byte of each page, as what uses a batch will: memory that is shared with a worker is
    mapped then."""
    for x in tensors_in(batch):
        if type(x) is Tensor and x.device.type == "cpu" and x.layout is torch.strided:
            x.detach().contiguous().view(-1).view(torch.uint8)[::PAGE].sum()


def _synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
