"""``headroom.retry_on_oom``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ..grad.accumulate import GradAccumulator
from .leaner import MicroBatches, Owner, SaveLevels
from .repeating import RetryingStep
from .training import training_of

__all__ = ["retry_on_oom"]

HAS = ("model", "optimizer", "leaner")  # what the object of a bound method has


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
            The first step at a level compares what is computed again: if a block computes something
            else then, all blocks stay as they were given.
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
    torch's CPU allocator, of C++, of CUDA or of one of its libraries. Everything else passes. A
    warning says what was changed. While a CUDA graph is captured the step runs as it is.

    What is restored: the generators of torch, CUDA, Python and NumPy; attributes and buffers of the
    model's modules (buffers above 16 MiB are watched, not copied); gradients, copied only when a
    backward is about to add to one that was there before the step; the scaler; the accumulator;
    states that the optimizer made.

    Raises:
        TypeError, ValueError: an argument does not fit.

    A call raises the error of the step with an explanation if no leaner setting is left (all is
    then as before the step, but for gradients that it began with dropping), or if the step cannot
    be repeated, since something was changed for good: the optimizer has stepped already and the
    rest failed, gradient release has stepped a parameter, or the step itself has written to one.
    The first call raises TypeError if the step uses an optimizer, a scaler or an accumulator that
    was not given, or an iterator. A call raises RuntimeError if several ranks train: a rank that
    repeats alone leaves the others waiting.
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
        given: dict[str, Any] = dict(
            optimizer=optimizer,
            scaler=scaler,
            accumulator=accumulator,
            micro_batches=None if micro_batches == 1 else micro_batches,
        )
        if extra := [name for name, value in given.items() if value is not None]:
            raise TypeError(
                f"retry_on_oom: {extra[0]} is given, but {type(owner).__name__}, whose method the "
                "step is, has its own"
            )
        training = training_of(
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
    training = training_of(model, optimizer, scaler, accumulator, undo)
    parts = _checked_micro_batches(step, micro_batches)
    return RetryingStep(step, training, [SaveLevels(model), *parts])


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
