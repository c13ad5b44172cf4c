"""Processes that are forked from this one after it has imported what tests need, headroom excepted:
a new interpreter would take half a minute for what they take seconds for."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing.util
import os
import signal
import sys
import threading
from multiprocessing.forkserver import _forkserver

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


def _start_server():
    """Makes this process's server of processes, which tests ask for fresh ones, a fork as well."""
    from helpers import fresh

    # Else it would import headroom for each change, whether or not a test asks.
    fresh.IMPORTED[:] = []
    spawn, multiprocessing.util.spawnv_passfds = multiprocessing.util.spawnv_passfds, _fork_server
    try:
        _forkserver.ensure_running()
    finally:
        multiprocessing.util.spawnv_passfds = spawn


def _fork_server(path, arguments, fds):
    pid = os.fork()
    if pid == 0:
        try:
            exec(arguments[-1], {})
        finally:
            os._exit(0)
    return pid


def run_forked(function, *arguments, seconds, output=os.devnull):
    """Returns the exit status of a function in a fork, or None where it took longer. It and all
    that it has started are a group of processes, which is killed at the end."""
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        status = 70
        try:
            with open(os.devnull) as nothing, open(output, "w") as written:
                for file, stream in ((nothing, 0), (written, 1), (written, 2)):
                    os.dup2(file.fileno(), stream)
            _start_server()
            status = function(*arguments) or 0
            sys.stdout.flush()
            sys.stderr.flush()
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
