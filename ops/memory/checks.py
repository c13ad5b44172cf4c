"""Assertions about memory, for tests."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from .._core.grouping import grouped
from .._core.sizes import format_bytes, parse_bytes
from .events import Allocation, Timeline
from .track import Tracked, checked, device_of

__all__ = [
    "GrowthError",
    "PeakMemoryError",
    "assert_no_growth",
    "assert_peak_below",
]


class PeakMemoryError(AssertionError):
    """More memory was live at once than allowed. :attr:`timeline` holds who owned it."""

    def __init__(self, message: str, timeline: Timeline) -> None:
        super().__init__(message)
        self.timeline = timeline


class GrowthError(AssertionError):
    """Each step left memory behind. :attr:`allocations` holds what is left."""

    def __init__(self, message: str, allocations: list[Allocation]) -> None:
        super().__init__(message)
        self.allocations = allocations


def _ran(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function and returns what it does, unless that is code that has yet to run."""
    result = function(*args, **kwargs)
    if isinstance(result, (types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType)):
        if hasattr(result, "close"):
            result.close()
        raise TypeError(
            f"{getattr(function, '__name__', function)!s} returned a {type(result).__name__}, "
            "whose code has not run: give a function that runs it to its end, or write "
            "`with headroom.memory.assert_peak_below(...)` within it"
        )
    return result


class assert_peak_below(contextlib.ContextDecorator):  # noqa: N801
    """Raises if more than ``limit`` bytes are live at once in the block or function.

    Example::

        with headroom.memory.assert_peak_below("1 MiB"):
            torch.ones(1000, 100).sum()

        @headroom.memory.assert_peak_below("1 MiB")
        def step():
            torch.ones(1000, 100).sum()

        step()

    and for pytest ``@pytest.mark.peak_memory("1 MiB")``, with the same arguments.

    What existed before is not counted, except for what belongs to the model and the optimizer if
    they are given. Of an error within the block nothing is hidden: it is raised as it is.

    Args:
        limit: bytes, or text such as ``"2 GiB"``.
        model, optimizer: as in :func:`track`; they are counted, and named in the report.
        device: to look at; that of the model, else the CPU, and what is allocated on each GPU,
            whose peak in torch's statistics begins anew.
        top: how many owners the report names.

    Raises:
        TypeError: an ``async`` function or a generator, whose code runs after the call.
        PeakMemoryError: an AssertionError whose text shows kinds and owners at the peak.
    """

    def __init__(
        self,
        limit: int | float | str,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
        *,
        device: torch.device | str | None = None,
        top: int = 10,
    ) -> None:
        self.limit = parse_bytes(limit, "limit")
        self._optimizers = [] if model is None else checked(model, optimizer)
        self._model, self._top = nn.Module() if model is None else model, top
        self._device = device_of(self._model, "cpu" if device is None and model is None else device)
        self._looks_at_gpus = device is None and model is None
        self._on_gpus: list[int] = []
        self._tracked: Tracked | None = None

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return super().__call__(functools.wraps(function)(functools.partial(_ran, function)))

    def _recreate_cm(self) -> assert_peak_below:
        arguments = self._model, self._optimizers
        made = type(self)(self.limit, *arguments, device=self._device, top=self._top)
        made._looks_at_gpus = self._looks_at_gpus
        return made

    def __enter__(self) -> Tracked:
        self._tracked = Tracked(self._model, self._optimizers, self._device, None, True)
        if self._looks_at_gpus:
            self._on_gpus = _allocated_on_gpus()
            for gpu in range(len(self._on_gpus)):
                torch.cuda.reset_peak_memory_stats(gpu)
        return self._tracked.__enter__()

    def __exit__(self, kind: Any, *raised: Any) -> None:
        __tracebackhide__ = True
        assert self._tracked is not None
        self._tracked.__exit__(kind, *raised)
        peak = self._tracked.peak_bytes
        if kind is None and peak > self.limit:
            over = format_bytes(peak - self.limit)
            raise PeakMemoryError(
                f"{format_bytes(peak)} were live at once, {over} more than the limit of "
                f"{format_bytes(self.limit)}\n\n{self._tracked.timeline.table(self._top)}",
                self._tracked.timeline,
            )
        peaks = _allocated_on_gpus(torch.cuda.max_memory_allocated) if self._looks_at_gpus else []
        for gpu, (before, most) in enumerate(zip_longest(self._on_gpus, peaks, fillvalue=0)):
            if kind is None and most - before > self.limit:
                raise PeakMemoryError(
                    f"{format_bytes(most - before)} were live at once on cuda:{gpu}, wanted at "
                    f"most {format_bytes(self.limit)}; device='cuda:{gpu}' shows whose they are",
                    self._tracked.timeline,
                )


