"""The loss of a batch, by the rules that planning and fitting share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .errors import PlanError

__all__ = ["autocast", "loss_of", "output_of"]


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
        batch: a dict or another mapping gives named arguments, a tuple or list arguments in order.
            With ``loss``, the last of a tuple is the target.
        loss, forward: as in :func:`headroom.plan`.
        trains: whether a gradient is needed.

    Raises:
        PlanError: the result is no tensor of one element, or requires no gradient that is needed.
    """
    result = forward(model, batch) if forward is not None else _result(model, batch, loss)
    if not isinstance(result, Tensor) or result.numel() != 1:
        raise PlanError(_no_loss(result, loss is not None or forward is not None))
    if trains and not result.requires_grad:
        if not torch.is_grad_enabled():
            raise PlanError(
                "gradients are turned off here: call this outside of torch.no_grad() and "
                "torch.inference_mode()"
            )
        if not any(param.requires_grad for param in model.parameters()):
            raise PlanError("the loss requires no gradient: no parameter of the model does")
        raise PlanError(
            "the loss requires no gradient, though parameters of the model do: something between "
            "them and the loss cuts the graph, such as detach(), item() or torch.no_grad()"
        )
    return result


def output_of(model: nn.Module, batch: Any) -> Any:
    """Returns what a model makes of a batch: a mapping gives named arguments, a tuple or list
    arguments in order."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _result(model: nn.Module, batch: Any, loss: Callable[..., Tensor] | None) -> Any:
    if loss is not None:
        if isinstance(batch, (tuple, list)):
            *inputs, target = batch
            return loss(model(*inputs), target)
        return loss(output_of(model, batch), *([batch] if isinstance(batch, Mapping) else []))
    if isinstance(batch, (tuple, list)):
        _check_arguments(model, batch)
    output = output_of(model, batch)
    found = getattr(output, "loss", None)
    if found is None and isinstance(output, dict):
        found = output.get("loss")
    if found is None and isinstance(output, (tuple, list)):
        found = output[0]
    return output if found is None else found


def _no_loss(result: Any, has_loss: bool) -> str:
    """Returns why a result is no loss."""
    is_tensor = isinstance(result, Tensor)
    got = f"has shape {list(result.shape)}" if is_tensor else f"is a {type(result).__name__}"
    if has_loss:
        return f"the loss {got}, wanted a tensor of one element, such as a mean over the batch"
    return (
        f"the output of the model {got}, and is no loss: give loss=, a function of the output and "
        "the target, or a batch with which the model returns a loss"
    )


def _check_arguments(model: nn.Module, batch: Any) -> None:
    """Refuses a tuple that has more items than the model has arguments: mostly of inputs and
    targets, whose loss was not given.

    Raises:
        TypeError: says so.
    """
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # the model will say what it wants
        return
    try:
        signature.bind(*batch)
    except TypeError as error:
        raise TypeError(
            f"the batch has {len(batch)} items, which are not the arguments of "
            f"{type(model).__name__}.forward{signature}: {error}. If the last item is the target, "
            "give loss=; forward= calls the model in any other way"
        ) from None


@contextmanager
def autocast(device: str, amp: torch.dtype | None) -> Iterator[None]:
    """Runs what is inside under :class:`torch.autocast`, or as it is if ``amp`` is None."""
    if amp is None:
        yield
        return
    with torch.autocast(device, dtype=amp):
        yield
