"""Runs one block by itself, forward and backward, and follows its bytes or its time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..host.engines import engine_of
from ..step.calls import Call, results_of
from ..step.clock import Stopwatch
from ..step.watch import hearing_gradients
from .collecting import no_collections
from .stream import Event
from .track import recorder_of

__all__ = ["Alone", "Bytes", "Seconds"]

# The moments of a run. Numbers from ARRIVED on are gradients, in the order in which they arrive.
BEGIN, COMPUTED, LEFT, BACKWARD, END, ARRIVED = range(6)


@dataclass(frozen=True)
class Bytes:
    """The bytes of one run of a block.

    Attributes:
        held: from the forward to the backward pass, the results that need gradients included.
        kept: besides, until the forward pass of the whole model has ended: of weights that autocast
            has cast, and of caches.
        forward: most beyond those before the run, until the forward pass has ended.
        backward: most beyond those before the run and ``held``, while gradients stay.
        released: the same if each gradient of a parameter is freed as soon as it has arrived.
        gradients: of the parameters.
        largest: of the gradients.
        moved: that the host holds between the passes.
    """

    held: int
    kept: int
    forward: int
    backward: int
    released: int
    gradients: int
    largest: int
    moved: int = 0


class Seconds(NamedTuple):
    """The seconds of the two passes."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Alone:
    """A block that is run by itself.

    Attributes:
        block: that is run.
        call: its arguments, and the autocast around it.
        device: that it is on.
        used: which of its results that require gradients get some.
    """

    block: nn.Module
    call: Call
    device: torch.device
    used: Sequence[int]

    def bytes(self) -> tuple[Bytes, Seconds]:
        """Returns the bytes of a run, by the counter of :mod:`headroom.memory`, and the seconds
        that it took, which are a little more than without the counter."""
        recorder = recorder_of(self.device, stacks=False)
        watch = Stopwatch(self.device)
        arrivals: list[tuple[int, int]] = []

        def arrived(name: str, param: Tensor) -> None:
            assert param.grad is not None
            storage = param.grad.untyped_storage()
            arrivals.append((storage.data_ptr(), storage.nbytes()))
            recorder.mark(ARRIVED + len(arrivals) - 1)

        engine, moved = engine_of(self.device), []

        def moment(number: int) -> None:
            watch.lap()
            recorder.mark(number)
            moved.append(engine.bytes_down)

        with no_collections(), hearing_gradients(self.block, arrived):
            recorder.start()
            try:
                self._run(moment)
            finally:
                recorder.stop()
        found = _followed(recorder.events(), arrivals)
        return replace(found, moved=moved[LEFT] - moved[BEGIN]), _passes(watch)

    def seconds(self) -> Seconds:
        """Returns the seconds of a run."""
        watch = Stopwatch(self.device)
        with no_collections():
            self._run(lambda number: watch.lap())
        return _passes(watch)

    def _run(self, moment: Callable[[int], None]) -> None:
        args, kwargs = self.call.fresh()
        try:
            moment(BEGIN)
            with torch.enable_grad(), self.call.settings.restored():
                results = results_of(self.block(*args, **kwargs))
                moment(COMPUTED)
            del args, kwargs  # with a cache in them
            moment(LEFT)
            loss = _Loss.apply(*(results[k] for k in self.used if k < len(results)))
            del results
            moment(BACKWARD)
            if loss is not None:
                loss.backward()
            moment(END)
        finally:
            for param in self.block.parameters():
                param.grad = None


def _passes(watch: Stopwatch) -> Seconds:
    first, second, _, last = watch.seconds()
    return Seconds(first + second, last)


class _Loss(torch.autograd.Function):
    """A number whose backward pass gives dense gradients that nothing else holds to the results of
    a block, as the rest of a model does."""

    @staticmethod
    def forward(ctx: Any, *results: Tensor) -> Tensor | None:
        ctx.like = [(x.shape, x.dtype, x.device) for x in results]
        return results[0].new_zeros(()) if results else None

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor, ...]:
        return tuple(torch.ones(s, dtype=dtype, device=at) for s, dtype, at in ctx.like)


def _followed(events: Sequence[Event], arrivals: Sequence[tuple[int, int]]) -> Bytes:
    """Follows the live bytes from moment to moment."""
    known: dict[int, int] = {}
    live = staying = most = most_released = 0  # staying: the gradients that have arrived
    at: dict[int, int] = {}
    peaks: dict[int, tuple[int, int]] = {}
    for event in events:
        if event.action == "mark":
            number = event.address - ARRIVED
            if 0 <= number < len(arrivals):
                staying += known.get(arrivals[number][0], 0)
                continue
            at[event.address], peaks[event.address] = live, (most, most_released)
            most, most_released = live, live - staying
        elif event.action == "alloc":
            known[event.address] = event.bytes
            live += event.bytes
        else:
            live -= known.pop(event.address, 0)  # what was there before does not count
        most, most_released = max(most, live), max(most_released, live - staying)
    held = at[LEFT] - at[BEGIN]
    before = at[BEGIN] + held
    return Bytes(
        held,
        max(0, at[COMPUTED] - at[LEFT]),
        max(peaks[COMPUTED][0], peaks[LEFT][0]) - at[BEGIN],
        max(0, peaks[END][0] - before),
        max(0, peaks[END][1] - before),
        sum(size for _, size in arrivals),
        max((size for _, size in arrivals), default=0),
    )
