"""Compares checksums of parameters and states that should be the same on several ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._core.dtensor import local_part
from .._core.names import named_params
from ..host.checksums import checksums


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Returns an int64 checksum of the bits of a tensor, in the order of their indices, on its
    device: a checksum of the checksums of its blocks. One flipped bit always changes it; other
    changes escape it by coincidences of one in 2^30 or less."""
    data = tensor.detach().contiguous()
    if data.storage_offset() * data.element_size() % 8:
        data = data.clone()  # words begin where they do on other ranks
    sums = checksums(data)
    while len(sums) > 1:
        sums = checksums(sums)
    return sums.sum() + tensor.numel()


def check_same_state(
    optimizer: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
) -> None:
    """Checks that ranks hold the same parameters and optimizer states, bit for bit, as they must
    under DDP. Every rank must call.

    Each rank sums the bits of every tensor, on its device, waits for the device once, and sends 8
    bytes for each tensor. It takes about as long as reading parameters and states a few times: call
    it now and then, or when a loss looks wrong.

    For a DTensor, it compares the ranks that hold the same shard: those along a replicated
    dimension of the mesh. If each rank has another shard, as with FSDP2 on one dimension, it
    compares nothing.

    Args:
        optimizer: any optimizer, of torch too.
        group: the process group of the ranks that should agree. None: all ranks.

    Raises:
        RuntimeError: a parameter or a state differs. It is raised on every rank, and names the
            first difference and its ranks.
    """
    sums: dict[tuple[str, str, Any], Any] = {}
    for param, name in named_params(optimizer.param_groups):
        sums[name, "", _shard(param)] = checksum(local_part(param))
        for key, value in sorted(optimizer.state.get(param, {}).items()):
            is_tensor = isinstance(value, Tensor)
            place = name, f"'{key}' of ", _shard(value)
            sums[place] = checksum(local_part(value)) if is_tensor else repr(value)
    for device in {value.device for value in sums.values() if isinstance(value, Tensor)}:
        mine = {
            place: value
            for place, value in sums.items()
            if isinstance(value, Tensor) and value.device == device
        }
        sums |= zip(mine, torch.stack(list(mine.values())).tolist())
    every: list[dict[tuple[str, str, Any], Any]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(every, sums, group=group)
    for place in dict.fromkeys(place for each in every for place in each):
        name, what, shard = place
        found: dict[Any, list[int]] = {}
        for rank, each in enumerate(every):
            if shard is None or place in each:
                found.setdefault(each.get(place), []).append(rank)
        if len(found) > 1:
            sides = " and ".join(f"on ranks {ranks}" for ranks in found.values())
            missing = f"; ranks {found[None]} have none" if None in found else ""
            raise RuntimeError(f"{what}{name} is not the same {sides}{missing}")


def _shard(value: Any) -> Any:
    """Returns which part of a tensor is on this rank, or None if it is the whole tensor."""
    if not isinstance(value, DTensor) or all(p.is_replicate() for p in value.placements):
        return None
    mesh = value.device_mesh
    parts = zip(value.placements, mesh.get_coordinate())
    return tuple((str(p), n) for p, n in parts if not p.is_replicate())
