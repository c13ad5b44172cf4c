"""The loss of a batch, by the rules that planning and fitting share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .errors import PlanError

__all__ = ["autocast", "loss_of"]


def loss_of(
    model: nn.Module,
    batch: Any,
    loss: Callable[..., Tensor] | None = None,
    forward: Callable[[nn.Module, Any], Tensor] | None = None,
    *,
    trains: bool = True,
) -> Tensor:
    """Returns the loss of a batch.

    Args:
        batch: a dict gives named arguments, a tuple or list arguments in order. With ``loss``, the
            last of a tuple is the target.
        loss, forward: as in :func:`headroom.plan`.
        trains: whether a gradient is needed.

    Raises:
        PlanError: the result is no tensor of one element, or requires no gradient that is needed.
    """
    result = forward(model, batch) if forward is not None else _result(model, batch, loss)
    if not isinstance(result, Tensor) or result.numel() != 1:
        got = f"shape {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise PlanError(f"the loss has {got}, wanted a tensor of one element; give loss=")
    if trains and not result.requires_grad:
        raise PlanError("the loss requires no gradient: no parameter of the model does")
    return result


def _result(model: nn.Module, batch: Any, loss: Callable[..., Tensor] | None) -> Any:
    target = None
    if isinstance(batch, dict):
        output, target = model(**batch), batch
    elif isinstance(batch, (tuple, list)):
        if loss is None:
            output = model(*batch)
        else:
            *inputs, target = batch
            return loss(model(*inputs), target)
    else:
        output = model(batch)
        if loss is not None:
            return loss(output)
    if loss is not None:
        return loss(output, target)
    found = getattr(output, "loss", None)
    if found is None and isinstance(output, dict):
        found = output.get("loss")
    if found is None and isinstance(output, (tuple, list)):
        found = output[0]
    return output if found is None else found


@contextmanager
def autocast(device: str, amp: torch.dtype | None) -> Iterator[None]:
    """Runs what is inside under :class:`torch.autocast`, or as it is if ``amp`` is None."""
    if amp is None:
        yield
        return
    with torch.autocast(device, dtype=amp):
        yield
