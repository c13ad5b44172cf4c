"""``headroom.retry_on_oom``: runs a training step that ran out of memory again, with less."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from .._core.capture import is_capturing
from .._core.checks import check_count
from .._core.ranks import world_size
from ..grad.accumulate import GradAccumulator
from ..patching.blocks import verified_blocks
from ..step.out_of_memory import add_note, forget_tensors, is_out_of_memory
from ..techniques import TECHNIQUES
from ..techniques.levels import RaisedLevels
from ..techniques.technique import Running
from .training import BeforeTraining, Training

NONE_IS_LEFT = (
    "no leaner setting is left; model, optimizer and random numbers are as they were before the "
    "step. A smaller batch, headroom.fit or an optimizer with less state would help"
)


def retry_on_oom(
    step: Callable[..., Any] | None = None,
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scaler: GradScaler | None = None,
    accumulator: GradAccumulator | None = None,
    micro_batches: int = 1,
) -> Any:
    """Returns a training step that, when it runs out of memory, takes a leaner setting and repeats
    itself, with the same data and random numbers and nothing left of the failed attempt. The run
    that follows has the bits of one that had that setting from the start.

    Example::

        optimizer = headroom.optim.AdamW(model.parameters())

        @headroom.retry_on_oom(model=model, optimizer=optimizer)
        def step(batch):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step(torch.randn(4, 3))

    Args:
        step: a function that takes a batch and does a whole training step. Its data are its
            arguments, which it does not change. Or a bound method of an object that has ``model``,
            ``optimizer`` and ``reduce_memory()``, which sets the next leaner setting and returns
            whether there was one, such as ``step`` of what :func:`headroom.fit` returns; ``scaler``
            and ``accumulator`` are taken from it too. None: returns a decorator.
        model: the module that is trained. Its blocks save less after each failure, from L0 to L5,
            as :func:`headroom.patch` sets it, which leaves the bits of the gradients as they are.
            The first step at a level compares what is computed again: if a block computes something
            else then, all blocks stay as they were given.
        optimizer: the optimizer of the step, or several. Of one whose state is offloaded with a
            ``budget``, more goes to the host after failures that no level mends. Those that are not
            Headroom's write while they allocate: a step in which one of them fails is not repeated.
        scaler, accumulator: those of the step, if it has them.
        micro_batches: the most micro-batches that the step can be asked for. If it is more than 1,
            the step is called as ``step(batch, micro_batches=n)``, with 1, and with 2, 4 and so on
            after failures that nothing else mends; it does the splitting.

    Returns:
        A :class:`RetryingStep`, which takes the arguments of ``step``. It restores random numbers,
        attributes and buffers of modules, gradients, the scaler, the accumulator and states that
        the optimizer made. While a CUDA graph is captured the step runs as it is.

    Raises:
        TypeError, ValueError: an argument does not fit. The first call raises TypeError if the step
            uses an optimizer, a scaler or an accumulator that was not given, or an iterator.
        RuntimeError: by a call, if several ranks train.

    A call raises the error of the step with an explanation if no leaner setting is left, or if the
    step cannot be repeated, since something was changed for good.
    """
    options: dict[str, Any] = dict(
        model=model, optimizer=optimizer, scaler=scaler, accumulator=accumulator
    )
    if step is None:
        return functools.partial(retry_on_oom, micro_batches=micro_batches, **options)
    if not callable(step):
        raise TypeError(f"retry_on_oom: step is {step!r}, wanted a function")
    check_count("retry_on_oom: micro_batches", micro_batches, 1)
    owner: Any = getattr(step, "__self__", None)
    if model is None and all(
        hasattr(owner, name) for name in ("model", "optimizer", "reduce_memory")
    ):
        extra = [name for name, value in options.items() if value is not None]
        if extra or micro_batches > 1:
            raise TypeError(
                f"retry_on_oom: {[*extra, 'micro_batches'][0]} is given, but "
                f"{type(owner).__name__}, whose method the step is, has its own"
            )
        training = Training(**{name: getattr(owner, name, None) for name in options})
        return RetryingStep(step, training, owner=owner)
    if model is None or optimizer is None:
        raise TypeError(
            "retry_on_oom: a function needs model= and optimizer=, which are restored before it is "
            "repeated; a method needs an object that has model, optimizer and reduce_memory()"
        )
    return RetryingStep(step, Training(**options), most_parts=micro_batches)


class Retry(NamedTuple):
    """An attempt that was repeated: the number of the call, from 1, the first line of the error,
    and what was changed."""

    step: int
    error: str
    change: str


class RetryingStep:
    """A step that repeats itself when it runs out of memory, and what became of its calls.

    Attributes:
        history: a :class:`Retry` for each attempt that was repeated.
    """

    def __init__(
        self, step: Callable[..., Any], training: Training, owner: Any = None, most_parts: int = 1
    ) -> None:
        functools.update_wrapper(self, step)
        self._step, self._training, self._owner = step, training, owner
        self._levels = RaisedLevels(training.model)
        self._running = Running(training.optimizers, self._levels, most_parts=most_parts)
        self._calls = 0
        self.history: list[Retry] = []

    @property
    def retries(self) -> int:
        """Returns how many attempts were repeated."""
        return len(self.history)

    def report(self) -> str:
        """Returns what was changed in which step, as text."""
        found = f"{self.retries} of {self._calls + self.retries} attempts were repeated"
        each = (f"  step {one.step}: {one.change} ({one.error})" for one in self.history)
        return "\n".join([found, *each])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_capturing():  # an error ends the capture, so that nothing can be repeated in it
            return self._run(args, kwargs)
        if (ranks := world_size()) > 1:
            raise RuntimeError(
                f"headroom.retry_on_oom: {ranks} ranks train, of which one that repeats its step "
                "would leave the others waiting for its gradients; call the step itself, and leave "
                "a margin with headroom.fit or headroom.plan"
            )
        if self._calls == 0:
            self._training.refuse_unknown(self._step)
        self._calls += 1
        while True:
            verifying = verified_blocks() if self._levels.is_unverified else nullcontext()
            with BeforeTraining(self._training) as before, verifying:
                try:
                    before.keep_all()
                    result = self._run(args, kwargs)
                    self._levels.is_unverified = False
                    return result
                except Exception as raised:
                    # Blocks at new levels may compute something else when they run again, or have
                    # written to their inputs, from which they are run.
                    is_of_levels = self._levels.is_unverified and isinstance(raised, RuntimeError)
                    if not is_of_levels and not is_out_of_memory(raised):
                        raise
                    error = raised
            try:
                change = self._mended(before, error)
                line = str(error).partition("\n")[0] or type(error).__name__
                what = "ran out of memory" if is_out_of_memory(error) else "failed at these levels"
            finally:
                del before, error  # they hold copies, which must not be beside the next attempt
            self.history.append(Retry(self._calls, line, change))
            text = f"step {self._calls} {what} and is repeated: {change}. {line}"
            warnings.warn(text, stacklevel=2)

    def _run(self, args: Any, kwargs: Any) -> Any:
        if self._running.most_parts > 1:
            kwargs = kwargs | {"micro_batches": self._running.parts}
        return self._step(*args, **kwargs)

    def _mended(self, before: BeforeTraining, error: Exception) -> str:
        """Leaves nothing of an attempt, and sets another setting. Returns what was changed, or
        raises if the step cannot be repeated, or no setting is left."""
        forget_tensors(error)
        change = None
        try:
            before.free_pending()
            reason = before.refusal()
            if reason is None:
                before.restore()
            if not is_out_of_memory(error):  # levels go even if the step cannot be repeated
                change = self._levels.give_up()
            elif reason is None:
                change = self._reduce_memory()
        except Exception as broken:
            reason = (
                "the step could not be undone or made leaner, and model and optimizer may be half "
                f"changed: {type(broken).__name__}: {broken}"
            )
        if reason is not None or change is None:
            add_note(error, f"headroom.retry_on_oom: {reason or NONE_IS_LEFT}")
            raise error
        return change

    def _reduce_memory(self) -> str | None:
        """Sets a leaner setting. Returns what was changed, or None if none is left."""
        if self._owner is not None:
            before = getattr(self._owner, "choice", "its setting")
            if not self._owner.reduce_memory():
                return None
            return f"{before} became {getattr(self._owner, 'choice', 'a leaner one')}"
        changes = (technique.reduce_memory(self._running) for technique in TECHNIQUES)
        return next(filter(None, changes), None)
