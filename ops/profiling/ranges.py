"""Marks which module runs, while it runs, by ranges in the trace. Nothing is added to the modules,
and nothing stays behind."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch._C import _profiler

from .._core.running_modules import watching_modules

__all__ = ["Ranges"]

_TWICE = r"Using `torch\.compile\(module\)` when there are global hooks"  # it is counted once


def _graph_task() -> int:
    """Returns the number of the backward pass that runs on this thread, or -1."""
    return torch._C._current_graph_task_id()


class Ranges:
    """Ranges around the modules of a model, between :meth:`install` and :meth:`remove`.

    ``labels`` says what the names of the ranges mean: the name of a module, and whether its
    forward pass ran within a backward pass, where it is computed again.

    Args:
        model: whose modules get ranges.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._running = threading.local()
        self._stack = ExitStack()
        self.labels: dict[str, tuple[str, bool]] = {}
        self._labels: dict[tuple[str, bool], str] = {}  # the other way round

    def install(self) -> None:
        """Adds the hooks, which are those of all modules."""
        with ExitStack() as stack:
            stack.callback(self._close_all)
            stack.enter_context(_without_warning(_TWICE))
            stack.enter_context(watching_modules(self._model, self._begin, self._end))
            self._stack = stack.pop_all()

    def remove(self) -> None:
        """Removes the hooks, and ends ranges that an exception has left open on this thread."""
        self._stack.close()

    # Modules

    def _begin(self, name: str) -> None:
        again = _graph_task() != -1
        running = self._of_thread()
        if not running or not again and running[0][2]:
            self._close_all()  # what an exception that hooks do not see has left
        label = self._labels.get((name, again))
        if label is None:
            label = f"{'recompute' if again else 'module'}: {name or '(model)'}"
            self.labels[label] = (name, again)
            self._labels[name, again] = label
        mark = _profiler._RecordFunctionFast(label)
        mark.__enter__()
        running.append((mark, name, again))

    def _end(self) -> None:
        if running := self._of_thread():
            self._close(running)

    def _close(self, running: list[Any]) -> None:
        running.pop()[0].__exit__(None, None, None)

    def _close_all(self) -> None:
        running = self._of_thread()
        while running:
            self._close(running)

    def _of_thread(self) -> list[Any]:
        """Returns the open ranges of this thread."""
        running = getattr(self._running, "ranges", None)
        if running is None:
            running = self._running.ranges = []
        return running


@contextmanager
def _without_warning(message: str) -> Iterator[None]:
    """Keeps one warning from being shown, on all threads."""
    warnings.filterwarnings("ignore", message=message)
    filters: Any = warnings.filters
    rule = filters[0]
    try:
        yield
    finally:
        if rule in filters:
            filters.remove(rule)
