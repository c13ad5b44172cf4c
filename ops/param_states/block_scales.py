"""The scales of the blocks of 8-bit moments: how many a parameter has, and on which rank."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from .._core.dtensor import from_shard, sharded_dim


def absmax_of(name: str) -> str:
    """Returns the name in a state of the scales of a moment."""
    return f"{name}_absmax"


ABSMAXS = tuple(map(absmax_of, ("exp_avg", "exp_avg_sq", "momentum_buffer")))


def zero_absmaxs(param: Tensor, block_size: int) -> Tensor:
    """Returns zeros for the scales of a parameter's blocks: ``[rows, blocks]`` if its rows are
    whole blocks, else ``[blocks]``.

    The scales of a DTensor are a DTensor. If it is sharded by such rows, so are they, and blocks
    are the same for any number of ranks. Otherwise they are ``[ranks, 1, ..., blocks]``, where
    every rank has as many blocks as the largest shard needs, and the number of ones is that of the
    sharded dimension: no other sharding has this shape, so no loader can mistake its blocks for
    these.
    """
    row = math.prod(param.shape[1:])
    by_rows = param.dim() > 1 and row % block_size == 0
    if not isinstance(param, DTensor):
        shape = (param.shape[0], row // block_size) if by_rows else -(-param.numel() // block_size)
        return torch.zeros(shape, dtype=torch.float32, device=param.device)
    mesh, placements = param.device_mesh, param.placements
    if by_rows and all(sharded_dim(p) in (None, 0) for p in placements):
        shape = torch.Size((param.shape[0], row // block_size))
        local = torch.Size((param.to_local().shape[0], shape[1]))
    else:
        largest, ranks, ones = list(param.shape), 1, 1
        for placement, size in zip(placements, mesh.shape):
            if (dim := sharded_dim(placement)) is not None:
                largest[dim] = -(-largest[dim] // size)
                ranks *= size
                ones += dim
        blocks = -(-math.prod(largest) // block_size)
        local = torch.Size((1, *ones * (1,), blocks) if ranks > 1 else (blocks,))
        shape = torch.Size((ranks, *local[1:])) if ranks > 1 else local
        placements = [Replicate() if sharded_dim(p) is None else Shard(0) for p in placements]
    scales = torch.zeros(local, dtype=torch.float32, device=param.to_local().device)
    stride = torch.empty(shape, device="meta").stride()
    return from_shard(scales, mesh, placements, shape=shape, stride=stride)


def unpadded(absmaxs: list[Tensor], params: list[Tensor], block_size: int) -> list[Tensor]:
    """Returns the scales of the blocks that the local parts of parameters have: the largest shard
    may have more."""
    blocks = [-(-param.numel() // block_size) for param in params]
    return [a if a.numel() <= n else a.flatten()[:n] for a, n in zip(absmaxs, blocks)]
