"""Reads and sets the float32 weights behind the 16-bit parameters of an optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, overload

import torch
from torch import Tensor, nn

from .._core.dtensor import local_part
from .._core.names import name_of
from .._core.weight_modes import WeightsMode
from .base import Optimizer


def headroom_optimizer(optimizer: Any, caller: str) -> Optimizer:
    """Returns the optimizer itself, or the one inside a wrapper such as accelerate's.

    Raises:
        TypeError: it is not one of :mod:`headroom.optim`.
    """
    inner = optimizer
    while not isinstance(inner, Optimizer) and hasattr(inner, "optimizer"):
        inner = inner.optimizer
    if isinstance(inner, Optimizer):
        return inner
    kind = type(inner)
    raise TypeError(
        f"{caller}() wants an optimizer of headroom.optim, got "
        f"{kind.__module__}.{kind.__qualname__}"
    )


@overload
def master_weights(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]: ...


@overload
def master_weights(optimizer: Optimizer, model: None = None) -> dict[Tensor, Tensor]: ...


def master_weights(optimizer: Optimizer, model: nn.Module | None = None) -> dict[Any, Tensor]:
    """Returns the weights of an optimizer's parameters as float32, from which its next step starts.

    Use it to evaluate or save a model without the rounding of its 16-bit weights. For a parameter
    that was written since the last step, it returns what was written: see
    :class:`headroom.optim.Adam`.

    Args:
        optimizer: one of :mod:`headroom.optim`, or accelerate's wrapper of it.
        model: the module whose parameters they are.

    Returns:
        With ``model``, a state dict of it: its parameters as float32 tensors, detached copies, and
        its buffers as they are. Without, a dict from each parameter of the optimizer to its
        float32 tensor. DTensors stay DTensors.

    Raises:
        TypeError: the optimizer is not one of :mod:`headroom.optim`.
    """
    optimizer = headroom_optimizer(optimizer, "master_weights")
    joined: dict[Any, Tensor] = {}
    with torch.no_grad():
        for param, mode, residual in _weights(optimizer):
            value = param.detach().to(torch.float32, copy=True)
            if mode.residual and residual is not None:
                residual = local_part(residual).to(value.device)  # from where it may be paged to
                lists = [local_part(value)], [local_part(param)], [residual]
                torch.ops.headroom.join_weights_(*lists, mode.number)
            joined[param] = value
    if model is None:
        return joined
    return {
        name: joined.get(
            tensor,
            tensor.detach().float()
            if tensor.is_floating_point() and isinstance(tensor, nn.Parameter)
            else tensor.detach(),
        )
        for name, tensor in model.state_dict(keep_vars=True).items()
    }


def load_master_weights(
    optimizer: Optimizer, weights: Mapping[Any, Tensor], model: nn.Module | None = None
) -> None:
    """Sets parameters, and what the optimizer keeps beside them, from float32 weights: the inverse
    of :func:`master_weights`. It keeps all bits that the optimizer's mode can hold, and none of the
    old weights, which may remain in part after a write to the parameters alone.

    Args:
        optimizer: one of :mod:`headroom.optim`, or accelerate's wrapper of it.
        weights: what :func:`master_weights` returned for these parameters or this model. With
            ``model``, entries for buffers are copied too.
        model: the module whose names ``weights`` has.

    Raises:
        TypeError: the optimizer is not one of :mod:`headroom.optim`.
        KeyError: a parameter of the optimizer is missing from ``weights``.
        ValueError: a shape does not fit. Nothing has been changed then.
    """
    optimizer = headroom_optimizer(optimizer, "load_master_weights")
    if model is not None:
        tensors = model.state_dict(keep_vars=True)
        missing = [name for name in tensors if name not in weights]
        if missing:
            raise KeyError(f"the weights have no {', '.join(map(repr, missing))}")
        by_tensor: dict[Any, Tensor] = {tensors[name]: weights[name] for name in tensors}
    else:
        by_tensor = dict(weights)
    entries = list(_weights(optimizer, create=True))
    for param, *_ in entries:
        if param not in by_tensor:
            raise KeyError(f"the weights have no {name_of(optimizer.param_groups, param)}")
    for tensor, value in by_tensor.items():
        if tensor.shape != value.shape:
            raise ValueError(
                f"a weight has shape {tuple(value.shape)}, but its tensor {tuple(tensor.shape)}"
            )
    with torch.no_grad():
        for param, mode, residual in entries:
            value = by_tensor.pop(param).to(param.device, torch.float32)
            if mode.residual is None:
                param.copy_(value)
                continue
            here = local_part(residual).to(param.device)
            lists = [local_part(param)], [here], [local_part(value)]
            torch.ops.headroom.split_weights_(*lists, mode.number)
            if here.device != residual.device:
                residual.copy_(here)
        for tensor, value in by_tensor.items():
            tensor.copy_(value)


def _weights(
    optimizer: Optimizer, create: bool = False
) -> Iterable[tuple[Tensor, WeightsMode, Tensor | None]]:
    if optimizer._paging is not None:
        optimizer._paging.wait()
    for group in optimizer.param_groups:
        for param in group["params"]:
            mode = optimizer._weights_mode(param, group)
            if mode.residual and create:
                optimizer._entry(param, group)
            yield param, mode, optimizer.state.get(param, {}).get(mode.residual)
