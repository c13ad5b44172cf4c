"""Profiles training steps: ``torch.profiler``, with our ranges, counts and files around it."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._autograd import _profiler_enabled
from torch.profiler import ProfilerAction, ProfilerActivity

from ..memory.track import checked, device_of
from .analysis import analyze
from .arguments import ListTypes
from .events import read
from .ranges import Ranges
from .result import ProfileResult
from .table import table
from .trace import write_result, write_trace

__all__ = ["Profile", "profile"]

_RECORDS = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
_NO_STEP = (
    "prof.step() was never called, so headroom.profile cannot tell where a step ends: call it at "
    "the end of each step of the loop"
)
_DISTURBED = (
    "another profiler, or headroom.memory.track or snapshot, began or ended its recording within "
    "headroom.profile, and torch allows one: nothing more is recorded; use them one after another"
)


def _others_wait() -> bool:
    """Returns whether a profiler was entered whose schedule waits: torch keeps no list of them."""
    kind = torch.profiler.profile  # by type(), because proxies may do anything when they are asked
    profilers = (each for each in gc.get_objects() if issubclass(type(each), kind))
    return any(each.step_rec_fn is not None for each in profilers)


class Profile:
    """Profiles training steps by phase, module and operation, with ``torch.profiler``.

    Example::

        model = torch.nn.Linear(64, 64)
        optimizer = headroom.optim.AdamW(model.parameters())
        with headroom.profile("runs/profile", model=model, optimizer=optimizer) as prof:
            for _ in range(6):
                loss = model(torch.randn(8, 64)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                prof.step()
        print(prof.table())

    Each cycle of the schedule writes ``rankR.C.pt.trace.json.gz``, which Perfetto, TensorBoard and
    chrome://tracing open, and ``rankR.C.profile.json`` (:mod:`headroom.profiling.result`). The
    trace has a range for each module that runs, and tracks of phases (:mod:`.phases`), of modules
    in the backward pass (:mod:`.events`), and of live bytes. What is computed again in the backward
    pass is named ``recompute: NAME``. FLOPs and bytes come from the shapes of arguments
    (:mod:`.work`).

    The steps compute the same bits as without. Steps that the schedule does not record have no
    hooks. In a model that ``torch.compile`` has compiled, a compiled region is one module; compile
    before the first recorded step, because what is compiled in one is compiled again after it. If
    the block raises, the cycle that was being recorded is written, and says so.

    Args:
        path: a folder for the files, made if it is missing; None writes none.
        model: whose modules get ranges. It, or a compiled or wrapped form of it, is trained.
        optimizer: or several, whose states are counted.
        schedule: as :func:`torch.profiler.schedule` makes them. By default a step is skipped, a
            step warms up, and three are recorded, once.
        on_trace_ready: called with the :class:`torch.profiler.profile` after a cycle's files have
            been written, as torch's handlers are.
        record_shapes: of arguments; without, there are no FLOPs and no bytes of operations.
        profile_memory: allocations; without, there are no bytes of modules.
        with_stack: lines of Python in the trace, which slows the steps down.
        peak_flops: of the device, in FLOP/s, for utilization. By default that of a table
            (:data:`headroom.profiling.PUBLISHED`), or measured with a short product.
        device: to look at, if the model is on several.

    Raises:
        TypeError: a model or an optimizer that is none; a schedule that is not callable.
        ValueError: ``peak_flops`` that is not positive; a model on the meta device or on several;
            an optimizer with parameters that the model does not have.
        RuntimeError: on entering, if a profiler runs or waits already; in ``step()``, if another
            one began or ended within.
        OSError: on entering, if the folder cannot be made; after a cycle, if its files could not be
            written. What the files were before is kept.

    Attributes:
        torch_profiler: the :class:`torch.profiler.profile` that records.
        results: a :class:`headroom.profiling.ProfileResult` for each cycle that has ended.
        files: the files that were written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
        schedule: Callable[[int], ProfilerAction] | None = None,
        on_trace_ready: Callable[[Any], Any] | None = None,
        record_shapes: bool = True,
        profile_memory: bool = True,
        with_stack: bool = False,
        peak_flops: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if peak_flops is not None and not peak_flops > 0:
            raise ValueError(f"peak_flops is {peak_flops}, wanted FLOP/s above 0, or None")
        if schedule is None:
            schedule = torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1)
        elif not callable(schedule):
            raise TypeError(
                f"schedule is {type(schedule).__name__}, wanted what torch.profiler.schedule(...) "
                "returns"
            )
        self._folder = None if path is None else Path(path)
        self._model = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
        self._optimizers = checked(self._model, optimizer)
        self._device = device_of(self._model, device)
        self._peak_flops, self._handler = peak_flops, on_trace_ready
        self._ranges = Ranges(self._model)
        settings = {
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
        }
        cuda = [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
        self._flags = {name: bool(value) for name, value in settings.items()}
        self._installed = self._ended = False
        self._steps: set[int] = set()  # that prof.step() has ended
        self._error: str | None = None
        self.results: list[ProfileResult] = []
        self.files: list[Path] = []
        self.torch_profiler = torch.profiler.profile(
            activities=[ProfilerActivity.CPU, *cuda],
            schedule=self._scheduled(schedule),
            on_trace_ready=self._ready,
            **settings,
        )

    # The context

    def __enter__(self) -> Profile:
        if self._ended:
            raise RuntimeError("this profile(...) has been used already: make another")
        if _profiler_enabled() or _others_wait():
            raise RuntimeError(
                "another profiler runs already, and torch allows one: end it before "
                "headroom.profile begins"
            )
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        try:
            self.torch_profiler.__enter__()
            self._follow()
        except BaseException:
            self._ranges.remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: Any) -> None:
        self._ended = True
        self._error = None if kind is None else kind.__name__
        self._ranges.remove()
        self._installed = False
        if self._is_disturbed():  # also after the error that step() raised
            if (open_range := self.torch_profiler.step_rec_fn) is not None:
                open_range.__exit__(None, None, None)
                self.torch_profiler.step_rec_fn = None
            if kind is None:
                raise RuntimeError(_DISTURBED)
            return
        try:
            self.torch_profiler.__exit__(kind, *raised)
        except Exception as error:
            if kind is None:
                raise
            # The exception of the block says what went wrong; this one must not take its place.
            warnings.warn(f"headroom.profile did not write its files: {error}", stacklevel=2)
        if kind is None and not self._steps:
            warnings.warn(_NO_STEP, stacklevel=2)

    def step(self) -> None:
        """Says that a step has ended. Call it at the end of each, once."""
        if self._ended:
            raise RuntimeError("prof.step() was called after the with block of headroom.profile")
        if self._is_disturbed():
            raise RuntimeError(_DISTURBED)
        self._steps.add(self.torch_profiler.step_num)
        if self._installed:
            self._ranges.remove()  # before the files are written, which may fail
            self._installed = False
        self.torch_profiler.step()
        self._follow()

    def _is_disturbed(self) -> bool:
        """Returns whether another profiler began or ended a recording. Torch would then write what
        is there no more, and end the process."""
        return _profiler_enabled() != (self.torch_profiler.current_action in _RECORDS)

    def _follow(self) -> None:
        """Adds the hooks when a recorded step begins."""
        if self.torch_profiler.current_action in _RECORDS and not self._installed:
            self._ranges.install()
            self._installed = True

    def _scheduled(
        self, schedule: Callable[[int], ProfilerAction]
    ) -> Callable[[int], ProfilerAction]:
        def action(step: int) -> ProfilerAction:
            return ProfilerAction.NONE if self._ended else schedule(step)

        return action

    # What was recorded

    def _ready(self, profiler: torch.profiler.profile) -> None:
        inner = profiler.profiler
        results = None if inner is None else inner.kineto_results
        if results is None:
            return
        rank, cycle = _rank(), len(self.results)
        recording = read(results.events(), self._ranges.labels)
        result = analyze(
            recording,
            self._model,
            self._optimizers,
            ListTypes(results.experimental_event_tree),
            self._steps,
            device=self._device,
            peak_flops=self._peak_flops,
            rank=rank,
            cycle=cycle,
            settings=self._flags,
        )
        result.ended_by = self._error
        result.complete = not self._ended
        self.results.append(result)
        if self._folder is not None:
            name = f"rank{rank}.{cycle}"
            trace = self._folder / f"{name}.pt.trace.json.gz"
            write_trace(trace, profiler.export_chrome_trace, recording)
            self.files.append(trace)
            result.trace = trace.name
            about = self._folder / f"{name}.profile.json"
            write_result(about, result)
            self.files.append(about)
        if self._handler is not None:
            self._handler(profiler)

    @property
    def result(self) -> ProfileResult:
        """Returns the result of the last cycle that has ended.

        Raises:
            RuntimeError: none has.
        """
        if self.results:
            return self.results[-1]
        if not self._ended:
            raise RuntimeError(
                "no cycle of the schedule has ended yet: read what was recorded after it has, or "
                "after the with block"
            )
        if not self._steps:
            raise RuntimeError(f"nothing was recorded: {_NO_STEP}")
        raise RuntimeError(
            f"nothing was recorded in {len(self._steps)} steps: the schedule waits for more; give "
            "schedule=torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns what was recorded in the last cycle; see :mod:`headroom.profiling.result`."""
        return self.result.to_dict()

    def table(self, *, rows: int = 16, width: int | None = None, merge: bool = True) -> str:
        """Returns where time and memory go, as text that fits a terminal.

        Args:
            rows: how many modules and how many operations are shown at most.
            width: in characters; that of the terminal, from 80 to 120, unless given.
            merge: adds up modules whose names differ in numbers alone, as ``blocks.*.mlp``.
        """
        return table(self.result, rows=rows, width=width, merge=merge)

    def __str__(self) -> str:
        return self.table()


def _rank() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ.get("RANK", "0")) if os.environ.get("RANK", "0").isdigit() else 0


profile = Profile
