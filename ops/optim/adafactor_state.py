"""Declares the state of Adafactor: variances of rows, columns and elements, sharded or not."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from .._core.dtensor import from_shard, moved_shard, sharded_dim
from ..param_states.states import Slot

# The names of the states of each rule: row, column and element variances.
NAMES = {
    "torch": ("row_var", "col_var", "variance"),
    "hf": ("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq"),
}


def zero_scalar(param: Tensor) -> Tensor:
    """Returns a zero that is the same on every rank."""
    zero = torch.zeros((), dtype=torch.float32, device=param.device)
    if not isinstance(param, DTensor):
        return zero
    mesh = param.device_mesh
    return from_shard(zero, mesh, [Replicate()] * mesh.ndim)


def _zero_lines(name: str, param: Tensor) -> Tensor:
    """Returns zeros for the variances of rows or columns, sharded as the parameter is in the
    dimensions that they keep."""
    shape = shape_of(name, param)
    if not isinstance(param, DTensor):
        return torch.zeros(shape, dtype=torch.float32, device=param.device)
    summed = param.dim() - (1 if "row" in name else 2)  # the dimension that was summed over
    is_kept = len(shape) == param.dim()  # whether it is kept, with size 1
    local, placements = list(param.to_local().shape), []
    local[summed : summed + 1] = [1] if is_kept else []
    for placement in param.placements:
        dim = sharded_dim(placement)
        if dim == summed:
            placement = Replicate()
        elif dim is not None and dim > summed and not is_kept:
            placement = moved_shard(placement, dim - 1)
        placements.append(placement)
    zeros = torch.zeros(local, dtype=torch.float32, device=param.to_local().device)
    stride = torch.empty(shape, device="meta").stride()
    return from_shard(zeros, param.device_mesh, placements, shape=shape, stride=stride)


def shape_of(name: str, param: Tensor) -> torch.Size:
    """Returns the shape of a statistic of a parameter."""
    shape = param.shape
    shapes = {
        "row_var": (*shape[:-1], 1),
        "col_var": (*shape[:-2], 1, *shape[-1:]),
        "exp_avg_sq_row": shape[:-1],
        "exp_avg_sq_col": (*shape[:-2], *shape[-1:]),
    }
    return torch.Size(shapes.get(name, shape))


def _no_dimensions(param: Tensor) -> tuple[int, ...]:
    return ()


def float32_slot(name: str) -> Slot:
    """Declares a float32 tensor of the parameter's shape."""
    return Slot(name, dtype=torch.float32)


LINES = {
    name: Slot(name, partial(shape_of, name), torch.float32, first=partial(_zero_lines, name))
    for names in NAMES.values()
    for name in names[:2]
}
RMS = Slot("RMS", _no_dimensions, torch.float32, first=zero_scalar)
