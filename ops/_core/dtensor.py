"""Answers where the shards of DTensors lie."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["local_part", "shard_groups"]


def shard_groups(grad: Tensor) -> tuple[Any, ...]:
    """The process groups whose ranks hold different shards of a gradient."""
    if not isinstance(grad, DTensor):
        return ()
    mesh = grad.device_mesh
    return tuple(mesh.get_group(i) for i, p in enumerate(grad.placements) if not p.is_replicate())


def local_part(grad: Tensor) -> Tensor:
    """Returns the shard of a DTensor on this rank, and any other tensor unchanged."""
    return grad.to_local() if isinstance(grad, DTensor) else grad
