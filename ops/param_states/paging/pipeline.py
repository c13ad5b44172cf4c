"""Runs steps on the host: gradients go down, a thread runs the op of the processor, and weights go
up.

While the thread steps one part of the parameters, the gradients of the next go down and the weights
of the one before go up. All copies are begun by the thread that calls. A part whose turn waits is
stepped later: its gradients stay on the host until :meth:`Pipeline.step_waiting`.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..._core.cgroups import cgroup_cpus
from ..._core.overlap import bytes_of
from ...host.engine import Engine
from ...host.ring import Runs, slots_with
from ..errors import explained
from ..plan import Bucket, Call
from . import written as checking
from .hosted_parts import HostedHome, HostPart
from .written import WrittenWeights


@dataclass(eq=False)
class Turn:
    """Holds what the steps of a bucket have in common."""

    optimizer: Any
    bucket: Bucket  # with the gradients on the device, which are dropped when they have left
    engine: Engine
    device: torch.device
    homes: list[HostedHome]
    parts: list[HostPart]
    waits: bool  # whether the gradients stay on the host until all are known
    mail: Tensor | None = None  # scalars on the host
    packed: Tensor | None = None  # the same on the device, until they have left


@dataclass(eq=False)
class Task:
    """The step of a part on its way."""

    turn: Turn
    part: HostPart
    step: Call
    grads: list[Runs]  # alive while they are copied
    ticket: Any
    threads: int = 1  # for the op
    future: Future[None] | None = None


class Pipeline:
    """The steps on the host that have begun.

    Attributes:
        waiting: those whose gradients wait there, in their order.
        written: notices weights that the host has to fetch before it steps.
    """

    def __init__(self) -> None:
        self.executor: Executor | None = None
        self.written = WrittenWeights()
        self.tasks: deque[Task] = deque()
        self.waiting: list[Task] = []
        self._leaving: dict[Engine, deque[Task]] = {}  # of these, with gradients on the device
        self._last: dict[Engine, Any] = {}  # the tickets of the last copies up
        self._brought: list[tuple[Tensor, HostedHome]] = []

    def put(self, turn: Turn, part: HostPart, step: Call) -> None:
        """Lets the gradients of a part go down, and a thread of the host step it then."""
        while self.tasks and self.tasks[0].future.done():
            self._retire()
        while part.slot is not None and part.slot.user is not None:
            self._retire()
        engine, sources, ticket = turn.engine, part.sources(turn.bucket.grads), None
        if turn.packed is not None:  # with the first part: the steps of all read them
            sources.insert(0, (bytes_of(turn.packed), bytes_of(turn.mail)))
            turn.packed = None
        after = [engine.mark()]
        try:
            for i, (source, here) in enumerate(sources):
                ticket = engine.down(here, source, () if i else after)
            task = Task(turn, part, step, sources, ticket)
            if turn.waits:
                self._leave(task)
            else:
                self._submit(task)
        except BaseException:
            if ticket is not None:
                engine.sync(ticket)
            raise
        if part is turn.parts[-1]:
            turn.bucket = turn.bucket._replace(grads=[])  # the tasks have them while they leave

    def _leave(self, task: Task) -> None:
        """Lets the gradients of a part wait on the host. Those of a few parts stay on the device
        meanwhile: as many as there would be slots for."""
        engine = task.turn.engine
        leaving = self._leaving.setdefault(engine, deque())
        leaving.append(task)
        self.waiting.append(task)
        while len(leaving) > (slots_with(engine) if engine.is_asynchronous else 0):
            _has_left(leaving.popleft())

    def let_leave(self) -> None:
        """Frees the gradients that wait on the host: whoever waits for the device finds all of them
        there."""
        for leaving in self._leaving.values():
            for task in leaving:
                _has_left(task)
        self._leaving.clear()

    def step_waiting(self) -> None:
        """Steps the parts whose gradients wait on the host."""
        waiting, self.waiting = self.waiting, []
        for task in waiting:
            self._submit(task)

    def discard(self) -> None:
        """Forgets the gradients that wait on the host."""
        self._leaving.clear()
        waiting, self.waiting = self.waiting, []
        for task in waiting:
            if task.ticket is not None:
                task.turn.engine.sync(task.ticket)

    # ---- a step on the thread -------------------------------------------------------------------

    def _submit(self, task: Task) -> None:
        if self.executor is None:
            self.executor, self._allowed = executor(), threads_allowed()
        task.threads = min(torch.get_num_threads(), self._allowed)
        task.future = self.executor.submit(self._stepped, task)
        self.tasks.append(task)
        if task.part.slot is not None:
            task.part.slot.user = task

    @torch.no_grad()
    def _stepped(self, task: Task) -> None:
        """Steps a part, on the thread of the host."""
        turn, part = task.turn, task.part
        use_threads(task.threads)
        if task.ticket is not None:
            turn.engine.sync(task.ticket)
        task.grads = []
        for at in part.begins:
            home = turn.homes[at]
            if self.written.has(home, turn.device):
                home.sums = None
                home.weights.copy_(turn.bucket.params[at])
        part.copy_counts()
        try:
            task.step()
        except (RuntimeError, NotImplementedError) as error:
            bucket = part.bucket(turn.bucket)
            named = explained(turn.optimizer, error, turn.bucket.owners, bucket.grads)
            raise named.with_traceback(error.__traceback__) from error

    def _retire(self) -> None:
        """Waits for the oldest step, and lets its weights go up."""
        task = self.tasks[0]
        task.future.result()
        self._commit(task)
        self.tasks.popleft()
        _free_slot(task)

    def _commit(self, task: Task) -> None:
        """Lets the weights of a part go up."""
        turn, part, engine = task.turn, task.part, task.turn.engine
        torch.autograd.graph.increment_version(part.written)
        after, ticket = [engine.mark()], None
        for i, (there, here) in enumerate(part.ups):
            ticket = engine.up(there, here, () if i else after)
        for at in part.positions:
            turn.homes[at].written = ticket
        self._last[engine] = ticket
        self._brought += [(turn.bucket.params[at], turn.homes[at]) for at in part.ends]

    # ---- the end of a step ----------------------------------------------------------------------

    def wait(self) -> None:
        """Waits until what was begun has been stepped, and lets its weights go up."""
        while self.tasks:
            self._retire()

    def finish(self) -> None:
        """Ends a step: what the device is given from now on finds the weights there."""
        self.wait()
        for engine, ticket in self._last.items():
            engine.wait(ticket)
        checking.note(self._brought)
        self._last, self._brought = {}, []

    def abandon(self) -> None:
        """Waits for the steps that have begun, and lets their weights go up, after an error."""
        tasks, self.tasks = self.tasks, deque()
        errors = []
        for task in tasks:
            _free_slot(task)
            if _has_stepped(task):
                try:
                    self._commit(task)
                except BaseException as error:
                    errors.append(error)
        for engine, ticket in self._last.items():
            engine.wait(ticket)
        self._last, self._brought = {}, []
        if errors:
            raise errors[0]

    def end(self) -> None:
        """Waits for what uses memory that is about to be freed."""
        for task in self.tasks:
            task.future.exception()
        with contextlib.suppress(BaseException):  # nobody could catch what a finalizer raises
            self.discard()


def executor() -> Executor:
    """Returns the thread that steps."""
    return ThreadPoolExecutor(1, "headroom-step")


def use_threads(count: int) -> None:
    """Lets ops that are called on this thread run on so many: torch counts for each by itself."""
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


def threads_allowed(root: Path = Path("/")) -> int:
    """Returns how many threads the process has processors for, by its affinity and by the quota of
    its cgroup: torch knows the former at best, and threads without a processor make others wait."""
    quota = cgroup_cpus(root)
    affinity = len(os.sched_getaffinity(0))
    return affinity if quota is None else max(1, min(affinity, int(quota)))


def _has_left(task: Task) -> None:
    """Frees gradients on the device once they have been copied."""
    if task.ticket is not None:
        task.turn.engine.wait(task.ticket)
    task.grads = []


def _has_stepped(task: Task) -> bool:
    """Waits for a step, and returns whether it was made."""
    return task.future.exception() is None


def _free_slot(task: Task) -> None:
    if task.part.slot is not None:
        task.part.slot.user = None
