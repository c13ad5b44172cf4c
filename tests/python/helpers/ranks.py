"""Processes that talk through gloo and run functions for a test, started once and then kept.

A function runs on every rank as ``function(rank, *arguments)`` and fails by raising, on any rank.
If a rank fails or does not answer in time, all processes are killed and the next call starts new
ones: another rank may be waiting in a collective for ever. Of a rank that died, such as of memory
that was overwritten, the failure says by which signal, what it had printed last, and what each of
its threads was doing.
"""

import datetime
import faulthandler
import os
import signal
import tempfile
import traceback
from multiprocessing.connection import wait

import torch
import torch.distributed as dist

from helpers import fresh

WORLD_SIZE = 2
SECONDS = 120  # a scenario takes some seconds on a busy machine; a hang must fail
DIED = "the process died"
LAST = 8000  # characters that a rank printed, which a failure shows


def _serve(rank, world_size, rendezvous, pipe, printed):
    file = open(printed, "w")  # as long as the process lives
    os.dup2(file.fileno(), 2)  # the C library's last words, too
    faulthandler.enable()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=SECONDS),
    )
    pipe.send(None)
    while (call := pipe.recv()) is not None:
        function, arguments = call
        try:
            torch.manual_seed(0)
            function(rank, *arguments)
            dist.barrier()
            pipe.send(None)
        except BaseException:
            pipe.send(traceback.format_exc())
    dist.destroy_process_group()


class Ranks:
    def __init__(self, world_size=WORLD_SIZE):
        self._world_size = world_size
        self._processes = []
        self._pipes = []
        self._folder = None  # of what the processes print

    def __call__(self, function, *arguments):
        try:
            if not self._processes:
                self._start()
            self._calls += 1
            for pipe in self._pipes:
                pipe.send((function, arguments))
            self._wait(function.__name__)
        except BaseException:
            self._kill()
            raise

    def close(self):
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(SECONDS)
        self._kill()

    def _start(self):
        context = fresh.context()
        self._folder = tempfile.TemporaryDirectory()
        handle, rendezvous = tempfile.mkstemp()
        os.close(handle)
        os.remove(rendezvous)  # gloo makes it
        for rank in range(self._world_size):
            here, there = context.Pipe()
            arguments = rank, self._world_size, rendezvous, there, self._printed(rank)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()  # else the death of the process could not be seen
            self._processes.append(process)
            self._pipes.append(here)
        self._calls = 0
        self._wait("the start of the processes")

    def _wait(self, what):
        """The failure of the rank that died, or failed first: others report that they waited."""
        waiting = dict(zip(self._pipes, range(self._world_size)))
        while waiting:
            ready = wait(waiting, timeout=SECONDS)
            if not ready:
                raise TimeoutError(f"rank {sorted(waiting.values())} hangs in {what}")
            failures = self._failures(ready, waiting)
            if failures:
                failures += self._failures(wait(waiting, timeout=1), waiting)
                rank, failure = min(failures, key=lambda one: one[1] is not DIED)
                failure = self._last_words(rank) if failure is DIED else failure
                raise AssertionError(f"rank {rank} failed in {what}:\n{failure}")

    def _failures(self, ready, waiting):
        found = []
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                failure = pipe.recv()
            except EOFError:
                failure = DIED
            found += [] if failure is None else [(rank, failure)]
        return found

    def _printed(self, rank):
        return os.path.join(self._folder.name, str(rank))

    def _last_words(self, rank):
        process = self._processes[rank]
        process.join(SECONDS)
        code = process.exitcode
        how = f"of {signal.Signals(-code).name}" if code and code < 0 else f"with status {code}"
        with open(self._printed(rank), errors="replace") as file:
            return f"{DIED} {how}, in call {self._calls}\n{file.read()[-LAST:]}"

    def _kill(self):
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
