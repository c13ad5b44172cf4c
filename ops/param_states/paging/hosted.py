"""Keeps the states of an optimizer's parameters in a host arena, with a copy of the weights, and
steps there: gradients go down, the op of the CPU runs, and weights go up.

A step is a pipeline over parts of the parameters. While a thread runs the op on one, the gradients
of the next go down and the weights of the one before go up. All copies are begun by the thread that
calls. With released gradients the pipeline runs beside the backward pass. A step there that may
still be clipped, or skipped as a whole, is made in a second place for each state, from the first,
which stays as it was: the two change places when all gradients are known.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._core.cgroups import cgroup_cpus
from ..._core.dtensor import local_part
from ..._core.names import name_of
from ..._core.overlap import is_dense, laid_out, place_in_memory
from ...host.checksums import checksums
from ...host.engine import Engine
from ...host.ring import Runs, aligned, slots_with
from ..errors import explained
from ..plan import Bucket, Call, Calls, StepScalars
from ..states import Layout
from . import parts as staged
from .homes import is_cuttable
from .hosted_parts import HostedHome, HostPart, Slots, bytes_of, parts_of, with_weights
from .paged import (
    BUCKETS,
    INLINE_BYTES,
    KIND,
    Paging,
    Place,
    block_size_of,
    states_of,
)

GRADIENTS = "gradients"
# Of gradients in a slot. Between two parts the thread that begins copies and the one that steps
# wait for each other's Python code, half a millisecond.
SLOT_BYTES = 32 << 20
MAIL = 64  # bytes for the scalars of a bucket
MAILS = 64  # of these at a time
FLAGS = 4096  # parameters, in multiples of which there are flags


class HostingMemory(NamedTuple):
    """Bytes in the arena of a step on the host."""

    host: int  # of states and weights
    second: int  # of the second place that they have while a step may be taken back
    gradients: int  # of what gradients and scalars pass through


class Check(NamedTuple):
    """Says which weights on a device are no longer those that the host has."""

    flags: Tensor  # on the host, where they arrive before the gradients do
    numbers: dict[HostedHome, int]  # of the flags; what has none is to be fetched
    differs: Tensor  # the flags on the device


@dataclass(eq=False)
class Turn:
    """Holds what the steps of a bucket have in common."""

    optimizer: Any
    bucket: Bucket  # with the gradients on the device, which are dropped when they have left
    engine: Engine
    device: torch.device
    slots: Slots
    homes: list[HostedHome]  # what is stepped: the only places, or the second ones
    firsts: list[HostedHome] | None  # the first ones, if homes are second
    parts: list[HostPart]
    mail: Tensor | None = None  # scalars on the host
    packed: Tensor | None = None  # the same on the device


@dataclass(eq=False)
class Task:
    """The step of a part on its way."""

    turn: Turn
    part: HostPart
    step: Call
    grads: list[Runs]  # alive while they are copied
    ticket: Any
    check: Check | None
    commits: bool  # whether the weights go up
    again: bool  # whether the gradients are those that the first places hold
    threads: int  # for the op
    future: Future[None] | None = None


class Hosting(Paging):
    """The states of an optimizer that is stepped on the host.

    Attributes:
        speculates: whether steps are made in second places, until :meth:`commit` or
            :meth:`discard`.
    """

    home_type = HostedHome
    _homes: dict[Tensor, HostedHome]

    def _forget(self) -> None:
        super()._forget()
        self.speculates = False
        self._executor: Executor | None = None
        self._seconds: dict[Tensor, HostedHome] = {}
        self._all_slots: dict[torch.device, Slots] = {}
        self._turns: dict[tuple[Tensor, HostedHome], tuple[Any, list[HostPart]]] = {}
        self._mails: list[Tensor] = []  # free
        self._lent: list[Tensor] = []
        self._flags: dict[torch.device, Tensor] = {}
        self._checks: dict[torch.device, Check] = {}
        self._tasks: deque[Task] = deque()
        self._made: list[Task] = []  # in second places, with gradients in the first
        self._last: dict[Engine, Any] = {}  # the tickets of the last copies up
        self._brought: list[tuple[Tensor, HostedHome]] = []

    def _end(self) -> None:
        for task in self._tasks:
            task.future.exception()
        super()._end()

    # ---- where states lie -----------------------------------------------------------------------

    def _choice(
        self, places: Mapping[Tensor, Place]
    ) -> tuple[dict[torch.device, int], set[Tensor]]:
        return {}, set()

    def _stays(self, param: Tensor, layout: Layout) -> bool:
        return False

    def _is_housed(self, param: Tensor, state: Mapping[Any, Any], names: tuple[str, ...]) -> bool:
        if not super()._is_housed(param, state, names):
            return False
        local, weights = local_part(param), self._homes[param].weights
        form = local.shape, local.stride(), local.dtype
        return form == (weights.shape, weights.stride(), weights.dtype)

    def _house(self, places: list[Place], state: dict[Any, Any], optimizer: Any) -> None:
        whole = []
        for place in places:
            local = local_part(place.param)
            strides = (f.stride for f in place.fields if f.name in place.layout.param_like)
            is_alike = is_dense(local) and all(stride == local.stride() for stride in strides)
            if local.numel() and not is_alike:
                name = name_of(optimizer.param_groups, place.param)
                raise ValueError(
                    f'offload="step" copies weights to the host byte by byte, but {name} has gaps '
                    "in memory, or lies there in another order than its state; make it contiguous "
                    'before the optimizer\'s first step, or use offload="state"'
                )
            whole.append(place._replace(fields=with_weights(place.fields, local)))
        super()._house(whole, state, optimizer)

    def adopt(self, optimizer: Any, groups: Any = None, state: Any = None) -> None:
        self.discard()
        super().adopt(optimizer, groups, state)
        for param in [*self._seconds]:
            if param not in self._homes:
                del self._seconds[param]
        self._turns.clear()

    def release(self, optimizer: Any) -> None:
        self.discard()
        executor = self._executor
        super().release(optimizer)
        if executor is not None:
            executor.shutdown()

    def wait(self) -> None:
        """Waits until what was begun on the host has been stepped, and its weights have gone up."""
        while self._tasks:
            self._retire()
        super().wait()  # copies from second places were begun before those from the first

    def memory(self, optimizer: Any) -> HostingMemory:
        """Returns the bytes in the arena, by what they are for."""
        passed = sum(slots.slab.numel() for slots in self._all_slots.values())
        passed += sum(flags.numel() for flags in self._flags.values())
        passed += MAIL * len(self._mails + self._lent)
        first, second = (
            sum(home.size for home in homes.values()) for homes in (self._homes, self._seconds)
        )
        return HostingMemory(first, second, passed)

    def _take(self, size: int, kind: str, optimizer: Any, device: torch.device) -> Tensor:
        return self.arena.take(size, kind=kind, owner=type(optimizer).__name__, device=device)

    def _house_seconds(self, optimizer: Any, device: torch.device) -> None:
        """Gives each state on a device that has none a second place."""
        missing = {
            param: home
            for param, home in self._homes.items()
            if param.device == device
            and not (
                self._is_near(second := self._seconds.get(param), param)
                and second.fields == home.fields
            )
        }
        size = sum(home.size for home in missing.values())
        slab, first = self._take(size, KIND, optimizer, device) if missing else None, 0
        for param, home in missing.items():
            second = HostedHome(slab, first, home.fields, self.engine_of(device))
            self._seconds[param] = second
            first += home.size

    def drop_seconds(self, optimizer: Any) -> None:
        """Frees the second places. What was made there is forgotten."""
        self.discard()
        if not self._seconds:
            return
        self.wait()
        held: Counter[int] = Counter()
        for home in self._homes.values():
            held[home.slab.data_ptr()] += home.size
        for param, second in self._seconds.items():
            home = self._homes[param]
            # A parameter without a gradient has not changed its place when others did.
            if held[second.slab.data_ptr()] > held[home.slab.data_ptr()]:
                second.run.copy_(home.run)
                second.sums = home.sums
                self._homes[param] = second
                optimizer.state[param].update(second.views)
        self._seconds.clear()
        self._turns.clear()  # which have the places

    # ---- the calls of a step --------------------------------------------------------------------

    def _staged(
        self,
        optimizer: Any,
        group: dict[str, Any],
        bucket: Bucket,
        device: torch.device,
        stays: bool,
    ) -> tuple[Any, list[tuple[Bucket, Any]]]:
        """Returns what the steps of a bucket have in common, and its parts on the host."""
        self._house_missing(optimizer, bucket.owners, bucket.layout, group)
        grads = [laid_out(grad, param.stride()) for param, grad in zip(bucket.params, bucket.grads)]
        bucket = bucket._replace(grads=grads)
        homes = [self._homes[owner] for owner in bucket.owners]
        firsts = None
        if self.speculates:
            self._check_sizes(optimizer, bucket)
            self._house_seconds(optimizer, device)
            firsts, homes = homes, [self._seconds[owner] for owner in bucket.owners]
        can_cut = [
            is_cuttable(bucket.layout, owner, group, home.fields[:-1])
            for owner, home in zip(bucket.owners, homes)
        ]
        slots = self._slots_of(optimizer, device, grads, can_cut)
        is_cut = [
            can and grad.numel() * grad.element_size() > slots.slot_bytes
            for can, grad in zip(can_cut, grads)
        ]
        parts = self._parts(bucket, homes, slots, is_cut, block_size_of(group))
        engine = self.engine_of(device)
        turn = Turn(optimizer, bucket, engine, device, slots, homes, firsts, parts)
        staged = [(part.bucket(bucket), part) for part in parts]
        return turn, [(one, states_of(one, part.states)) for one, part in staged]

    def _parts(
        self,
        bucket: Bucket,
        homes: list[HostedHome],
        slots: Slots,
        is_cut: list[bool],
        block_size: int,
    ) -> list[HostPart]:
        """Returns the parts of a bucket: those of the step before, if nothing has moved."""
        key, dtypes = (bucket.owners[0], homes[0]), [grad.dtype for grad in bucket.grads]
        made_of = slots, homes, dtypes, [*map(place_in_memory, bucket.owners)]
        if key not in self._turns or self._turns[key][0] != made_of:
            of = dict(zip(bucket.owners, homes))
            self._turns[key] = made_of, parts_of(bucket, of, slots, block_size, is_cut)
        return self._turns[key][1]

    def _check_sizes(self, optimizer: Any, bucket: Bucket) -> None:
        for owner, param, grad in zip(bucket.owners, bucket.params, bucket.grads):
            if grad.element_size() > param.element_size():
                name = name_of(optimizer.param_groups, owner)
                raise RuntimeError(
                    f"the gradient of {name} is in {grad.dtype}, which has more bits than its "
                    f"{param.dtype}: it cannot be kept in the place of the weights until all "
                    "gradients are known; use clip='two-pass', or an accumulator"
                )

    def _slots_of(
        self, optimizer: Any, device: torch.device, grads: Sequence[Tensor], can_cut: Sequence[bool]
    ) -> Slots:
        """Returns the slots for gradients of a device, which are made anew if a parameter that is
        not cut needs a larger one."""
        engine, size = self.engine_of(device), self.bucket_bytes
        needed = max(
            grad.element_size() * (min(grad.numel(), staged.CUT) if can else grad.numel())
            for can, grad in zip(can_cut, grads)
        )
        slots = self._all_slots.get(device)
        if slots is None or slots.slot_bytes < needed:
            if size is None:
                every = (p for group in optimizer.param_groups for p in group["params"])
                held = sum(local_part(p).nbytes for p in every if p.device == device)
                most = SLOT_BYTES if engine.is_asynchronous else INLINE_BYTES
                size = min(most, held // BUCKETS)
            size = aligned(max(size, needed, 1), 512)
            slab = self._take(slots_with(engine) * size, GRADIENTS, optimizer, device)
            slots = self._all_slots[device] = Slots(slab, size)
        return slots

    def _given(self, run: Turn, scalars: StepScalars) -> StepScalars:
        """Returns the scalars as the ops read them, on the host, where they arrive before the
        gradients do."""
        if run.firsts is not None and scalars.clip_coef is None:
            one = torch.ones((), dtype=torch.float32, device=run.device)
            scalars = scalars._replace(clip_coef=one)  # another takes its place if gradients clip
        found = [scalar for scalar in scalars if scalar is not None]
        if not found:
            return scalars
        if not self._mails:
            slab = self._take(MAIL * MAILS, GRADIENTS, run.optimizer, run.device)
            self._mails += slab.split(MAIL)
        run.mail = self._mails.pop()
        self._lent.append(run.mail)
        run.mail = run.mail.view(torch.float32)[: len(found)]
        values = [scalar.detach().reshape(()).to(run.device, torch.float32) for scalar in found]
        run.packed = torch.stack(values)
        there = iter(run.mail)
        return StepScalars(*(None if scalar is None else next(there) for scalar in scalars))

    def _with(self, run: Turn, steps: Sequence[tuple[Bucket, Call]]) -> Calls:
        return [
            (bucket, partial(self._put, run, part, step))
            for part, (bucket, step) in zip(run.parts, steps)
        ]

    # ---- the pipeline ---------------------------------------------------------------------------

    def _put(self, turn: Turn, part: HostPart, step: Call, again: bool = False) -> None:
        """Lets the gradients of a part go down, and a thread of the host step it then."""
        loose: Any = None
        try:
            while self._tasks and self._tasks[0].future.done():
                self._retire()
            while turn.slots.users[part.slot] is not None:
                self._retire()
            engine, sources, check = turn.engine, [], None
            if not again:
                check = self._checked(turn)
                sources = part.sources(turn.bucket.grads)
                if turn.packed is not None:  # with the first part: the steps of all read them
                    sources.insert(0, (bytes_of(turn.packed), bytes_of(turn.mail)))
                    turn.packed = None
                after = [engine.mark()]
                for i, (source, here) in enumerate(sources):
                    loose = engine.down(here, source, () if i else after)
            commits = again or turn.firsts is None
            if self._executor is None:
                self._executor, self._allowed = executor(), threads_allowed()
            threads = min(torch.get_num_threads(), self._allowed)
            task = Task(turn, part, step, sources, loose, check, commits, again, threads)
            task.future = self._executor.submit(self._stepped, task)
            self._tasks.append(task)
            turn.slots.users[part.slot] = task
            if part is turn.parts[-1]:
                turn.bucket = turn.bucket._replace(grads=[])  # the tasks have them while they leave
        except BaseException:
            if loose is not None:
                turn.engine.sync(loose)
            self._abandon()
            raise

    def _checked(self, turn: Turn) -> Check:
        """Compares all weights on a device with those that the host has, once in a step."""
        device, engine = turn.device, turn.engine
        if device in self._checks:
            return self._checks[device]
        known = {
            home: local_part(param)
            for param, home in self._homes.items()
            if home.sums is not None and param.device == device
        }
        flags = self._flags.get(device)
        if flags is None or flags.numel() < len(known):
            size = aligned(len(self._homes), FLAGS)
            flags = self._flags[device] = self._take(size, GRADIENTS, turn.optimizer, device)
        differs = torch.empty(len(known), dtype=torch.uint8, device=device)
        compare(known, differs)
        if known:
            engine.down(flags[: len(known)], differs, [engine.mark()])
        numbers = {home: i for i, home in enumerate(known)}
        self._checks[device] = Check(flags, numbers, differs)
        return self._checks[device]

    @torch.no_grad()
    def _stepped(self, task: Task) -> None:
        """Steps a part, on the thread of the host."""
        turn, part, check = task.turn, task.part, task.check
        use_threads(task.threads)
        if task.ticket is not None:
            turn.engine.sync(task.ticket)
        task.grads = []
        for at in part.begins:
            home = turn.homes[at]
            first = home if turn.firsts is None else turn.firsts[at]
            local = turn.bucket.params[at]
            if task.again:
                home.weights.copy_(local)
                home.state_run.copy_(first.state_run)
                continue
            number = check.numbers.get(first)
            if number is None or check.flags[number]:
                first.sums = None
                first.weights.copy_(local)
            if first is not home:
                home.run.copy_(first.run)
                first.sums = None
        held = [] if turn.firsts is None else part.held(turn.firsts)
        for there, here in held if task.again else ():
            here.copy_(there)
        part.copy_counts()
        try:
            task.step()
        except (RuntimeError, NotImplementedError) as error:
            bucket = part.bucket(turn.bucket)
            named = explained(turn.optimizer, error, turn.bucket.owners, bucket.grads)
            raise named.with_traceback(error.__traceback__) from error
        for there, here in () if task.again else held:
            there.copy_(here)

    def _retire(self) -> None:
        """Waits for the oldest step, and lets its weights go up, unless it may be taken back."""
        task = self._tasks[0]
        task.future.result()
        if task.commits:
            self._commit(task)
        else:
            self._made.append(task)
        self._tasks.popleft()
        task.turn.slots.users[task.part.slot] = None

    def _commit(self, task: Task) -> None:
        """Lets the weights of a part go up. With its last part, the state of a parameter changes
        its place if it was made in the second one."""
        turn, part, engine = task.turn, task.part, task.turn.engine
        torch.autograd.graph.increment_version(part.written)
        after, ticket = [engine.mark()], None
        for i, (there, here) in enumerate(part.ups):
            ticket = engine.up(there, here, () if i else after)
        for at in part.positions:
            turn.homes[at].written = ticket
        self._last[engine] = ticket
        for at in part.ends:
            owner, home = turn.bucket.owners[at], turn.homes[at]
            if turn.firsts is not None:
                self._homes[owner], self._seconds[owner] = home, turn.firsts[at]
                turn.optimizer.state[owner].update(home.views)
            self._brought.append((turn.bucket.params[at], home))

    def finish(self) -> None:
        try:
            while self._tasks:
                self._retire()
            for engine, ticket in self._last.items():
                engine.wait(ticket)
            note(self._brought)
            self._reset()
        except BaseException:
            self._abandon()
            raise

    def _reset(self) -> None:
        self._checks, self._last, self._brought = {}, {}, []
        if not self._made:
            self._mails += self._lent
            self._lent = []

    def _abandon(self) -> None:
        """Waits for the steps that have begun, and lets their weights go up, after an error."""
        tasks, self._tasks = self._tasks, deque()
        errors = []
        for task in tasks:
            task.turn.slots.users[task.part.slot] = None
            if _has_stepped(task) and task.commits:
                try:
                    self._commit(task)
                except BaseException as error:
                    errors.append(error)
        for engine, ticket in self._last.items():
            engine.wait(ticket)
        self._reset()
        if errors:
            raise errors[0]

    # ---- a step that may be taken back ----------------------------------------------------------

    def commit(self) -> None:
        """Lets the steps in second places count: the weights go up, and the places change."""
        made, self._made = self._made, []
        for task in made:
            task.commits = True
        self._tasks.extend(made)
        self.finish()

    def made_again(self, clip_coef: Tensor) -> Calls:
        """Returns the calls that make the steps in second places once more, with gradients that are
        clipped by this factor, and let them count."""
        made, self._made = self._made, []
        for mail in {id(task.turn): task.turn.mail for task in made}.values():
            mail[-1].mul_(clip_coef.cpu())  # the last of StepScalars
        calls = []
        for task in made:
            turn, part = task.turn, task.part
            call = partial(self._put, turn, part, task.step, again=True)
            calls.append((part.bucket(turn.bucket), call))
        return calls

    def discard(self) -> None:
        """Forgets the steps in second places."""
        self._abandon()
        self._made = []
        self._reset()


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


def note(brought: Sequence[tuple[Tensor, HostedHome]]) -> None:
    """Notes the checksums of weights on a device, which those on the host are equal to now."""
    for local, home in brought:
        home.sums = checksums(local)


def compare(known: Mapping[HostedHome, Tensor], differs: Tensor) -> None:
    """Sets a flag for each of these weights on a device, if they are no longer those that the host
    has."""
    for (home, local), flag in zip(known.items(), differs):
        now = checksums(local)
        is_as_large = now.shape == home.sums.shape
        flag.copy_((now != home.sums).any()) if is_as_large else flag.fill_(1)


def _has_stepped(task: Task) -> bool:
    """Waits for a step, and returns whether it was made."""
    return task.future.exception() is None
