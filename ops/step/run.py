"""Runs the passes and the update of a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from fractions import Fraction
from functools import partial
from typing import Any

from torch import Tensor, nn

from .description import Step
from .micro_batches import shares

__all__ = ["Total", "passes", "train", "update"]


class Total:
    """Sums the losses of micro-batches, without their graphs.

    Attributes:
        loss: the sum, or None before the first.
    """

    loss: Tensor | None = None

    def add(self, loss: Tensor) -> None:
        """Adds a loss."""
        seen = loss.detach()
        self.loss = seen if self.loss is None else self.loss + seen


def train(step: Step, parts: Sequence[Any]) -> Tensor:
    """Makes a training step of the parts of a batch, after which there are no gradients, and
    returns the loss of the batch, detached."""
    model, optimizer, scaler, total = step.model, step.optimizer, step.scaler or None, Total()
    passes(
        partial(step.loss_of, model),
        [part for part in zip(parts, shares(parts, step.rule, step.batch)) if part[1]],
        backward=lambda loss: (loss if scaler is None else scaler.scale(loss)).backward(),
        seen=total.add,
    )
    update(model, optimizer, scaler, step.max_grad_norm)
    optimizer.zero_grad(set_to_none=step.set_to_none)
    assert total.loss is not None
    return total.loss


def passes(
    loss_of: Callable[[Any], Tensor],
    parts: Iterable[tuple[Any, Fraction | int]],
    *,
    backward: Callable[[Tensor], Any] = Tensor.backward,
    around: Callable[[int], AbstractContextManager[Any]] = lambda index: nullcontext(),
    begin: Callable[[str], Any] = lambda phase: None,
    seen: Callable[[Tensor], Any] = lambda loss: None,
) -> None:
    """Runs the forward and the backward pass of each micro-batch.

    Args:
        loss_of: the loss of a micro-batch.
        parts: micro-batches, and the share of the step's loss that each has.
        backward: makes the gradients of a loss.
        around: a context for both passes of a micro-batch, by its index, such as ``no_sync()``,
            which DistributedDataParallel asks for in the forward pass.
        begin: is told "forward" and "backward" as they begin.
        seen: is given the weighed loss of each micro-batch before its backward pass.
    """
    for index, (part, share) in enumerate(parts):
        with around(index):
            begin("forward")
            loss = weighed(loss_of(part), share)
            seen(loss)
            begin("backward")
            backward(loss)
            del loss  # with its graph, before the next is made


def weighed(loss: Tensor, share: Fraction | int) -> Tensor:
    """Returns a share of a loss. That of n equal parts has the bits of ``loss / n``."""
    if share.numerator != 1:
        loss = loss * share.numerator
    return loss if share.denominator == 1 else loss / share.denominator


def update(
    model: nn.Module, optimizer: Any, scaler: Any = None, max_grad_norm: float | None = None
) -> None:
    """Clips the gradients of a model to ``max_grad_norm`` and steps the optimizer, through the
    :class:`torch.amp.GradScaler` if there is one. The gradients stay."""
    if max_grad_norm is not None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
