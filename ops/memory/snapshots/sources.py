"""What snapshots are made of while a run goes on: torch's profiler on the CPU, read piece by piece,
and the trace of torch's caching allocator on CUDA."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch.autograd.profiler import record_function

from ..collecting import no_collections
from ..cpu import CpuRecorder, check_no_profiler
from ..cuda import CudaRecorder
from ..stream import Event, Label, Note
from ..watch import Watch
from .history import History
from .write import snapshot_of_history, tagged

__all__ = ["CpuSource", "CudaSource", "Source"]

_TORCH = os.path.dirname(torch.__file__) + os.sep
# Code of torch that runs no operation while it calls the user's.
_CALLERS = tuple(
    _TORCH + path.replace("/", os.sep)
    for path in (
        "nn/modules/",
        "utils/_contextlib.py",
        "amp/",
        "distributed/elastic/",
        "multiprocessing/",
    )
)
_PIECE = 5000  # notes after which the profiler's memory is read and given back


class Source(Protocol):
    """Where the events of a snapshot come from."""

    def mark(self, number: int) -> None:
        """Takes the place of a note among the events."""

    def start(self, watch: Watch, before: list[Label]) -> None: ...

    def must_read(self) -> bool:
        """Returns whether there is so much to be read that :meth:`read` should be called soon."""

    def can_read(self) -> bool:
        """Returns whether :meth:`read` may be called here."""

    def read(self) -> None:
        """Reads the events until now."""

    def snapshot(self, failed: int | None = None) -> dict[str, Any]:
        """Returns a snapshot of what was read. ``failed`` is the size of a request that was
        refused."""

    def stop(self) -> None:
        """Ends the recording and reads the last of it; may be called anywhere."""


class CpuSource:
    """Stops the profiler to read it, and starts it again: it says nothing before.

    That must not be done within an operation, whose end the profiler would write to memory that it
    no longer has. Operations call Python in backward passes, in functions of autograd, in
    ``torch.compile``, and in ranges of ``record_function``.
    """

    def __init__(self, stacks: bool, most: int) -> None:
        self._recorder = CpuRecorder(stacks)
        self._most = most
        self._ranges = _OpenRanges()

    def mark(self, number: int) -> None:
        self._recorder.mark(number)

    def start(self, watch: Watch, before: list[Label]) -> None:
        check_no_profiler()
        self._watch, self._thread = watch, threading.get_ident()
        self._history = History(before, self._most)
        self._ranges.install()
        try:
            self._recorder.start()
        except BaseException:
            self._ranges.remove()
            raise

    def must_read(self) -> bool:
        return self._watch.count > _PIECE

    def can_read(self) -> bool:
        if threading.get_ident() != self._thread or self._ranges.open:
            return False
        if torch._C._current_graph_task_id() != -1:
            return False
        functions = _code_of_functions()
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code in functions or code.co_name == "__torch_dispatch__":
                return False
            if code.co_filename.startswith(_TORCH) and not code.co_filename.startswith(_CALLERS):
                return False
            frame = frame.f_back
        return True

    def read(self) -> None:
        labels = self._watch.present()
        self._watch.catch_up()
        with no_collections():
            self._recorder.stop()
            self._follow(labels)
            self._recorder.start()
        self._watch.go_on()

    def _follow(self, labels: list[Label]) -> None:
        notes, modules = self._watch.take_notes()
        events = self._recorder.events(modules)
        events.append(Event("mark", len(notes)))
        self._history.follow(events, [*notes, Note(labels)])

    def snapshot(self, failed: int | None = None) -> dict[str, Any]:
        oom = None
        if failed is not None:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            oom = {"size": failed, "device_free": free}
        return snapshot_of_history(self._history, "cpu", (), oom)

    def stop(self) -> None:
        self._ranges.remove()
        self._watch.catch_up()
        self._recorder.stop()
        self._follow(self._watch.present())


def _code_of_functions() -> set[Any]:
    """Returns the code of all functions of autograd, which it calls from C++."""
    found: set[Any] = set()
    classes = [torch.autograd.Function]
    while classes:
        kind = classes.pop()
        classes += kind.__subclasses__()
        for method in vars(kind).values():
            method = getattr(method, "__func__", method)
            if hasattr(method, "__code__"):
                found.add(method.__code__)
    return found


class _OpenRanges:
    """Knows the ranges of ``record_function`` that began while the profiler ran."""

    def __init__(self) -> None:
        self._begun: set[int] = set()
        self._undo = ExitStack()

    @property
    def open(self) -> bool:
        return bool(self._begun)

    def install(self) -> None:
        enter, leave, begun = record_function.__enter__, record_function.__exit__, self._begun

        def entering(this: record_function) -> Any:
            begun.add(id(this))
            return enter(this)

        def leaving(this: record_function, *raised: Any) -> Any:
            try:
                return leave(this, *raised)
            finally:
                begun.discard(id(this))

        self._undo.callback(setattr, record_function, "__enter__", enter)
        self._undo.callback(setattr, record_function, "__exit__", leave)
        record_function.__enter__, record_function.__exit__ = entering, leaving

    def remove(self) -> None:
        self._undo.close()


class CudaSource:
    """The trace of the caching allocator, which can be read at any time, in its own format."""

    def __init__(self, device: torch.device, stacks: bool, most: int) -> None:
        self._recorder = CudaRecorder(device, stacks, most)
        self._device, self._most = device, most
        self._found: dict[str, Any] = {}
        self._notes: dict[int, Note] = {}

    def mark(self, number: int) -> None:
        self._recorder.mark(number)

    def start(self, watch: Watch, before: list[Label]) -> None:
        self._watch, self._before = watch, before
        self._recorder.start()

    def must_read(self) -> bool:
        # Each note takes a place in the trace, so older ones are there no more.
        self._watch.forget(self._watch.count - self._most)
        return False

    def can_read(self) -> bool:
        return True

    def read(self) -> None:
        self._label()
        self._found = self._recorder.read()
        self._notes = self._watch.kept_notes()

    def _label(self) -> None:
        """Notes what everything is now, for what was never seen to become it."""
        self._watch.note(self._watch.present())

    def snapshot(self, failed: int | None = None) -> dict[str, Any]:
        # torch writes failed requests into the trace by itself.
        row = self._device.index or 0
        return tagged(self._found, self._notes, self._before, row, self._recorder.remarks)

    def stop(self) -> None:
        try:
            self._label()
        finally:
            self._recorder.stop()
        self._found = self._recorder.found
        self._notes = self._watch.kept_notes()
