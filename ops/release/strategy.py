"""Base classes for handling released gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .._core.grouping import grouped
from .._core.names import name_of
from ..optim.base import Optimizer, common_max_grad_norm


class Strategy:
    """Handles gradients that are ready. The engine calls :meth:`admit` for each, and then
    :meth:`take` for those of a bucket; it holds a lock meanwhile.

    Attributes:
        places: the number of the group of each parameter; the engine keeps it.
        unfinished: what the backward before this one raised, if it did not end; the engine keeps
            it. Empty if that is not known, and None after one that ended.
        norm: the norm that the next step clips by, if there is one. It is saved with the handle.
        sums_over_ranks: whether gradients are those of this rank alone, to be reduced later.
    """

    sums_over_ranks = False
    has_stepped = False  # whether something was written that cannot be taken back

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.places: dict[Tensor, int] = {}
        self.unfinished: str | None = None
        self.norm: Tensor | None = None

    def check(self) -> None:
        """Raises if the optimizer's options, which may change, do not fit."""

    def admit(self, param: Tensor, waits: bool) -> None:
        """Raises if this parameter must not get a gradient now. ``waits``: it has one in a
        bucket."""

    def take(self, params: list[Tensor]) -> None:
        """Uses the gradients of these parameters, which are dropped then."""
        raise NotImplementedError

    def drop(self) -> None:
        """Forgets which parameters had gradients, after an error."""

    def restart(self) -> None:
        """Forgets everything of the step that runs, or prepares for the first."""

    def end(self) -> None:
        """Forgets the step that runs, and gives back what steps needed."""
        self.restart()

    @property
    def has_begun(self) -> bool:
        """Returns whether backward has begun a step that :meth:`finish` must finish."""
        return False

    def check_finish(self, max_grad_norm: float | None) -> None:
        """Raises if ``optimizer.step()`` must not finish the step."""

    def finish(self) -> None:
        """Finishes the step that backward has begun."""


class InBackward(Strategy):
    """Steps parameters inside backward, each at most once before
    ``optimizer.step()``."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.restart()

    def restart(self) -> None:
        self.has_stepped = False
        self._has_applied = False
        self._seen: set[Tensor] = set()  # parameters that have a gradient in this backward

    @property
    def max_norm(self) -> float | None:
        return common_max_grad_norm(self.optimizer.param_groups)

    @property
    def has_begun(self) -> bool:
        return bool(self._seen)

    def check(self) -> None:
        if self.max_norm is not None:
            raise ValueError(
                "the optimizer has max_grad_norm: say clip='previous' or clip='two-pass', or give "
                "an accumulator"
            )

    def admit(self, param: Tensor, waits: bool) -> None:
        if param in self._seen:
            if not waits:  # else step() would step the second by itself
                param.grad = None
            first = "waits to be stepped" if waits else "has been stepped, and is gone"
            self._refuse(param, f"got a second gradient before optimizer.step(): the first {first}")
        self._seen.add(param)

    def check_unseen(self) -> None:
        """Raises if a parameter has got a gradient since the last step."""
        if self._seen:
            first = next(iter(self._seen))
            self._refuse(first, "has got a gradient since the last optimizer.step()")

    def _refuse(self, param: Tensor, what: str) -> None:
        name = name_of(self.optimizer.param_groups, param)
        raise RuntimeError(
            f"{name} {what}. {self._way_on()}Call step() after every backward(), sum micro-batches "
            "in a GradAccumulator, and do not use a parameter in several reentrant checkpoints"
        )

    def _way_on(self) -> str:
        """Returns what to do after a backward that raised, if there was one."""
        if self.unfinished is None:
            return ""
        if self.has_stepped:
            then = (
                "it has stepped parameters, which cannot be taken back: call optimizer.step(), "
                "which leaves the others as they are, or load the last checkpoint"
            )
        else:
            then = "call handle.abandon(), of release_gradients(), before another one"
        raised = self.unfinished and f": it raised {self.unfinished}"
        return (
            f"The backward() before this one did not end{raised}. After one that raised, {then}. "
        )

    def drop(self) -> None:
        self._seen = set()

    def check_finish(self, max_grad_norm: float | None) -> None:
        if self.has_begun and max_grad_norm not in (None, self.max_norm):
            raise RuntimeError(
                "the step was made in backward: give max_grad_norm to the optimizer's constructor"
            )

    def finish(self) -> None:
        left = [param for param in self.places if param.grad is not None]
        if left:
            self.take(left)
        for param in left:
            param.grad = None
        if self.optimizer._paging is not None:
            self.optimizer._paging.finish()
        self._conclude()
        self.restart()

    def _conclude(self) -> None:
        """Sets the optimizer's attributes that show what was measured."""
        self.optimizer._measured, self.optimizer._measured_params = None, []

    def _apply(
        self,
        params: Iterable[Tensor],
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        clip_coef: Tensor | None = None,
    ) -> None:
        """Steps parameters, with these scalars beside the optimizer's own."""
        scalars = self.optimizer.scalars.joined(found_inf, clip_coef)
        if grad_scale is not None:
            scalars = scalars._replace(grad_scale=grad_scale)
        calls = [
            self.optimizer._prepared_part(index, members, scalars)
            for index, members in grouped(params, self.places.__getitem__).items()
        ]
        self.has_stepped = True
        if not self._has_applied:
            self.optimizer._restart_stalled()
            self._has_applied = True
        with torch.no_grad():
            for call in calls:
                call()
