"""Starts a program of someone else's in this process, with the arguments, exit code and errors that
it has without."""

from __future__ import annotations

import os
import runpy
import shutil
import sys
import sysconfig
from collections.abc import Callable, Sequence
from functools import partial

from .arguments import ArgumentError

__all__ = ["LAUNCHERS", "exit_code", "starting"]

# What starts a program in other processes, and how Headroom gets into those.
LAUNCHERS = {
    "torchrun": "torchrun ... -m headroom run",
    "torch.distributed.run": "python -m torch.distributed.run ... -m headroom run",
    "torch.distributed.launch": "python -m torch.distributed.run ... -m headroom run",
    "accelerate": "accelerate launch ... -m headroom run",
    "accelerate.commands.launch": "accelerate launch ... -m headroom run",
    "deepspeed": "deepspeed ... --module headroom run",
}
_OWN = {__file__, runpy.__file__, "<frozen runpy>"}


def starting(words: Sequence[str], is_module: bool) -> Callable[[], None]:
    """Returns what runs a program: a module as ``python -m`` does; else a script, or a folder or an
    archive with a ``__main__.py``, or a command of this environment or of the path.

    Args:
        words: its name, and its arguments.

    Raises:
        ArgumentError: there is no such script and no such command.
    """
    name, *arguments = words
    if is_module:
        return partial(_start_module, name, arguments)
    is_file = os.path.isfile(name) or os.path.isfile(os.path.join(name, "__main__.py"))
    return partial(_start_script, os.path.abspath(name if is_file else _command(name)), arguments)


def exit_code(error: BaseException | None) -> int:
    """Returns 0, or 1 after an error that the program did not handle, which is printed as Python
    does, without the lines that started the program. Raises what ends a process, such as
    SystemExit and KeyboardInterrupt."""
    if error is None:
        return 0
    if not isinstance(error, Exception):
        raise error
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != __file__:
        trace = trace.tb_next  # what called start()
    while trace is not None and trace.tb_frame.f_code.co_filename in _OWN:
        trace = trace.tb_next
    sys.last_value = error  # as Python does
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    return 1


def _start_module(name: str, arguments: Sequence[str]) -> None:
    _begin("-m", os.getcwd(), arguments)
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _start_script(path: str, arguments: Sequence[str]) -> None:
    folder = path if os.path.isdir(path) else os.path.dirname(os.path.realpath(path))
    _begin(path, folder, arguments)
    runpy.run_path(path, run_name="__main__")


def _command(name: str) -> str:
    """Returns the file of a command that is written in Python."""
    folders = [sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]
    path = shutil.which(name, path=os.pathsep.join(folders))
    if path is None:
        raise ArgumentError(
            f"PROGRAM is {name!r}, and there is no such script and no such command; wanted one of "
            "these, or -m and a module"
        )
    with open(path, "rb") as file:
        lines = file.read(1024).split(b"\n")
    if not (lines[0].startswith(b"#!") and any(b"python" in line for line in lines[:2])):
        raise ArgumentError(f"PROGRAM is {name!r}, and {path} is no program in Python")
    return path


def _begin(program: str, folder: str, arguments: Sequence[str]) -> None:
    """Makes arguments and path of the process those that the program expects."""
    sys.argv[:] = [program, *arguments]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder
