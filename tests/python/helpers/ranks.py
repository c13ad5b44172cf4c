"""Processes that talk through gloo and run functions for a test, started once and then kept.

A function runs on every rank as ``function(rank, *arguments)`` and fails by raising, on any rank.
If a rank fails or does not answer in time, all processes are killed and the next call starts new
ones: another rank may be waiting in a collective for ever.
"""

import datetime
import os
import tempfile
import traceback
from multiprocessing.connection import wait

import torch
import torch.distributed as dist

from helpers import fresh

WORLD_SIZE = 2
SECONDS = 60  # a scenario takes less than two; a hang must fail


def _serve(rank, world_size, rendezvous, pipe):
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

    def __call__(self, function, *arguments):
        try:
            if not self._processes:
                self._start()
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
        handle, rendezvous = tempfile.mkstemp()
        os.close(handle)
        os.remove(rendezvous)  # gloo makes it
        for rank in range(self._world_size):
            here, there = context.Pipe()
            arguments = rank, self._world_size, rendezvous, there
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()  # else the death of the process could not be seen
            self._processes.append(process)
            self._pipes.append(here)
        self._wait("the start of the processes")

    def _wait(self, what):
        """The failure of the rank that failed first: others only report that they waited."""
        waiting = dict(zip(self._pipes, range(self._world_size)))
        while waiting:
            ready = wait(waiting, timeout=SECONDS)
            if not ready:
                raise TimeoutError(f"rank {sorted(waiting.values())} hangs in {what}")
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    failure = pipe.recv()
                except EOFError:
                    failure = "the process died"
                if failure is not None:
                    raise AssertionError(f"rank {rank} failed in {what}:\n{failure}")

    def _kill(self):
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []
