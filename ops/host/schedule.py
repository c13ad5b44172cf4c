"""Says what it costs that states and kept tensors lie on the host: schedules of a step, and the
rates of a link to simulate them with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .arena import default_arena
from .engine import Engine
from .engines import engine_of
from .simulation import Link, Schedule

PIECE = 32 << 20  # bytes of a copy whose rate is measured
SMALL = 4 << 10  # bytes of one whose latency is


def paged_step(
    pieces: Sequence[int],
    step_seconds: float,
    link: Link,
    slots: int = 3,
    copies: int = 1,
    before: Sequence[float] = (),
) -> Schedule:
    """Returns the schedule of an optimizer step whose states pass through a ring.

    Args:
        pieces: the bytes of state of each.
        step_seconds: of all pieces together.
        slots: of the ring.
        copies: of each piece, in each direction.
        before: the seconds that the device computes before it steps each piece, such as those of
            the backward pass that the gradients come from which are released then.
    """
    schedule, total = Schedule(link), sum(pieces) or 1
    arrived: list[int] = []
    stored: list[int] = []

    def copied(queue: str, size: int, after: list[int]) -> int:
        last = 0
        for i in range(copies):
            part = size * (i + 1) // copies - size * i // copies
            last = schedule.copy(queue, part, () if i else after)
        return last

    for i, size in enumerate(pieces):
        for ahead in range(len(arrived), min(i + slots, len(pieces))):
            free = stored[ahead - slots : ahead - slots + 1] if ahead >= slots else []
            arrived.append(copied("up", pieces[ahead], free))
        if before:
            schedule.compute(before[i])
        stepped = schedule.compute(step_seconds * size / total, [arrived[i]])
        stored.append(copied("down", size, [stepped]))
    return schedule


def paged_step_seconds(
    pieces_bytes: Sequence[int], step_seconds: float, link: Link, slots: int = 3, copies: int = 1
) -> float:
    """Returns the seconds of an optimizer step whose states pass through a ring, until the last
    piece has been stepped; its copy down goes on beside what follows. See :func:`paged_step`."""
    return step_seconds + paged_step(pieces_bytes, step_seconds, link, slots, copies).exposed


def hosted_step(
    buckets: Sequence[tuple[int, int]],
    step_seconds: Sequence[float],
    link: Link,
    ready: Sequence[float] = (),
    slots: int = 3,
) -> Schedule:
    """Returns the schedule of an optimizer step on the host: gradients go down, the host steps, and
    weights go up, one bucket after the other. Its ``exposed`` is how much later than the backward
    pass the device has all weights.

    Args:
        buckets: the bytes of the gradients and of the weights of each.
        step_seconds: of each, on the host.
        ready: when the gradients of each are there, in seconds from the beginning of the backward
            pass, in rising order. Empty: all are, before the step.
        slots: for gradients on the host. A bucket goes down when the step that used its slot has
            ended.
    """
    schedule, stepped, weights = Schedule(link), list[int](), list[int]()
    now: float = 0
    for i, ((grad_bytes, weight_bytes), seconds) in enumerate(zip(buckets, step_seconds)):
        computed: list[int] = []
        if ready:
            computed = [schedule.compute(ready[i] - now)]
            now = ready[i]
        free = stepped[i - slots : i - slots + 1] if i >= slots else []
        arrived = schedule.copy("down", grad_bytes, [*computed, *free])
        stepped.append(schedule.on_host(seconds, [arrived]))
        weights.append(schedule.copy("up", weight_bytes, [stepped[-1]]))
    schedule.compute(0, weights)  # what comes next reads them
    return schedule


def blocks_step(
    kept: Sequence[int], forward: Sequence[float], backward: Sequence[float], link: Link
) -> Schedule:
    """Returns the schedule of the forward and the backward pass of blocks, some of which hold on
    the host what they keep.

    Args:
        kept: the bytes of each block that leave; 0 where it keeps them on the device.
        forward, backward: the seconds of each.
    """
    schedule = Schedule(link)
    leaving = [i for i, size in enumerate(kept) if size]
    # Beside a computation, those of the last two are still there when they are asked for.
    returning = leaving[:-2] if link.is_asynchronous else leaving
    left: dict[int, int] = {}
    for i, seconds in enumerate(forward):
        place = leaving.index(i) if kept[i] else 0
        has_left = [left[leaving[place - 2]]] if place >= 2 else []
        computed = schedule.compute(seconds, has_left)
        if kept[i]:
            left[i] = schedule.copy("down", kept[i], [computed])
    arrived: dict[int, int] = {}

    def fetch(i: int) -> None:
        if i in returning and i not in arrived:
            arrived[i] = schedule.copy("up", kept[i], schedule.mark())

    for i in reversed(range(len(backward))):
        if kept[i]:
            place = leaving.index(i)
            if link.is_asynchronous and place:
                fetch(leaving[place - 1])
            fetch(i)
        schedule.compute(backward[i], [arrived[i]] if i in arrived else [])
        if kept[i] and i not in returning:
            schedule.compute(0, [left[i]])  # its memory is freed when it has been copied
    return schedule


def exposed_seconds(
    kept_bytes_per_block: Sequence[int],
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    link: Link,
) -> float:
    """Returns how many seconds longer a step of blocks takes whose kept tensors leave. See
    :func:`blocks_step`."""
    return blocks_step(kept_bytes_per_block, forward_seconds, backward_seconds, link).exposed


def streamed_step(
    weights: Sequence[int],
    gradients: Sequence[int],
    forward: Sequence[float],
    backward: Sequence[float],
    link: Link,
    prefetch: int = 1,
) -> Schedule:
    """Returns the schedule of the forward and the backward pass of blocks whose weights come up
    before each of them and whose gradients go down after it.

    Args:
        weights: the bytes of each block that are on the host; 0 where they stay on the device.
        gradients: the bytes of each that go to the host; 0 where all is frozen, or stays.
        forward, backward: the seconds of each, with what is computed again.
        prefetch: how many blocks ahead a copy begins.
    """
    schedule = Schedule(link)
    ahead = prefetch if link.is_asynchronous else 0
    loaded: dict[int, int] = {}  # copies by the blocks in slots, the one used longest ago first

    def load(i: int) -> None:
        if not weights[i]:
            return
        if i in loaded:
            loaded[i] = loaded.pop(i)
            return
        if len(loaded) > ahead:
            del loaded[next(iter(loaded))]
        loaded[i] = schedule.copy("up", weights[i], schedule.mark())

    streamed = [i for i, size in enumerate(weights) if size]

    def visit(i: int, seconds: float, way: int) -> int:
        load(i)
        if weights[i]:
            place = streamed.index(i)
            for j in range(place + way, place + way * (ahead + 1), way):
                if 0 <= j < len(streamed):
                    load(streamed[j])
        return schedule.compute(seconds, [loaded[i]] if i in loaded else [])

    for i, seconds in enumerate(forward):
        visit(i, seconds, 1)
        if i in loaded:
            schedule.sync(loaded[i])  # the host may write the weights when a block has returned
    down: int | None = None
    for i in reversed(range(len(backward))):
        computed = visit(i, backward[i], -1)
        if gradients[i]:
            if down is not None:
                computed = schedule.compute(0, [down])  # those of one block wait on the device
            down = schedule.copy("down", gradients[i], [computed])
    return schedule


# ---- what a link can do --------------------------------------------------------------------------

_links: dict[torch.device, Link] = {}


def measured_link(device: torch.device) -> Link:
    """Returns the rates of the copies to and from a device, which are measured at the first call:
    a few copies of 32 MiB and of 4 KiB in each direction, and in both at once."""
    if device not in _links:
        with _disable_current_modes(), torch.no_grad():
            _links[device] = measured(engine_of(device), device)
    return _links[device]


def measured(engine: Engine, device: torch.device) -> Link:
    """Returns the rates of an engine's copies, as :func:`measured_link` does at its first call."""
    far = default_arena().take(2 * PIECE, kind="measurement", owner="link", device=device)
    near = torch.zeros(2 * PIECE, dtype=torch.uint8, device=device)
    sides = {"up": (near[:PIECE], far[:PIECE]), "down": (far[PIECE:], near[PIECE:])}

    def copied(queue: str, size: int) -> object:
        target, source = sides[queue]
        return getattr(engine, queue)(target[:size], source[:size])

    def seconds(queues: Sequence[str], size: int, times: int) -> float:
        """Returns how long copies take until those of the first queue have ended."""

        def timed() -> float:
            engine.sync(engine.mark())
            start = time.perf_counter()
            tickets = [[copied(queue, size) for queue in queues] for _ in range(times)][-1]
            engine.sync(tickets[0])
            taken = time.perf_counter() - start
            for ticket in tickets[1:]:
                engine.sync(ticket)
            return taken

        timed()
        return statistics.median(timed() for _ in range(5)) / times

    latency = max(seconds([queue], SMALL, 32) for queue in sides)
    alone = {queue: seconds([queue], PIECE, 3) - latency for queue in sides}
    link = Link(PIECE / alone["up"], PIECE / alone["down"], latency, engine.is_asynchronous)
    if not engine.is_asynchronous:
        return link
    up = seconds(["up", "down"], PIECE, 3) - latency
    down = seconds(["down", "up"], PIECE, 3) - latency
    # The one that ends first ran beside the other all the time, and the other alone after it.
    first = min(up, down)
    beside = {
        queue: (PIECE - max(0, until - first) * PIECE / alone[queue]) / first
        for queue, until in (("up", up), ("down", down))
    }
    return link._replace(up_beside=beside["up"], down_beside=beside["down"])