def assert_no_growth(
    step: Callable[[], Any] | None = None,
    *,
    steps: int = 5,
    warmup: int = 2,
    tolerance: int | str = 0,
    device: torch.device | str | None = None,
) -> Any:
    """Runs a step again and again, and raises if each time leaves more memory behind.

    Example::

        headroom.memory.assert_no_growth(lambda: torch.ones(100).sum(), steps=5)

        @headroom.memory.assert_no_growth(steps=5)
        def test_a_step():
            torch.ones(100).sum()

    What a later step frees or replaces is no growth, neither is what only the warm-up makes, such
    as an optimizer's state. The return values are dropped.

    Args:
        step: a function without arguments; without it, a decorator is returned.
        steps: how many are compared, at least 2.
        warmup: how many run before.
        tolerance: bytes per step that may stay.
        device: whose memory to look at; else that of the CPU, and what is allocated on each GPU.

    Raises:
        TypeError: an ``async`` function or a generator, whose code runs after the call.
        GrowthError: an AssertionError that names the lines that allocated what stays, or the GPU.
    """
    if steps < 2 or warmup < 0:
        raise ValueError(f"steps={steps}, warmup={warmup}; wanted at least 2 and 0")
    if step is None:
        check = functools.partial(
            assert_no_growth, steps=steps, warmup=warmup, tolerance=tolerance, device=device
        )

        def decorator(function: Callable[..., Any]) -> Callable[..., None]:
            @functools.wraps(function)
            def run(*args: Any, **kwargs: Any) -> None:
                check(functools.partial(function, *args, **kwargs))

            return run

        return decorator
    place, on_gpus = torch.device("cpu" if device is None else device), list[list[int]]()
    with Tracked(nn.Module(), [], place, None, True) as tracked:
        for _ in range(warmup + steps):
            on_gpus.append(_allocated_on_gpus() if device is None else [])
            tracked.watch.begin_step()
            _ran(step)
    # The last step's may be freed by the next, as those of each step before were.
    compared, found = range(warmup, warmup + steps - 1), tracked.timeline.allocations
    left = [a for a in found if a.end is None and a.step in compared]
    per_step = sum(a.bytes for a in left) / (steps - 1)
    if per_step > parse_bytes(tolerance, "tolerance"):
        raise GrowthError(_growth(left, per_step, steps - 1), left)
    # Before the first step that is compared, and before the last.
    for gpu, (before, after) in enumerate(zip_longest(on_gpus[warmup], on_gpus[-1], fillvalue=0)):
        if (per_step := (after - before) / (steps - 1)) > parse_bytes(tolerance, "tolerance"):
            raise GrowthError(
                f"each of {steps - 1} steps left {format_bytes(per_step)} behind on cuda:{gpu}, on "
                f"average; device='cuda:{gpu}' names the lines",
                [],
            )
    return None


def _allocated_on_gpus(what: Callable[[int], int] = torch.cuda.memory_allocated) -> list[int]:
    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    return [what(gpu) for gpu in range(count)]


def _growth(left: list[Allocation], per_step: float, steps: int) -> str:
    groups = grouped(left, lambda a: (a.op, a.stack))
    lines = [f"each of {steps} steps left {format_bytes(per_step)} behind, on average"]
    ordered = sorted(groups.items(), key=lambda item: -sum(a.bytes for a in item[1]))
    for (op, stack), group in ordered[:5]:
        size = format_bytes(sum(a.bytes for a in group))
        in_steps = len({a.step for a in group})
        lines.append(f"  {size} in {len(group)} pieces, of {in_steps} steps, by {op or 'Python'}")
        lines += [f"      {line}" for line in stack] or ["      (no line of Python)"]
    if len(ordered) > 5:
        lines.append(f"  and {len(ordered) - 5} more")
    return "\n".join(lines)
