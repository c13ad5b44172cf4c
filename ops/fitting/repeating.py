"""Runs a training step again, with a setting that needs less, when it has run out of memory."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch

from .._core.capture import is_capturing
from ..checkpointing import RecomputeError
from ..patching.blocks import verified_blocks
from ..step.out_of_memory import explained, forget_tensors, is_out_of_memory
from .before import Before
from .leaner import MicroBatches, SaveLevels
from .overlooked import refuse_overlooked
from .training import Training

__all__ = ["Retry", "RetryingStep"]


class Ladder(Protocol):
    """Settings of which each needs less memory than the one before it."""

    def leaner(self) -> str | None:
        """Sets the next setting. Returns what was changed, or None if none is left."""
        ...


@dataclasses.dataclass(frozen=True)
class Retry:
    """A step that ran out of memory, or whose blocks, which then save less, computed something else
    when they ran again.

    Attributes:
        step: the number of the call, from 1.
        error: the first line of the error.
        change: what was changed before the step was repeated.
    """

    step: int
    error: str
    change: str


class RetryingStep:
    """What :func:`retry_on_oom` returns: a function, and what became of its calls.

    Attributes:
        history: a :class:`Retry` for each attempt that was repeated.
    """

    def __init__(
        self, step: Callable[..., Any], training: Training, ladders: Sequence[Ladder]
    ) -> None:
        functools.update_wrapper(self, step)
        self._step, self._training, self._ladders = step, training, ladders
        self._calls = 0
        self.history: list[Retry] = []

    @property
    def retries(self) -> int:
        """How many attempts were repeated."""
        return len(self.history)

    def report(self) -> str:
        """Returns what was changed in which step, as text."""
        lines = [f"{self.retries} of {self._calls + self.retries} attempts were repeated"]
        lines += [f"  step {one.step}: {one.change} ({one.error})" for one in self.history]
        return "\n".join(lines)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_capturing():  # an error ends the capture, so that nothing can be repeated in it
            return self._run(args, kwargs)
        _refuse_ranks()
        if self._calls == 0:
            refuse_overlooked(self._step, self._training)
        self._calls += 1
        while True:
            levels = self._unverified()
            result, before, error = self._attempt(args, kwargs, levels is not None)
            if error is None:
                if levels is not None:
                    levels.is_unverified = False
                return result
            try:
                had_copies = before.copies_took_room
                if levels is not None and not is_out_of_memory(error):
                    wrong = isinstance(error, RecomputeError)
                    what = "would have wrong gradients" if wrong else "failed at these levels"
                    change = self._give_up(levels, before, error)
                else:
                    what = "ran out of memory"
                    self._undo(before, error)
                    change = self._change(error, had_copies)
                self._note(error, what, change)
            finally:
                del before, error  # they hold copies, which must not be beside the next attempt

    def _run(self, args: Any, kwargs: Any) -> Any:
        for ladder in self._ladders:
            if isinstance(ladder, MicroBatches):
                kwargs = kwargs | {"micro_batches": ladder.count}
        return self._step(*args, **kwargs)

    def _unverified(self) -> SaveLevels | None:
        """Returns the levels, if they were raised and no step has run through since."""
        levels = (one for one in self._ladders if isinstance(one, SaveLevels))
        return next((one for one in levels if one.is_unverified), None)

    def _attempt(
        self, args: Any, kwargs: Any, verifies: bool
    ) -> tuple[Any, Before, Exception | None]:
        """Returns what the step returned, or what there was before it and the error. If it
        ``verifies``, that is any RuntimeError: blocks may compute something else when they run
        again, or write to their inputs, from which they would be run."""
        with Before(self._training) as before:
            try:
                before.keep()
                with verified_blocks() if verifies else nullcontext():
                    return self._run(args, kwargs), before, None
            except Exception as error:
                if not (verifies and isinstance(error, RuntimeError)) and not is_out_of_memory(
                    error
                ):
                    raise
                failure = error
        return None, before, failure

    def _undo(self, before: Before, error: Exception) -> None:
        """Leaves nothing of an attempt, or raises if something cannot be put back."""
        forget_tensors(error)
        try:
            before.free_pending()
            lost = before.lost()
            if lost is None:
                before.restore()
        except Exception as broken:
            raise explained(
                error,
                f"the step could not be undone, and model and optimizer may be half changed: "
                f"{type(broken).__name__}: {broken}",
            ) from broken
        if lost is not None:
            raise explained(
                error,
                f"the step cannot be repeated, since it has changed {lost}; what the step does "
                "after that has not been done",
            ) from error

    def _give_up(self, levels: SaveLevels, before: Before, error: Exception) -> str:
        """Takes back the levels of blocks that cannot run again, even if the step cannot be undone.
        Returns what was changed."""
        try:
            self._undo(before, error)
        finally:  # undoing has put back what these levels had set
            change = levels.give_up()
        return change

    def _change(self, error: Exception, had_copies: bool) -> str:
        """Sets a leaner setting and returns what was changed, or raises if none is left."""
        try:
            change = self._leaner(had_copies)
        except Exception as broken:
            raise explained(
                error, f"a leaner setting could not be set: {type(broken).__name__}: {broken}"
            ) from broken
        if change is None:
            raise explained(
                error,
                "no leaner setting is left; model, optimizer and random numbers are as they were "
                "before the step. A smaller batch, headroom.fit or an optimizer with less state "
                "would help",
            ) from error
        return change

    def _note(self, error: Exception, what: str, change: str) -> None:
        line = str(error).partition("\n")[0] or type(error).__name__
        self.history.append(Retry(self._calls, line, change))
        warnings.warn(f"step {self._calls} {what} and is repeated: {change}. {line}", stacklevel=3)

    def _leaner(self, had_copies: bool) -> str | None:
        if had_copies:
            # The step might have fitted without the copies, which less activations do not change.
            self._training = dataclasses.replace(self._training, copies_on_host=True)
            return "what undoes the optimizer's step is copied to the memory of the host"
        return next((text for one in self._ladders if (text := one.leaner())), None)


def _refuse_ranks() -> None:
    ranks = torch.distributed
    if ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1:
        raise RuntimeError(
            f"headroom.retry_on_oom: {ranks.get_world_size()} ranks train. One that ran out of "
            "memory in its backward pass would repeat the step while the others wait for its "
            "gradients, so a step can be repeated on a single rank only; call the step itself, and "
            "leave a margin with headroom.fit or headroom.plan"
        )
