"""Says which settings a loader should have: :func:`advise`, and :func:`tuned`, which sets them."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from .._core.available import allowed_cpus, host_headroom
from .._core.sizes import format_bytes
from ..profiling import Profile, ProfileResult
from .costs import LoaderCosts, measured
from .model import Host, Model
from .settings import Settings, check_loader, is_iterable, settings_of, with_settings

__all__ = ["LoaderAdvice", "advise", "tuned"]

WIDTH = 80
RULE = 4  # workers per GPU


@dataclass(frozen=True)
class LoaderAdvice:
    """The settings that a loader should have, and why. Prints as text.

    Attributes:
        settings: that are advised.
        current: what the loader has.
        seconds: of a step with the advised settings, as predicted: its waiting and its share of
            what the start of workers takes are counted in.
        current_seconds: the same with the current settings.
        rule_seconds: the same with four workers per GPU, a common rule.
        saved_seconds: of an epoch, by changing the settings; None: its length is not known.
        host_bytes: of the host that workers and their batches take with the advised settings.
        pinned_bytes: that are pinned besides.
        cpus: processors whose time this process may take, by its affinity and its cgroup's quota.
        costs: what was measured.
        reasons: sentences.
    """

    settings: Settings
    current: Settings
    seconds: float
    current_seconds: float
    rule_seconds: float | None
    saved_seconds: float | None
    host_bytes: int
    pinned_bytes: int
    cpus: float
    costs: LoaderCosts
    reasons: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Returns the advice in what :mod:`json` writes."""
        return {"format": "headroom.loader/1", **asdict(self), "reasons": [*self.reasons]}

    def __str__(self) -> str:
        costs = self.costs
        share = costs.blocked_seconds / max(costs.blocked_seconds + costs.step_seconds, 1e-12)
        rows = [
            ("advised", str(self.settings)),
            ("now", str(self.current)),
            ("a step", f"{_time(self.seconds)}, now {_time(self.current_seconds)}"),
            ("waits now", f"{_time(costs.blocked_seconds)} of each step, {share:.0%} of its time"),
            ("a batch", f"{_time(costs.load_seconds)} here, {format_bytes(costs.batch_bytes)}"),
            ("host memory", f"{format_bytes(self.host_bytes)} for workers and their batches"),
        ]
        if self.rule_seconds is not None:
            rows.insert(3, ("4 per GPU", f"{_time(self.rule_seconds)} a step"))
        if self.pinned_bytes:
            rows.append(("pinned", format_bytes(self.pinned_bytes)))
        if self.saved_seconds is not None:
            rows.append(("saves", f"{_time(self.saved_seconds)} of an epoch"))
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
    """Measures a loader for a few seconds, and returns the settings that it should have.

    Batches are made in this process and in a worker, on other samples each time. From what they
    take, the time of a step is predicted for each number of workers: with the lock of the
    interpreter, native threads, the copies of large batches from worker to worker, what workers
    take to start in each epoch, the processors that affinity and cgroup leave, and the memory of
    the host. The settings of the fewest workers are returned that at most 3 % can be gained on.

    Example::

        loader = torch.utils.data.DataLoader(torch.randn(256, 8), batch_size=16)
        print(headroom.data.advise(loader, step=lambda batch: batch.square().sum()))

    The loader and random numbers go on as if nothing had run. The sampler is iterated once on a
    shallow copy, the dataset is read through one.

    Args:
        loader: a :class:`torch.utils.data.DataLoader`, or a subclass such as torchdata's
            ``StatefulDataLoader``.
        step: what is made of a batch: a function, which is called with batches for some seconds,
            so that it should train a copy; or the seconds of a step; or a
            :func:`headroom.profile` or its result, which know how long steps took and how long
            they waited. None: nothing, so that the loader should be as fast as it can be.
        root: below which files of the system are read.

    Raises:
        TypeError: a loader or a step that is none; says what to give.
        ValueError: the loader has no batches, or ``step`` is negative or has recorded none.
    """
    check_loader(loader)
    run, timed, blocked = _step_of(step)
    costs = measured(loader, run, timed, blocked)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    ranks = int(local) if local.isdigit() and int(local) else 1
    free = min(host_headroom(root).values(), default=None)
    shared = _shared_bytes(root)
    host = Host(
        allowed_cpus(root) / ranks,
        None if free is None else free // ranks,
        None if shared is None else shared // ranks,
        max(1, gpus // ranks),
    )
    busy = os.getloadavg()[0]
    others = ()
    if busy > 1 + (os.cpu_count() or 1):
        others = (
            f"Other programs keep this machine busy, at a load of {busy:.1f}: on an idle one "
            "batches take less time, and wait less for processors.",
        )
    return _advised(loader, costs, host, gpus > 0, others)


def _advised(
    loader: DataLoader[Any],
    costs: LoaderCosts,
    host: Host,
    has_gpu: bool,
    remarks: tuple[str, ...] = (),
) -> LoaderAdvice:
    """Returns the advice that costs lead to. Remarks are reasons besides."""
    current, reasons = settings_of(loader), [*remarks]
    least = 0
    if loader.worker_init_fn is not None and current.num_workers:
        least = 1
        reasons.append("The loader has a worker_init_fn, which only workers call.")
    can_persist = not hasattr(loader.dataset, "set_epoch")
    model = Model(costs, host, least, can_persist)
    pins = has_gpu and not costs.is_pinned
    if is_iterable(loader):
        best = model.settings(current.num_workers, pins)
        reasons.append(
            "The dataset is iterable: which samples come, and in which order, depends on the "
            "number of workers, which stays."
        )
    else:
        best = model.best(pins)
    if best.num_workers or not is_iterable(loader):
        reasons += _reasons(model, best, can_persist)
    if has_gpu:
        pinned = "are pinned already" if costs.is_pinned else "are copied to a GPU"
        reasons.append(f"Batches {pinned}: copies from pinned memory run beside the step.")
    elif current.pin_memory:
        reasons.append("There is no GPU that pinned memory would be copied to.")
    seconds, now = (_known(model, one) for one in (best, current))
    rule = RULE * host.gpus
    saved = None
    if costs.batches is not None:
        saved = costs.batches * (now - seconds)
    return LoaderAdvice(
        settings=best,
        current=current,
        seconds=seconds,
        current_seconds=now,
        rule_seconds=_known(model, current.but(num_workers=rule)) if not costs.failure else None,
        saved_seconds=saved,
        host_bytes=model.host_bytes(best),
        pinned_bytes=model.pinned_bytes(best),
        cpus=host.cpus,
        costs=costs,
        reasons=tuple(reasons),
    )


def _known(model: Model, settings: Settings) -> float:
    if settings.num_workers and model.costs.worker_seconds is None:
        return model.costs.step_seconds + model.costs.blocked_seconds
    return model.seconds(settings)


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


def _step_of(
    step: Any,
) -> tuple[Callable[[Any], Any] | None, tuple[float, float] | None, float | None]:
    """Returns the function of a step; or the seconds that it takes, of the clock and of processors,
    and those that it waits."""
    if isinstance(step, Profile):
        step = step.result
    if isinstance(step, ProfileResult):
        if not step.steps:
            raise ValueError("step is a profile that recorded no steps")
        count = len(step.steps)
        data = sum(row.phases_us["data"] for row in step.steps)
        wall = sum(row.wall_us for row in step.steps)
        waits = sum(row.loader_us for row in step.steps) / count * 1e-6
        seconds = (wall - data) / count * 1e-6
        threads = torch.get_num_threads() if step.device["type"] == "cpu" else 1
        return None, (seconds, threads * seconds), waits
    if step is None or callable(step):
        return step, None, None
    if isinstance(step, bool) or not isinstance(step, (int, float)):
        raise TypeError(
            f"step is {type(step).__name__}, wanted a function of a batch, seconds, a profile or "
            "None"
        )
    if not step >= 0:
        raise ValueError(f"step is {step} seconds, wanted 0 or more")
    return None, (float(step), float(step)), None  # a processor starts the work of a GPU


def _reasons(model: Model, best: Settings, can_persist: bool) -> list[str]:
    """Returns why so many workers are best, as sentences."""
    costs, host, found = model.costs, model.host, []
    if costs.failure:
        return [f"Workers cannot be used: {costs.failure}"]
    assert costs.worker_seconds is not None
    load, worker = _time(costs.load_seconds), _time(costs.worker_seconds)
    cpus = f"{host.cpus:.4g} processor{'s' * (host.cpus != 1)}"
    workers = best.num_workers
    if not workers:
        one = model.seconds(model.settings(1, False))
        small = costs.load_seconds <= 0.05 * costs.step_seconds
        why = (
            f"which is little beside a step of {_time(costs.step_seconds)}"
            if small
            else f"and a step takes {_time(one)} with a worker, by what it takes to start and to "
            f"send a batch, and {_time(model.seconds(best))} without, on {cpus}"
        )
        found.append(f"A batch takes {load} to make in this process, {why}.")
    else:
        waits = max(0.0, costs.worker_seconds - costs.worker_cpu_seconds)
        found.append(
            f"A worker takes {worker} for a batch, its way through shared memory counted in, and "
            f"a step {_time(costs.step_seconds)} without waiting: {workers} "
            f"worker{'s' * (workers > 1)} on {cpus}."
        )
        if waits > 0.5 * costs.worker_seconds:
            found.append(
                f"For {waits / costs.worker_seconds:.0%} of it the worker waits, such as for "
                "files, and needs no processor."
            )
        if model.step_seconds(workers) > 1.03 * (costs.step_seconds + costs.receive_seconds):
            found.append(
                f"Steps still wait {_time(model.step_seconds(workers) - costs.step_seconds)}: more "
                "workers have no processors or memory, so make the batch cheaper."
            )
        if (best.prefetch_factor or 2) > 2:
            found.append(
                f"The slowest batch took {_time(costs.slowest_seconds)}, which "
                f"{workers * (best.prefetch_factor or 2)} batches made ahead bridge."
            )
        if best.prefetch_factor == 1:
            found.append("There is memory for one batch per worker ahead.")
        if best.persistent_workers:
            start = workers * costs.start_seconds + costs.first_seconds
            found.append(
                f"To start and end the workers takes {_time(start)} of each epoch, so that they "
                "should persist."
            )
        elif not can_persist:
            found.append("The dataset has set_epoch, which workers that persist would not see.")
    return found


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
