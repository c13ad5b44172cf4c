"""Says which settings a loader should have, by a trial of each: :func:`advise`, and :func:`tuned`,
which sets them."""

from __future__ import annotations

import math
import os
import textwrap
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from .._core.available import allowed_cpus, host_headroom
from .._core.randomness import loader_kept
from .._core.sizes import format_bytes
from ..profiling import Profile, ProfileResult
from .settings import Settings, check_loader, is_iterable, settings_of, with_settings
from .trials import LoaderTrial, Trials

__all__ = ["LoaderAdvice", "advise", "tuned"]

WIDTH = 80
WORTH = 0.03  # of the time; what gains less is not worth another worker


@dataclass(frozen=True)
class LoaderAdvice:
    """The settings that a loader should have, and why. Prints as text.

    Attributes:
        settings: that are advised.
        current: what the loader has.
        seconds: of a step with the advised settings: its waiting and its share of what the start of
            workers takes are counted in.
        current_seconds: the same with the current settings.
        saved_seconds: of an epoch, by changing the settings; None: its length is not known.
        batch_bytes: of the tensors of a batch.
        trials: what was measured.
        reasons: sentences.
    """

    settings: Settings
    current: Settings
    seconds: float
    current_seconds: float
    saved_seconds: float | None
    batch_bytes: int
    trials: tuple[LoaderTrial, ...]
    reasons: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Returns the advice in what :mod:`json` writes."""
        return {
            "format": "headroom.loader/2",
            **asdict(self),
            "trials": [asdict(trial) for trial in self.trials],
            "reasons": [*self.reasons],
        }

    def __str__(self) -> str:
        ahead = self.settings.num_workers * (self.settings.prefetch_factor or 0)
        rows = [
            ("advised", str(self.settings)),
            ("now", str(self.current)),
            ("a step", f"{_time(self.seconds)}, now {_time(self.current_seconds)}"),
            ("a batch", f"{format_bytes(self.batch_bytes)}, {ahead} of them ahead"),
        ]
        if self.saved_seconds is not None:
            rows.append(("saves", f"{_time(self.saved_seconds)} of an epoch"))
        for trial in self.trials:
            waits = max(0.0, trial.steady_seconds - trial.work_seconds)
            rows.append(
                (
                    f"{trial.settings.num_workers} worker{'s' * (trial.settings.num_workers != 1)}",
                    f"a step {_time(trial.steady_seconds)}, of which it waits {_time(waits)}; "
                    f"their start {_time(trial.start_seconds + trial.first_seconds)}",
                )
            )
        lines = [f"{name:<12}{value}" for name, value in rows]
        for reason in self.reasons:
            lines += textwrap.wrap(f"- {reason}", WIDTH, subsequent_indent="  ")
        return "\n".join(lines)


def advise(
    loader: DataLoader[Any],
    step: Callable[[Any], Any] | float | Profile | ProfileResult | None = None,
    *,
    root: Path = Path("/"),
) -> LoaderAdvice:
    """Tries settings of a loader for some seconds, and returns those that it should have.

    Steps are timed with batches of this process, of one worker, of two, of four and so on, on other
    samples each time, until more workers gain nothing: at most four for each processor that
    affinity and cgroup leave, and as many as there is memory for the batches that they make ahead.
    The settings of the fewest workers are returned that at most 3 % can be gained on.

    Example::

        loader = torch.utils.data.DataLoader(torch.randn(256, 8), batch_size=16)
        print(headroom.data.advise(loader, step=lambda batch: batch.square().sum()))

    The loader and random numbers go on as if nothing had run. The sampler is iterated once on a
    shallow copy, the dataset is read through one.

    Args:
        loader: a :class:`torch.utils.data.DataLoader`, or a subclass such as torchdata's
            ``StatefulDataLoader``.
        step: what is made of a batch: a function, which is called with batches for some seconds,
            so that it should train a copy; or the seconds of a step, or a
            :func:`headroom.profile` or its result, which knows them: so long a trial sleeps, as
            the host does while a GPU computes. None: nothing, so that the loader should be as fast
            as it can be.
        root: below which files of the system are read.

    Raises:
        TypeError: a loader or a step that is none; says what to give.
        ValueError: the loader has no batches, or ``step`` is negative or has recorded none.
    """
    check_loader(loader)
    run = _step_of(step)
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    ranks = int(ranks) if ranks.isdigit() and int(ranks) else 1
    known = [*host_headroom(root).values(), _shared_bytes(root)]
    room = min((size // ranks for size in known if size is not None), default=None)
    with loader_kept(loader):
        trials = Trials(loader, run)
        most = max(4, math.ceil(4 * allowed_cpus(root) / ranks))
        return _advised(trials, room, most, torch.cuda.is_available())


def _advised(trials: Trials, room: int | None, most_workers: int, has_gpu: bool) -> LoaderAdvice:
    """Returns the advice that trials lead to.

    Args:
        room: bytes of the host that there are for batches; None: not known.
        most_workers: that are tried.
        has_gpu: whether batches are copied to one.
    """
    loader, reasons = trials.loader, []
    done: list[LoaderTrial] = []
    current = settings_of(loader)
    base = Settings(pin_memory=has_gpu and not trials.is_pinned)
    counts = [0, *(2**k for k in range(most_workers.bit_length()) if 2**k <= most_workers)]
    if is_iterable(loader):
        counts = [current.num_workers]
        reasons.append(
            "The dataset is iterable: which samples come, and in which order, depends on the "
            "number of workers, which stays."
        )
    elif loader.worker_init_fn is not None and current.num_workers:
        counts = counts[1:]
        reasons.append("The loader has a worker_init_fn, which only workers call.")
    for workers in counts:
        settings = _with_room(base.but(num_workers=workers), trials.batch_bytes, room)
        if settings is None:
            reasons.append(f"There is no memory for the batches of {workers} workers.")
            break
        try:
            done.append(trials.tried(settings))
        except Exception as error:  # of any type: whatever pickling or a worker raises
            if not workers:
                raise
            lines = str(error).strip().splitlines() or [type(error).__name__]
            reasons.append(f"Workers cannot be used: {lines[-1]}")
            break
        if _is_enough(done):
            break
    now = next((trial for trial in done if trial.settings == current), None)
    if now is None:
        alike = [x for x in done if x.settings.but(pin_memory=current.pin_memory) == current]
        now = alike[0] if alike else trials.tried(current)
    best = _best(done or [now], trials)
    if best.settings.persistent_workers:
        took = _time(best.start_seconds)
        reasons.append(
            f"To start and end the workers takes {took} of each epoch, so that they should persist."
        )
    if has_gpu:
        pinned = "are pinned already" if trials.is_pinned else "are copied to a GPU"
        reasons.append(f"Batches {pinned}: copies from pinned memory run beside the step.")
    elif current.pin_memory:
        reasons.append("There is no GPU that pinned memory would be copied to.")
    seconds, before = best.seconds(trials.batches), now.seconds(trials.batches)
    return LoaderAdvice(
        settings=best.settings,
        current=current,
        seconds=seconds,
        current_seconds=before,
        saved_seconds=None if trials.batches is None else trials.batches * (before - seconds),
        batch_bytes=trials.batch_bytes,
        trials=tuple(done if now in done else [*done, now]),
        reasons=tuple(reasons),
    )


def _with_room(settings: Settings, batch_bytes: int, room: int | None) -> Settings | None:
    """Returns the settings with as many batches ahead as there is memory for."""
    for factor in (settings.prefetch_factor or 0, 1):
        ahead = settings.num_workers * factor * batch_bytes
        if room is None or ahead <= room:
            return settings.but(prefetch_factor=factor)
    return None


def _is_enough(trials: list[LoaderTrial]) -> bool:
    """Returns whether more workers than those of the last trial are not worth one."""
    last = trials[-1]
    waits = last.steady_seconds - last.work_seconds
    if waits <= WORTH * last.steady_seconds:
        return True
    before = min((x.steady_seconds for x in trials[:-1]), default=math.inf)
    return last.settings.num_workers > 1 and last.steady_seconds > (1 - WORTH) * before


def _best(done: list[LoaderTrial], trials: Trials) -> LoaderTrial:
    """Returns the trial of the fewest workers that nearly none is faster than."""
    each = []
    for trial in done:
        lasting = replace(trial, settings=trial.settings.but(persistent_workers=True))
        gain = 1 - lasting.seconds(trials.batches) / max(trial.seconds(trials.batches), 1e-12)
        can_persist = not hasattr(trials.loader.dataset, "set_epoch")
        each.append(lasting if can_persist and gain > WORTH / 3 else trial)
    fastest = min(trial.seconds(trials.batches) for trial in each)
    return next(x for x in each if x.seconds(trials.batches) <= (1 + WORTH) * fastest)


def tuned(
    loader: DataLoader[Any],
    advice: LoaderAdvice | None = None,
    *,
    step: Callable[[Any], Any] | float | Profile | ProfileResult | None = None,
) -> DataLoader[Any]:
    """Returns a loader with the settings that :func:`advise` advises.

    It is a copy of the same class, with the same dataset, samplers, generator and functions, and
    gives the same batches in the same order. What the dataset draws at random in workers depends
    on their number, as ever in torch, and for workers that persist torch draws a seed once, and not
    in each epoch: shuffles after the first are others then.

    Example::

        loader = torch.utils.data.DataLoader(torch.randn(256, 8), batch_size=16, shuffle=True)
        loader = headroom.data.tuned(loader, step=0.010)

    Args:
        loader: as in :func:`advise`.
        advice: what it returned; None: it is asked.
        step: as in :func:`advise`.

    Raises:
        TypeError: as :func:`advise`.
        ValueError: as :func:`advise`; or the loader is in the middle of an epoch that it must go on
            with.
    """
    check_loader(loader)
    if getattr(loader, "next_iter_state", None) is not None:
        raise ValueError(
            "the loader was given a state to go on from, which fits its number of workers alone: "
            "call tuned() before load_state_dict(), and save no states before it"
        )
    if advice is None:
        advice = advise(loader, step)
    elif not isinstance(advice, LoaderAdvice):
        raise TypeError(
            f"advice is {type(advice).__name__}, wanted what headroom.data.advise() returns, or "
            "step= for what is made of a batch"
        )
    return with_settings(loader, advice.settings)


def _step_of(step: Any) -> Callable[[Any], Any]:
    """Returns a function of a batch that takes as long as a step."""
    if isinstance(step, Profile):
        step = step.result
    if isinstance(step, ProfileResult):
        if not step.steps:
            raise ValueError("step is a profile that recorded no steps")
        step = (
            sum(row.wall_us - row.phases_us["data"] for row in step.steps) / len(step.steps) * 1e-6
        )
    if callable(step):
        return step
    seconds = 0.0 if step is None else step
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(
            f"step is {type(step).__name__}, wanted a function of a batch, seconds, a profile or "
            "None"
        )
    if not seconds >= 0:
        raise ValueError(f"step is {seconds} seconds, wanted 0 or more")
    return lambda batch: time.sleep(seconds) if seconds else None


def _shared_bytes(root: Path) -> int | None:
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError:
        return None
    return found.f_frsize * found.f_bavail


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
