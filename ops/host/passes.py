"""Backward passes: which run now, how they end, and what those that raised have left."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch.autograd import graph

# Where Tensor.backward() and torch.autograd.grad() enter torch's engine, and wait for it.
_CODE = graph._engine_run_backward.__code__
_is_something_left = False


def backward_passes() -> dict[int, list[int]]:
    """Returns numbers of the backward passes that code in Python runs, by the thread that waits for
    them. The threads that torch's engine has for devices are none of these, unless a pass that
    runs there begins another."""
    found: dict[int, list[int]] = {}
    for thread, frame in sys._current_frames().items():
        while frame is not None:
            if frame.f_code is _CODE:
                found.setdefault(thread, []).append(id(frame))
            frame = frame.f_back  # type: ignore[assignment]
    return found


class End:
    """A function that is called at the end of a backward pass, which alone holds it, and finds out
    if the pass raises."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def __call__(self) -> None:
        call, self._call = self._call, None
        assert call is not None
        call()

    def __del__(self) -> None:
        global _is_something_left
        if self._call is not None:
            _is_something_left = True


def drop_what_is_left() -> None:
    """Frees the gradients, and what is reached from them, that a backward pass of this thread left
    when it raised: torch's engine keeps them in the thread's queue until the next pass, which this
    is."""
    global _is_something_left
    if _is_something_left and torch._C._current_graph_task_id() == -1:
        _is_something_left = False
        with torch.inference_mode(False), torch.enable_grad():
            torch.zeros((), device="cpu", requires_grad=True).sum().backward()
