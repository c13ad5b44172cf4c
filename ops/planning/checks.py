"""Refuses what cannot be planned, and completes what was not said."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .._core.checks import check_count
from ..patching.streaming import streamed_blocks
from ..step.checks import check_batch_and_loss
from ..step.description import Step
from ..step.optimizers import check_parameters
from ..step.pytree import tensors_in
from .sharding import sharding_of
from .sources import model_from

__all__ = ["check_step"]


def check_step(step: Step, world_size: Any = None, shard: Any = None) -> Step:
    """Returns the step with its model made, its device known and its ranks."""
    model, sharding = sharding_of(model_from(step.model), world_size, shard)
    for name in ("release", "accumulator"):
        if sharding is not None and getattr(step, name):
            raise ValueError(f"{name} is not planned on several ranks: leave it or the ranks out")
        if not step.set_to_none and getattr(step, name):
            raise ValueError(f"set_to_none=False keeps gradients, which {name} gives back")
    check_batch_and_loss(step)
    check_count("accumulation", step.accumulation, 1)
    if step.amp not in (None, torch.bfloat16, torch.float16):
        raise ValueError(f"amp is {step.amp!r}, wanted torch.bfloat16, torch.float16 or None")
    # Weights on the host are of the device that their block computes on.
    lent = {p: block.device for block in streamed_blocks(model) for p in block.params}
    found = {lent.get(x, x.device) for x in (*model.parameters(), *model.buffers())}
    real = {x for x in found if x.type != "meta"}
    if len(found) > 1 and (len(real) > 1 or len(found) > len(real)):
        names = ", ".join(sorted(map(str, found)))
        raise ValueError(
            f"the model is on several devices ({names}): plan each part by itself, or move all of "
            "it to one, such as the meta device"
        )
    _check_optimizer(step.optimizer, model)
    device = step.device
    if device is None:
        device = next(iter(real)) if real else torch.device("cuda")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {device.type!r}, wanted cpu or cuda")
    _check_capability(step.capability, device)
    for x in tensors_in(step.batch):
        if x.requires_grad and not x.is_leaf:
            raise ValueError("a tensor of sample_batch has a graph behind it; detach it")
    return step.but(model=model, device=device, sharding=sharding)


def _check_capability(capability: Any, device: torch.device) -> None:
    if capability is None:
        return
    if not (
        isinstance(capability, tuple)
        and len(capability) == 2
        and all(type(x) is int and x >= 0 for x in capability)
        and capability[0] > 0
    ):
        raise ValueError(
            f"capability is {capability!r}, wanted a pair such as (9, 0), as "
            "torch.cuda.get_device_capability() returns"
        )
    if device.type != "cuda":
        raise ValueError(
            f"capability is of a GPU, and device is {device.type!r}: leave one of both"
        )


def _check_optimizer(optimizer: Any, model: nn.Module) -> None:
    if optimizer is None:
        return
    inner = optimizer
    while not hasattr(inner, "param_groups") and hasattr(inner, "optimizer"):
        inner = inner.optimizer
    if not hasattr(inner, "param_groups"):
        if callable(optimizer):
            return
        raise TypeError(
            f"optimizer is {type(optimizer).__name__}, wanted a torch.optim.Optimizer, a function "
            "that makes one from parameters, or None"
        )
    check_parameters(inner, model)
    if getattr(inner, "_release_handle", None) is not None:
        raise ValueError(
            "the optimizer releases gradients by hooks on the real parameters: call remove() of "
            "its handle, and plan with release=True"
        )
