"""Lines of a program as text, of what runs right now."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from types import FrameType

__all__ = ["line"]

_DEVICE = ("/torch/", "/headroom_rehearsal/", "/ops/rehearsal/", "/headroom/cli/", "<")
_LIBRARIES = ("/site-packages/", "/dist-packages/", sysconfig.get_path("stdlib") + os.sep)


def line() -> str:
    """Returns the file and line that is running, outside of torch: of the user's program, and of
    the library that it has called, if it has.

    A thread of a backward pass runs no line: then it is that of the main thread, which waits.
    """
    found = _line(sys._getframe(1))
    if found is None:
        found = _line(sys._current_frames().get(threading.main_thread().ident or 0))
    return found or "?"


def _line(frame: FrameType | None) -> str | None:
    inner = None
    while frame is not None:
        name = frame.f_code.co_filename
        if not any(part in name for part in _DEVICE):
            here = f"{name}:{frame.f_lineno}"
            if not any(part in name for part in _LIBRARIES):
                return here if inner is None else f"{here}, in {inner}"
            inner = inner or here
        frame = frame.f_back
    return inner
