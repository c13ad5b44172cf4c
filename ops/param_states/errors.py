"""Explains the error of an op, with the name of the parameter that it is about."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from .._core.names import name_of
from .states import dtype_refusal


def explained(
    optimizer: torch.optim.Optimizer,
    error: Exception,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
) -> Exception:
    """Returns the error that an op on these parameters raised, or a clearer one."""
    if "; index " in str(error):  # a step on the host has done so
        return error
    ours, groups = type(optimizer).__name__, optimizer.param_groups
    for param, grad in zip(params, grads):
        if grad.layout != torch.strided or param.layout != torch.strided:
            return RuntimeError(
                f"{ours} does not support sparse gradients, but {name_of(groups, param)} has "
                "one; use sparse=False in its module, or torch.optim.SparseAdam for it"
            )
        if dtype_refusal(param, ours, "") is not None:
            return RuntimeError(dtype_refusal(param, ours, name_of(groups, param)))
        if param.device.type not in ("cpu", "cuda"):
            return RuntimeError(
                f"{ours} runs on the CPU and on CUDA devices, but {name_of(groups, param)} is on "
                f"{param.device}"
            )
    place = re.search(r"\[(\d+)\]", str(error))
    if type(error) is not RuntimeError or place is None or int(place[1]) >= len(params):
        return error
    name = name_of(groups, params[int(place[1])])
    return RuntimeError(f"{error}; index {place[1]} is {name}")
