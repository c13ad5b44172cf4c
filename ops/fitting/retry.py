"""Repeats a training step that ran out of memory, with a setting that needs less."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ..grad.accumulate import GradAccumulator
from .before import Before, Training
from .leaner import MicroBatches, Owner, SaveLevels
from .out_of_memory import forget_tensors, is_out_of_memory

__all__ = ["Retry", "RetryingStep", "retry_on_oom"]

HAS = ("model", "optimizer", "leaner")  # what the object of a bound method has


class Ladder(Protocol):
    """Settings of which each needs less memory than the one before it."""

    def leaner(self) -> str | None:
        """Sets the next setting. Returns what was changed, or None if none is left."""
        ...


@dataclasses.dataclass(frozen=True)
class Retry:
    """A step that ran out of memory.

    Attributes:
        step: the number of the call, from 1.
        error: the first line of the error.
        change: what was changed before the step was repeated.
    """

    step: int
    error: str
    change: str


def retry_on_oom(
    step: Callable[..., Any] | None = None,
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scaler: GradScaler | None = None,
    accumulator: GradAccumulator | None = None,
    micro_batches: int = 1,
    undo: bool = True,
) -> Any:
    """Returns a training step that, when it runs out of memory, takes a leaner setting and repeats
    itself, with the same data and random numbers and nothing left of the failed attempt. The run
    that follows has the bits of one that had that setting from the start.

    Example::

        config = headroom.nn.TransformerConfig(
            vocab_size=64, hidden_size=32, layers=2, heads=2, features=88
        )
        model = headroom.nn.Transformer(config)
        optimizer = headroom.optim.AdamW(model.parameters())

        @headroom.retry_on_oom(model=model, optimizer=optimizer)
        def step(tokens):
            loss = model(tokens).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step(torch.randint(64, (2, 16)))

    Args:
        step: a function that takes a batch and does a whole training step: forward, backward, the
            optimizer's step, and ``zero_grad()`` at its beginning or end. Its data are its
            arguments, which it does not change. Or a bound method of an object that has ``model``,
            ``optimizer`` and ``leaner()``, which sets the next leaner setting and returns whether
            there was one, such as ``step`` of what :func:`headroom.fit` returns; ``scaler`` and
            ``accumulator`` are taken from it too, and no other argument is given then. None:
            returns a decorator.
        model: the module that is trained. Its blocks save less after each failure, from L0 to L5,
            as :func:`headroom.patch` sets it, which leaves the bits of the gradients as they are.
        optimizer: the optimizer of the step, or several.
        scaler, accumulator: those of the step, if it has them.
        micro_batches: the most micro-batches that the step can be asked for. If it is more than 1,
            the step is called as ``step(batch, micro_batches=n)``, with 1, and with 2, 4 and so on
            after failures that no level mends; it does the splitting, and other numbers of
            micro-batches round in another way.
        undo: whether optimizers that are not Headroom's are copied when their step begins, with
            parameters and states, until it ends, to undo a step that fails half way. Copies that do
            not fit on the device go to the memory of the host. Headroom's optimizers allocate
            everything before they write and need no copies.

    Returns:
        A :class:`RetryingStep`, which takes the arguments of ``step``.

    Errors of memory are :class:`torch.OutOfMemoryError`, MemoryError, and the RuntimeError of
    torch's CPU allocator. Everything else passes. A warning says what was changed.

    What is restored: the generators of torch, CUDA, Python and NumPy; buffers (those above 16 MiB
    are watched, not copied); gradients, copied only when a backward is about to add to one that was
    there before the step; the scaler; the accumulator; states that the optimizer made.

    Raises:
        TypeError, ValueError: an argument does not fit.

    A call raises the error of the step, of its class and with an explanation, if no leaner setting
    is left (all is then as before the step), or if the step cannot be repeated: the optimizer has
    stepped already and the rest failed, or gradient release has stepped a parameter. It raises
    RuntimeError if several ranks train: a rank that repeats alone leaves the others waiting.
    """
    if step is None:
        return functools.partial(
            retry_on_oom,
            model=model,
            optimizer=optimizer,
            scaler=scaler,
            accumulator=accumulator,
            micro_batches=micro_batches,
            undo=undo,
        )
    if not callable(step):
        raise TypeError(f"retry_on_oom: step is {step!r}, wanted a function")
    owner: Any = getattr(step, "__self__", None)
    if model is None and all(hasattr(owner, name) for name in HAS):
        given = dict(optimizer=optimizer, scaler=scaler, accumulator=accumulator)
        if extra := [name for name, value in given.items() if value is not None]:
            raise TypeError(
                f"retry_on_oom: {extra[0]} is given, but {type(owner).__name__}, whose method the "
                "step is, has its own"
            )
        training = _training(
            owner.model,
            owner.optimizer,
            getattr(owner, "scaler", None),
            getattr(owner, "accumulator", None),
            undo,
        )
        return RetryingStep(step, training, [Owner(owner)])
    if model is None or optimizer is None:
        raise TypeError(
            "retry_on_oom: a function needs model= and optimizer=, which are restored before it is "
            "repeated; a method needs an object that has model, optimizer and leaner()"
        )
    training = _training(model, optimizer, scaler, accumulator, undo)
    parts = _checked_micro_batches(step, micro_batches)
    return RetryingStep(step, training, [SaveLevels(model), *parts])


def _training(model: Any, optimizer: Any, scaler: Any, accumulator: Any, undo: bool) -> Training:
    if not isinstance(model, nn.Module):
        raise TypeError(f"retry_on_oom: model is {model!r}, wanted an nn.Module")
    given = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    optimizers = []
    for one in given:
        while not isinstance(one, Optimizer) and hasattr(one, "optimizer"):
            one = one.optimizer  # in a wrapper such as accelerate's, which is an Optimizer too
        while isinstance(inner := getattr(one, "optimizer", None), Optimizer):
            one = inner
        if not isinstance(one, Optimizer):
            raise TypeError(f"retry_on_oom: optimizer is {one!r}, wanted a torch.optim.Optimizer")
        optimizers.append(one)
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"retry_on_oom: scaler is {scaler!r}, wanted a torch.amp.GradScaler")
    if accumulator is not None and not isinstance(accumulator, GradAccumulator):
        raise TypeError(
            f"retry_on_oom: accumulator is {accumulator!r}, wanted a headroom.GradAccumulator"
        )
    return Training(model, tuple(optimizers), scaler, accumulator, undo)


def _checked_micro_batches(step: Callable[..., Any], most: int) -> list[MicroBatches]:
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise ValueError(f"retry_on_oom: micro_batches is {most!r}, wanted a whole number >= 1")
    if most == 1:
        return []
    parameters = inspect.signature(step).parameters.values()
    if not any(p.name == "micro_batches" or p.kind is p.VAR_KEYWORD for p in parameters):
        raise TypeError(
            "retry_on_oom: micro_batches needs a step that takes a keyword argument of this name, "
            "step(batch, micro_batches=n), and splits its batch"
        )
    return [MicroBatches(most)]


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
        lines = [f"{self.retries} of {self._calls + self.retries} attempts ran out of memory"]
        lines += [f"  step {one.step}: {one.change} ({one.error})" for one in self.history]
        return "\n".join(lines)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _check_alone()
        self._calls += 1
        while True:
            result, error = self._attempt(args, kwargs)
            if error is None:
                return result
            change = next((text for one in self._ladders if (text := one.leaner())), None)
            if change is None:
                raise _explained(
                    error,
                    "no leaner setting is left; model, optimizer and random numbers are as they "
                    "were before the step. A smaller batch, headroom.fit or an optimizer with less "
                    "state would help",
                ) from error
            line = str(error).partition("\n")[0] or type(error).__name__
            self.history.append(Retry(self._calls, line, change))
            warnings.warn(
                f"step {self._calls} ran out of memory and is repeated: {change}. {line}",
                stacklevel=2,
            )

    def _attempt(self, args: Any, kwargs: Any) -> tuple[Any, Exception | None]:
        """Returns what the step returned, or the error of a step that has been undone."""
        for ladder in self._ladders:
            if isinstance(ladder, MicroBatches):
                kwargs = kwargs | {"micro_batches": ladder.count}
        with Before(self._training) as before:
            try:
                before.keep()
                return self._step(*args, **kwargs), None
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failure = error
            # Outside the handler, so that Python holds the error and its frames no longer.
            forget_tensors(failure)
            if (what := before.lost()) is not None:
                raise _explained(
                    failure,
                    f"the step cannot be repeated, since it has changed {what}; what the step does "
                    "after that has not been done",
                ) from failure
            before.restore()
            return None, failure


def _explained(error: Exception, text: str) -> Exception:
    """Returns an error of the same class with an explanation."""
    return type(error)(f"{error}\nheadroom.retry_on_oom: {text}")


def _check_alone() -> None:
    ranks = torch.distributed
    if ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1:
        raise RuntimeError(
            f"headroom.retry_on_oom: {ranks.get_world_size()} ranks train. One that ran out of "
            "memory in its backward pass would repeat the step while the others wait for its "
            "gradients, so a step can be repeated on a single rank only; call the step itself, and "
            "leave a margin with headroom.fit or headroom.plan"
        )
