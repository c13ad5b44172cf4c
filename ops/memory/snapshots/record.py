"""Records memory while a run goes on, and writes snapshots of it."""

from __future__ import annotations

import os
import signal as signals
import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as every_module

from ...step.out_of_memory import add_note
from ..track import checked, device_of
from ..watch import Watch
from .explain import asked_bytes, explain
from .loaded import Snapshot
from .sources import CpuSource, CudaSource, Source
from .ways_out import Planned, shapes_of
from .write import save

__all__ = ["snapshot"]

_EVENTS = {"cpu": 200_000, "cuda": 1_000_000}


class snapshot:  # noqa: N801
    """Records the memory of a run by kind, module and line, and writes it to files that torch's
    memory_viz page opens: at the end, when memory runs out, on request, on a signal, every n steps.

    Example::

        model = torch.nn.Linear(64, 64)
        optimizer = headroom.optim.AdamW(model.parameters())
        with headroom.memory.snapshot("run.pickle", model, optimizer) as recording:
            for step in range(3):
                model(torch.randn(8, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 1:
                    recording.dump("second.pickle")
        found = headroom.memory.load_snapshot("run.pickle")
        print(found.timeline, found.at_end())

    The file at ``path`` is written when the block ends, also by an error. If that is one of memory
    that ran out, its text then says what was asked for, what was live, and what to change; it is
    :attr:`explanation` too. What else is written has a name of its own: ``run-step-20.pickle``,
    ``run-signal-1.pickle``.

    The steps compute the same bits as without. On the CPU torch's profiler is the source, on CUDA
    the trace of the caching allocator, which replaces one that the program records itself.

    Args:
        path: where to write; ``.pickle`` is what memory_viz expects.
        model: whose parameters, gradients, buffers and activations are named; with it all kinds
            are known.
        optimizer: or several; the last one ends a step.
        batch: tensors that count as "batch", besides those that the model is called with.
        every: writes a snapshot after every so many steps.
        on_signal: writes one when the process gets this signal, such as ``signal.SIGUSR1``. The
            handler that it had comes back at the end.
        max_entries: events that are kept; older ones are dropped, while what is live stays
            complete. On the CPU 200,000, on CUDA 1,000,000 (which counts each allocation, each
            free and each note).
        stacks: keep the lines of Python of every allocation. Without, those of activations alone.
        advice: whether an error of memory gets advice, which takes seconds, because changes are
            planned, for the shapes that the model was called with last.
        device: to look at, if the model is on several, or without a model.

    Files on request can be written between operations: on the CPU, :meth:`dump` raises within a
    backward pass, a range of ``record_function`` or a compiled function. Signals and ``every`` wait
    until the next call of a module; if their file cannot be written, they warn, and the run goes
    on.

    Raises:
        TypeError, ValueError: as :func:`headroom.memory.track`; ``every`` without an optimizer or
            below 1; a signal that must stay as it is.
        RuntimeError: on entering, if a profiler or ``track`` runs already.
        OSError: on leaving, if the file cannot be written. Then no file is there, or the old one.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
        *,
        batch: Any = None,
        every: int | None = None,
        on_signal: int | None = None,
        max_entries: int | None = None,
        stacks: bool = True,
        advice: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        self.path = Path(path)
        """Where the last file goes."""
        self.files: list[Path] = []
        """What was written, in order."""
        self.explanation: str | None = None
        """Why memory ran out, if it did."""
        model = nn.Module() if model is None else model
        optimizers = checked(model, optimizer)
        if every is not None and (type(every) is not int or every < 1):
            raise ValueError(f"every is {every!r}, wanted a number of steps from 1 on")
        if every is not None and not optimizers:
            raise ValueError("every= counts the steps of an optimizer: give optimizer=")
        self._signal = None if on_signal is None else _checked_signal(on_signal)
        nothing = device is None and not list(model.parameters()) and not list(model.buffers())
        place = device_of(model, "cpu" if nothing else device)
        most = _EVENTS[place.type] if max_entries is None else max_entries
        if type(most) is not int or most < 1:
            raise ValueError(f"max_entries is {max_entries!r}, wanted a number from 1 on")
        self._source: Source = (
            CudaSource(place, stacks, most) if place.type == "cuda" else CpuSource(stacks, most)
        )
        self._watch = Watch(
            model, optimizers, place, self._source.mark, batch, place.type != "cpu", not stacks
        )
        self._model, self._optimizers, self._device = model, optimizers, place
        self._every, self._advice = every, advice
        self._steps = self._signals = 0
        self._due: list[Path] = []  # files to be written between operations
        self._batch: Any = None
        self._undo = ExitStack()
        self._state = "new"

    def __enter__(self) -> snapshot:
        if self._state != "new":
            raise RuntimeError("this snapshot(...) has been used already: make another")
        with ExitStack() as undo:
            # First of all hooks, so that what it reads ends before what the call does.
            hook = every_module.register_module_forward_pre_hook(self._at_call)
            undo.callback(hook.remove)
            keep = self._model.register_forward_pre_hook(self._keep_batch, with_kwargs=True)
            undo.callback(keep.remove)
            before = self._watch.present()
            self._watch.install()
            undo.callback(self._watch.remove)
            if self._optimizers:
                last = self._optimizers[-1]
                undo.callback(last.register_step_post_hook(self._after_step).remove)
            if self._signal is not None:
                undo.callback(signals.signal, self._signal, signals.getsignal(self._signal))
                signals.signal(self._signal, self._on_signal)
            self._source.start(self._watch, before)
            self._undo = undo.pop_all()
        self._state = "running"
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._state = "ended"
        try:
            try:
                self._source.stop()
            finally:
                self._undo.close()
            asked = None if error is None else asked_bytes(error)
            found = self._source.snapshot(asked)
            if error is not None and asked is not None:
                self._explain(found, error, asked)
            for path in (*self._due, self.path):
                save(found, path)
                self.files.append(path)
            if error is not None and asked is not None:
                add_note(error, f"The snapshot is in {self.path}.")
        except Exception as failure:
            if error is None:
                raise
            add_note(error, f"headroom.memory.snapshot could not write {self.path}: {failure}")
        finally:
            self._batch, self._due = None, []

    def dump(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Writes a snapshot of what was recorded until now, and returns where.

        Args:
            path: instead of that of the block.

        Raises:
            RuntimeError: outside of the block, or on the CPU within an operation.
            OSError: the file cannot be written.
        """
        if self._state != "running":
            raise RuntimeError("dump() writes while its block runs: call it inside the with block")
        if not self._source.can_read():
            raise RuntimeError(
                "dump() was called within an operation, or on another thread, where torch's "
                "profiler cannot be read: call it between operations, outside of backward passes, "
                "compiled functions and ranges of record_function"
            )
        self._source.read()
        return self._write(self.path if path is None else Path(path))

    def _write(self, path: Path) -> Path:
        save(self._source.snapshot(), path)
        self.files.append(path)
        return path

    # Hooks

    def _named(self, what: str) -> Path:
        return self.path.with_name(f"{self.path.stem}-{what}{self.path.suffix}")

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._steps += 1
        if self._every is not None and self._steps % self._every == 0:
            self._due.append(self._named(f"step-{self._steps}"))

    def _on_signal(self, number: int, frame: Any) -> None:
        self._signals += 1
        self._due.append(self._named(f"signal-{self._signals}"))

    def _keep_batch(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._advice and torch._C._current_graph_task_id() == -1:
            self._batch = shapes_of((args, kwargs))

    def _at_call(self, module: nn.Module, args: Any) -> None:
        if (self._due or self._source.must_read()) and self._source.can_read():
            self._source.read()
            due, self._due = self._due, []
            for path in due:
                try:
                    self._write(path)
                except OSError as error:
                    warnings.warn(f"a snapshot was not written: {error}", stacklevel=2)

    def _explain(self, found: dict[str, Any], error: BaseException, asked: int) -> None:
        read = Snapshot(found, str(self._device))
        planned = None
        if self._advice and self._batch is not None:
            planned = Planned(self._model, self._optimizers, self._batch)
        self.explanation = explain(read, error, asked, planned)
        add_note(error, self.explanation)


def _checked_signal(number: int) -> int:
    fixed = (signals.SIGKILL, signals.SIGSTOP, signals.SIGINT, signals.SIGSEGV)
    if number in fixed or number not in signals.valid_signals():
        raise ValueError(
            f"on_signal is {number!r}, wanted a signal that is free, such as signal.SIGUSR1"
        )
    return number
