"""Lines of a program as text, of what runs right now."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import takewhile
from types import FrameType, TracebackType

__all__ = ["is_own_read", "is_printing", "line", "line_of"]

_DEVICE = ("/torch/", "/headroom_rehearsal/", "/ops/rehearsal/", "/headroom/cli/", "<")
_HEADROOM = find_spec("headroom")
# Where Headroom compares what it makes of a step with the step itself, looks for numbers that are
# not finite, moves what it does not look at, and calls kernels, which take no memory by what they
# read.
_READS = (
    "/step/rules.py",
    "/host/checksums.py",
    "/host/engine.py",
    "/quantizing/quantize.py",
    "/nn/bitsandbytes.py",
    "/_core/registration.py",
)
_LIBRARIES = (
    "/site-packages/",
    "/dist-packages/",
    sysconfig.get_path("stdlib") + os.sep,
    *(() if _HEADROOM is None else _HEADROOM.submodule_search_locations or ()),
)


def line() -> str:
    """Returns the file and line that is running, outside of torch: of the user's program, and of
    the library that it has called, if it has.

    A thread of a backward pass runs no line: then it is that of the main thread, which waits.
    """
    found = _line(sys._getframe(1))
    if found is None:
        found = _line(sys._current_frames().get(threading.main_thread().ident or 0))
    return found or "?"


def is_own_read() -> bool:
    """Returns whether Headroom itself reads, and the program does not see what."""
    names = (frame.f_code.co_filename for frame in _frames(sys._getframe(1)))
    caller = next((name for name in names if not _is_of_device(name)), "")
    return caller.endswith(_READS) and not _is_users(caller)


def is_printing() -> bool:
    """Returns whether torch is making the text of a tensor, which decides nothing."""
    names = (frame.f_code.co_filename for frame in _frames(sys._getframe(1)))
    return any(name.endswith("/torch/_tensor_str.py") for name in takewhile(_is_of_device, names))


def line_of(trace: TracebackType | None) -> str:
    """Returns the line of the user's program that a traceback goes through last."""
    frames = [(step.tb_frame.f_code.co_filename, step.tb_lineno) for step in _steps(trace)]
    own = [f"{name}:{number}" for name, number in frames if _is_users(name)]
    return own[-1] if own else "?"


def _steps(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_of_device(name: str) -> bool:
    return any(part in name for part in _DEVICE)


def _is_users(name: str) -> bool:
    return not any(part in name for part in (*_DEVICE, *_LIBRARIES))


def _line(innermost: FrameType | None) -> str | None:
    inner = None
    for frame in _frames(innermost):
        name = frame.f_code.co_filename
        if not _is_of_device(name):
            here = f"{name}:{frame.f_lineno}"
            if _is_users(name):
                return here if inner is None else f"{here}, in {inner}"
            inner = inner or here
    return inner
