"""Times whole passes of a model, and how much of them its blocks take."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ..._core.clock import Stopwatch
from ...step.calls import results_of
from ...step.description import Step
from .block_costs import PassSeconds

__all__ = ["PassTimes", "is_first_run", "seconds_of_pass"]

FASTER = 0.95  # of the time of a whole batch: parts that take more are not taken to be faster


def seconds_of_pass(step: Step, model: nn.Module, blocks: Iterable[nn.Module]) -> PassSeconds:
    """Returns the seconds of a forward and a backward pass of a copy of the model, whose gradients
    are dropped as they arrive.

    Args:
        blocks: of the copy.
    """
    assert step.device is not None
    marks = _Marks(step.device)

    def drop(param: Tensor) -> None:
        param.grad = None

    with ExitStack() as hooks:
        for param in model.parameters():
            if param.requires_grad:
                hooks.callback(param.register_post_accumulate_grad_hook(drop).remove)
        for block in blocks:
            before = block.register_forward_pre_hook(marks.before, with_kwargs=True)
            hooks.callback(before.remove)
            hooks.callback(block.register_forward_hook(marks.after).remove)
        hooks.callback(marks.remove)
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

    def remove(self) -> None:
        """Removes the hooks on tensors, which may be the user's."""
        for handle in self._handles:
            handle.remove()

    def seconds(self) -> PassSeconds:
        """Returns what the marks say. Where the arguments of the first block need no gradient, the
        backward pass ends in it."""
        at = list(accumulate(self._watch.seconds(), initial=0.0))
        first = dict(reversed(list(zip(self._names, at, strict=True))))
        last = dict(zip(self._names, at, strict=True))
        blocks = 0.0
        if "out" in last:
            blocks += last["out"] - first["in"]
        if "back in" in first:
            blocks += last.get("back out", at[-1]) - first["back in"]
        return PassSeconds(blocks, at[-1] - blocks)


def is_first_run() -> bool:
    """Returns whether a block runs in the forward pass of the model, and not in a checkpoint's."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1


@dataclass
class PassTimes:
    """What passes at the leanest levels have taken: of the batch, of parts of it, and with either
    loss. What was not timed follows from what was: a part of some size takes as much longer than
    its share with one loss as with the other, and smaller parts take no less than larger ones.

    Args:
        whole: of the batch.
        fused_loss: whether that was with the fused loss.
    """

    whole: PassSeconds
    fused_loss: bool

    def __post_init__(self) -> None:
        self._timed = {(1, self.fused_loss): self.whole}

    def add(self, count: int, fused_loss: bool, seconds: PassSeconds) -> None:
        """Notes the times of one of ``count`` parts."""
        self._timed[count, fused_loss] = seconds

    def is_known(self, count: int, fused_loss: bool) -> bool:
        """Returns whether parts of this size have been timed, and this loss."""
        return any(count == n for n, _ in self._timed) and any(
            fused_loss == fused for _, fused in self._timed
        )

    def factor(self, count: int) -> float:
        """Returns by which factor the blocks take longer in ``count`` parts than in the batch."""
        found = {n: self._factor(n) for n, _ in self._timed}
        return found.get(count) or max(factor for n, factor in found.items() if n < count)

    def most_of_blocks(self, count: int) -> float:
        """Returns how long the blocks of one of ``count`` parts may take: their share of the
        batch's seconds, times the largest factor of the parts that were timed."""
        return self.whole.blocks / count * max(self._factor(n) for n, _ in self._timed)

    def _factor(self, count: int) -> float:
        if self.whole.blocks > 0:
            blocks = min(seconds.blocks for (n, _), seconds in self._timed.items() if n == count)
            factor = count * blocks / self.whole.blocks
        elif (count, self.fused_loss) in self._timed and self.whole.rest > 0:  # without blocks
            factor = count * self._timed[count, self.fused_loss].rest / self.whole.rest
        else:
            factor = 1.0
        return 1.0 if FASTER < factor < 1.0 else factor

    def rest(self, count: int, fused_loss: bool) -> float:
        """Returns the seconds of all but the blocks, of all ``count`` parts together."""
        timed = self._timed.get((count, fused_loss))
        if timed is not None:
            return count * timed.rest
        return self.whole.rest * self.factor(count) * self._share(fused_loss)

    def _share(self, fused_loss: bool) -> float:
        """Returns the seconds of all but the blocks with a loss, as a share of those of ``whole``.
        One that was not timed is taken to be as fast."""
        if fused_loss == self.fused_loss or self.whole.rest <= 0:
            return 1.0
        return min(
            (
                n * seconds.rest / (self.whole.rest * self.factor(n))
                for (n, fused), seconds in self._timed.items()
                if fused == fused_loss
            ),
            default=1.0,
        )
