"""Processes that are forked from this one after it has imported what tests need, headroom excepted:
a new interpreter would take half a minute for what they take seconds for."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading

from .reach import ROOT

__all__ = ["import_what_tests_need", "run_forked"]

IMPORTED = ["torch", "torch.distributed.fsdp", "torch._dynamo", "torch.distributed.checkpoint"]
IMPORTED += ["numpy", "hypothesis", "transformers", "transformers.models.llama.modeling_llama"]
IMPORTED += ["accelerate"]


def import_what_tests_need():
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT / "tests/python"))
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    assert "headroom" not in sys.modules


def run_forked(function, *arguments, seconds):
    """Returns the exit status of a function in a fork, or None where it took longer. It and all
    that it has started are a group of processes, which is killed at the end."""
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        os.nice(10)
        status = 70
        try:
            with open(os.devnull, "r+") as null:
                for stream in range(3):
                    os.dup2(null.fileno(), stream)
            status = function(*arguments) or 0
        finally:
            os._exit(status)
    ended = threading.Event()
    late = []

    def kill():
        if not ended.wait(seconds):
            late.append(True)
            os.killpg(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)  # whichever of both comes first
    thread.start()
    _, status = os.waitpid(pid, 0)
    ended.set()
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    return None if late else os.waitstatus_to_exitcode(status)
