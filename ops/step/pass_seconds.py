"""Times whole passes of a model, and how much of them its blocks take."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .calls import results_of
from .clock import Stopwatch
from .description import Step
from .watch import hearing_blocks, hearing_gradients

__all__ = ["PassSeconds", "is_first_run", "seconds_of_pass"]


class PassSeconds(NamedTuple):
    """The seconds of a forward and a backward pass.

    Attributes:
        blocks: from the first block to the last one in the forward pass, and back in the backward.
        outside: before and behind them.
    """

    blocks: float
    outside: float

    @property
    def whole(self) -> float:
        return self.blocks + self.outside

    def least(self, other: PassSeconds) -> PassSeconds:
        """Returns the least of both, since what else runs on the machine only adds to it."""
        return PassSeconds(min(self.blocks, other.blocks), min(self.outside, other.outside))


def seconds_of_pass(step: Step, model: nn.Module, blocks: Iterable[nn.Module]) -> PassSeconds:
    """Returns the seconds of a forward and a backward pass of a copy of the model, whose gradients
    are dropped as they arrive.

    Args:
        blocks: of the copy.
    """
    assert step.device is not None
    marks = _Marks(step.device)

    def drop(name: str, param: Tensor) -> None:
        param.grad = None

    with (
        closing(marks),
        hearing_gradients(model, drop),
        hearing_blocks(blocks, marks.before, marks.after),
    ):
        marks.take("start")
        loss = step.loss_of(model, step.batch)
        marks.take("turn")
        loss.backward()
        marks.take("end")
    return marks.seconds()


class _Marks:
    """The times at which the passes enter the blocks and leave them."""

    def __init__(self, device: torch.device) -> None:
        self._watch = Stopwatch(device)
        self._names: list[str] = []
        self._handles: list[Any] = []

    def take(self, name: str) -> None:
        self._names.append(name)
        self._watch.lap()

    def before(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        if is_first_run() and "in" not in self._names:
            self.take("in")
            self._take_at_gradients((args, kwargs), "back out")

    def after(self, block: nn.Module, args: Any, result: Any) -> None:
        if is_first_run():
            self.take("out")
            self._take_at_gradients(result, "back in")

    def _take_at_gradients(self, value: Any, name: str) -> None:
        def arrived(grad: Tensor) -> None:
            if "turn" in self._names:  # and not of a gradient that the loss is made of
                self.take(name)

        self._handles += [x.register_hook(arrived) for x in results_of(value)]

    def close(self) -> None:
        """Removes the hooks on tensors, which may be the user's."""
        for handle in self._handles:
            handle.remove()

    def seconds(self) -> PassSeconds:
        """Returns what the marks say. Where the arguments of the first block need no gradient, the
        backward pass ends in it."""
        at = list(accumulate(self._watch.seconds(), initial=0.0))
        marks = list(zip(self._names, at))
        first, last = dict(reversed(marks)), dict(marks)
        blocks = 0.0
        if "out" in last:
            blocks += last["out"] - first["in"]
        if "back in" in first:
            blocks += last.get("back out", at[-1]) - first["back in"]
        return PassSeconds(blocks, at[-1] - blocks)


def is_first_run() -> bool:
    """Returns whether a block runs in the forward pass of the model, and not in a checkpoint's."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
