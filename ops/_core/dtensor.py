"""Says how DTensors are sharded, and which elements of the whole tensor a rank has."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def sharded_dim(placement: Placement) -> int | None:
    """Returns the dimension that a placement shards, or None. A strided shard, which is not a Shard
    in every version of torch, has a dimension too."""
    return getattr(placement, "dim", None)


def moved_shard(placement: Placement, dim: int) -> Placement:
    """Returns the same kind of shard, of another dimension."""
    factor = getattr(placement, "split_factor", None)
    return type(placement)(dim) if factor is None else type(placement)(dim, split_factor=factor)


def shard_number(param: Tensor) -> int:
    """Returns the number of the shard on this rank, counted over the mesh in the order of its
    dimensions, and 0 for a tensor that is not a DTensor."""
    number = 0
    if isinstance(param, DTensor):
        for dim, placement in enumerate(param.placements):
            if sharded_dim(placement) is not None:
                size, rank = param.device_mesh.size(dim), param.device_mesh.get_local_rank(dim)
                number = number * size + rank
    return number


def _local_shape_and_offsets(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )


def first_row(tensor: Tensor) -> int:
    """Returns the number of the first local row in the whole tensor."""
    return _local_shape_and_offsets(tensor)[1][0] if isinstance(tensor, DTensor) else 0


def shard_groups(grad: Tensor) -> tuple[Any, ...]:
    """Returns the process groups whose ranks hold different shards of a gradient."""
    if not isinstance(grad, DTensor):
        return ()
    mesh = grad.device_mesh
    return tuple(mesh.get_group(i) for i, p in enumerate(grad.placements) if not p.is_replicate())


def local_part(grad: Tensor) -> Tensor:
    """Returns the shard of a DTensor on this rank, and any other tensor unchanged."""
    return grad.to_local() if isinstance(grad, DTensor) else grad


def spec_of(x: Tensor) -> Any:
    """Returns how a DTensor is sharded; None for any other tensor."""
    return x._spec if isinstance(x, DTensor) else None


def with_spec(local: Tensor, spec: Any) -> Tensor:
    """Returns the DTensor of a shard on this rank; without a ``spec``, the tensor itself. Shards
    may lie on the host where the mesh is of another device, as those of FSDP2's CPUOffloadPolicy
    do."""
    return local if spec is None else DTensor(local, spec, requires_grad=False)


def from_shard(local: Tensor, mesh: Any, placements: Any, **form: Any) -> Tensor:
    """Returns the DTensor of a shard on this rank, which stays where it lies: ``from_local`` moves
    it to the device of the mesh.

    Args:
        form: shape and stride of the whole tensor, if shards differ.
    """
    on_meta = torch.empty_like(local, device="meta")
    spec = spec_of(DTensor.from_local(on_meta, mesh, placements, run_check=False, **form))
    return with_spec(local, spec)


def on_meta(x: Tensor) -> Tensor:
    """Returns a tensor of the same form, sharded in the same way, without memory."""
    local = local_part(x)
    form = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="meta")
    return with_spec(form, spec_of(x))


def place_of(param: Tensor) -> tuple[int, int, int]:
    """Returns where the local elements of a parameter lie in the whole one: the fields of
    ``hr_place`` in ``headroom.h``."""
    if not isinstance(param, DTensor):
        return 0, max(param.numel(), 1), 0
    local, offsets = _local_shape_and_offsets(param)
    cut = [dim for dim, size in enumerate(param.shape) if local[dim] != size]
    if not cut or 0 in local:
        return 0, max(math.prod(local), 1), 0
    last = cut[-1]
    if any(math.prod(param.shape[:dim]) > 1 for dim in cut[:-1]):
        raise NotImplementedError(
            "stochastic rounding takes DTensors that are sharded along one dimension, or along the "
            f"first and another; got {param.placements}"
        )
    inner = math.prod(param.shape[last + 1 :])
    row = 0  # how many rows of the dimensions before the last cut one lie before the shard
    for dim in range(last):
        row = row * param.shape[dim] + offsets[dim]
    stride = param.shape[last] * inner
    return row * stride + offsets[last] * inner, local[last] * inner, stride


@contextlib.contextmanager
def gathered(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor] | None]:
    """Gathers DTensors, all ranks together, for the first rank of their mesh: it gets the tensors
    by name, whole, and other ranks None. They leave when the first one has left. Without a DTensor
    each rank is the first.
    """
    meshes = {x.device_mesh for x in tensors.values() if isinstance(x, DTensor)}
    whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in tensors.items()}
    is_first = not any(any(mesh.get_coordinate() or ()) for mesh in meshes)
    try:
        yield whole if is_first else None
    finally:
        for mesh in meshes:
            for dim in range(mesh.ndim):
                dist.barrier(group=mesh.get_group(dim))
