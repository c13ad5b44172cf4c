"""Weights that are sharded over ranks with different data, whole for the time of one loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial


class _Gathered(torch.autograd.Function):
    """Makes a sharded weight whole; the gradient is averaged over the ranks and sharded again."""

    @staticmethod
    def forward(ctx: Any, weight: DTensor, dtype: torch.dtype) -> Tensor:
        ctx.mesh, ctx.placements = weight.device_mesh, weight.placements
        ctx.dtype, ctx.global_shape = weight.dtype, (weight.shape, weight.stride())
        cast: Any = weight.detach().to(dtype)
        return cast.full_tensor()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[DTensor, None]:  # type: ignore[override]
        mesh = ctx.mesh
        shape, stride = ctx.global_shape
        each = DTensor.from_local(
            grad.to(ctx.dtype),
            mesh,
            [Partial()] * mesh.ndim,
            run_check=False,
            shape=shape,
            stride=stride,
        )
        return each.redistribute(placements=ctx.placements) / mesh.size(), None


def gathered(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the whole of a DTensor in ``dtype``, as a plain tensor; other tensors as they are.

    Every rank of its mesh must call, and run a backward pass. The gradient is what FSDP2 and DDP
    make of the gradients of the ranks: their average, sharded like the weight.
    """
    return _Gathered.apply(weight, dtype) if isinstance(weight, DTensor) else weight
