"""A copy engine that does what a device may do, and no more: three queues, whose work runs at the
latest moment, as early as it can, or at random.

What a real device orders by chance is out of order here. A copy poisons its destination when it may
begin, and finds out when it ends whether its source was written in between.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

import headroom
import torch
from headroom.host.engine import Engine
from headroom.host.simulation import Link, Schedule
from headroom.param_states.paging import Hosting, paged, pipeline, written

QUEUES = ("compute", "up", "down")
POISON = 0xFF  # NaN, as a float of any size


class Work:
    def __init__(self, queue, run=None, after=(), copy=None):
        self.queue, self.run, self.copy = queue, run, copy
        self.after = [*after]
        assert None not in self.after, "a device knows no ticket that is None"
        self.is_done = False
        self.number = self.epoch = None  # in the schedule of a clock
        self.sum: int | None = None  # of the source, since the copy may begin

    @property
    def may_begin(self):
        return all(work.is_done for work in self.after)

    def begin(self):
        if self.copy is not None and self.sum is None:
            target, source = self.copy
            self.sum = checksum(source)
            target.fill_(POISON)

    def end(self):
        if self.copy is not None:
            target, source = self.copy
            if checksum(source) != self.sum:
                raise AssertionError(f"the source of a copy {self.queue} was written meanwhile")
            target.copy_(source)
        elif self.run is not None:
            self.run()
        self.is_done = True


def checksum(tensor):
    return hash(bytes(tensor.numpy()))


class Adversary(Engine):
    """Runs work of three queues in an order that the tickets allow.

    ``policy`` is ``"late"`` (only what somebody waits for), the name of a queue (whose work runs as
    early as it may), ``"eager"`` or ``"random"``.

    Its clock is a schedule of what it was given since :meth:`restart_clock`: the time at which a
    device would have done it does not depend on the policy.
    """

    def __init__(self, policy="late", seed=0):
        super().__init__()
        self.policy, self.random = policy, random.Random(seed)
        self.queues = {name: deque() for name in QUEUES}
        self.restart_clock(Link(1, 1, 0))

    def restart_clock(self, link):
        """Begins at zero, with all done."""
        for queue in self.queues.values():
            if queue:
                self.sync(queue[-1])
        self.schedule = Schedule(link)
        self._epoch = object()

    def _copy(self, queue, target, source, after):
        return self._add(Work(queue, after=after, copy=(target, source)))

    def compute(self, run=None, seconds=0):
        return self._add(Work("compute", run), seconds)

    def mark(self):
        return self._add(Work("compute"))

    def wait(self, ticket):
        self._add(Work("compute", after=[ticket]))

    def sync(self, ticket):
        if ticket.epoch is self._epoch:
            self.schedule.sync(ticket.number)
        while not ticket.is_done:
            self._run_one(self._chosen(ticket))

    def finish_compute(self):
        """What the training loop does next is computed after all that was given to the device."""
        if self.queues["compute"]:
            self.sync(self.queues["compute"][-1])

    @property
    def pending(self):
        return sum(map(len, self.queues.values()))

    def _add(self, work, seconds=0):
        after = [ticket.number for ticket in work.after if ticket.epoch is self._epoch]
        work.epoch = self._epoch
        if work.copy is None:
            work.number = self.schedule.compute(seconds, after)
        else:
            work.number = self.schedule.copy(work.queue, work.copy[0].numel(), after)
        self.queues[work.queue].append(work)
        if self.policy == "random":
            for _ in range(self.random.randrange(4)):
                if heads := self._heads():
                    self._run_one(self.random.choice(heads))
        elif self.policy != "late":
            while heads := [head for head in self._heads() if self.policy in ("eager", head.queue)]:
                self._run_one(heads[0])
        else:
            self._heads()
        return work

    def _heads(self):
        """The work that may run now. What is copied there may not be touched from here on."""
        heads = [queue[0] for queue in self.queues.values() if queue and queue[0].may_begin]
        for head in heads:
            head.begin()
        return heads

    def _chosen(self, goal):
        heads = self._heads()
        if not heads:
            raise AssertionError("the queues wait for each other")
        if self.policy == "random":
            return self.random.choice(heads)
        if self.policy not in ("late", "eager"):
            heads.sort(key=lambda head: head.queue != self.policy)
            return heads[0]
        needed = self._needed(goal)
        return next(head for head in heads if head in needed)

    def _needed(self, goal):
        needed, waiting = set(), [goal]
        while waiting:
            work = waiting.pop()
            if work.is_done or work in needed:
                continue
            needed.add(work)
            waiting += work.after
            queue = list(self.queues[work.queue])
            waiting += queue[: queue.index(work)]
        return needed

    def _run_one(self, work):
        self.queues[work.queue].popleft()
        work.begin()
        work.end()
        self._heads()


POLICIES = ["late", "eager", *QUEUES, *(f"random {seed}" for seed in range(3))]


def adversary(policy):
    name, _, seed = policy.partition(" ")
    return Adversary(name, int(seed or 0))


@contextlib.contextmanager
def copying_with(
    engine: Engine, seconds_of: Callable[[Any], float] = lambda bucket: 0
) -> Iterator[Engine]:
    """Lets optimizers page with an engine. With an adversary, the ops of their steps are work for
    the device, too, which takes ``seconds_of`` their bucket, and the loop goes on when these are
    done. What a step on the host asks the device to compute is, too."""
    kind, engines = headroom.optim.Optimizer, paged.engine_of
    calls_on, step = kind._calls_on, kind._step
    device_work = {name: getattr(written, name) for name in ("note", "compare")}

    def deferred(self, *args):
        calls = calls_on(self, *args)
        if not isinstance(engine, Adversary) or isinstance(self._paging, (type(None), Hosting)):
            return calls
        return [
            (bucket, partial(engine.compute, call, seconds_of(bucket))) for bucket, call in calls
        ]

    def stepped(self, *args):
        step(self, *args)
        if self._paging is not None and isinstance(engine, Adversary):
            engine.finish_compute()

    kind._calls_on, kind._step, paged.engine_of = deferred, stepped, lambda device: engine
    if isinstance(engine, Adversary):
        for name, work in device_work.items():
            later = lambda *args, work=work: engine.compute(partial(work, *args))  # noqa: E731
            setattr(written, name, later)
    try:
        yield engine
    finally:
        kind._calls_on, kind._step, paged.engine_of = calls_on, step, engines
        for name, work in device_work.items():
            setattr(written, name, work)


class Later(Future):
    """A future whose work is done when somebody waits for it, after that which was given before."""

    def __init__(self, queue):
        super().__init__()
        self.queue = queue

    def result(self, timeout=None):
        while not self.done():
            self.queue.run_one()
        return super().result(timeout)

    def exception(self, timeout=None):
        while not self.done():
            self.queue.run_one()
        return super().exception(timeout)


class HostThread(Executor):
    """Stands for the thread that steps on the host: its work runs at once, when somebody waits for
    it, or at random."""

    def __init__(self, policy="late", seed=0):
        self.policy, self.random, self.queue = policy, random.Random(seed), deque()

    def submit(self, fn, /, *args, **kwargs):
        future = Later(self)
        self.queue.append((future, partial(fn, *args, **kwargs)))
        count = {"late": 0, "eager": 1}.get(self.policy)
        for _ in range(self.random.randrange(3) if count is None else count):
            if self.queue:
                self.run_one()
        return future

    def run_one(self):
        future, run = self.queue.popleft()
        try:
            future.set_result(run())
        except BaseException as error:
            future.set_exception(error)

    def shutdown(self, wait=True, *, cancel_futures=False):
        while self.queue:
            self.run_one()


@contextlib.contextmanager
def stepping_on(policy: str, seed: int = 0) -> Iterator[None]:
    """Lets steps on the host run at such times, and not on a thread of their own."""
    thread = pipeline.executor
    pipeline.executor = lambda: HostThread(policy, seed)
    try:
        yield
    finally:
        pipeline.executor = thread


def hosted_step(optimizer: Any, **options: Any) -> Hosting:
    """Lets an optimizer be stepped on the host although its parameters are there, too: they stand
    for those of a device."""
    options = {"arena": headroom.HostArena(), "bucket_bytes": 3000} | options
    optimizer._paging = hosting = Hosting(options["arena"], None, options["bucket_bytes"])
    hosting.adopt(optimizer)
    return hosting


class Failing(Engine):
    """Copies at once, and raises at the k-th of its calls."""

    def __init__(self, k: int, error: Callable[[], BaseException]):
        super().__init__()
        self.left, self.error = k, error

    def _count(self):
        self.left -= 1
        if self.left == 0:
            raise self.error()

    def _copy(self, queue: str, target: torch.Tensor, source: torch.Tensor, after: Iterable):
        self._count()
        target.copy_(source)
        return object()

    def mark(self):
        self._count()
        return object()

    def wait(self, ticket):
        self._count()

    def sync(self, ticket):
        self._count()
