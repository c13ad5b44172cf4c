"""Device meshes of all ranks, and whole copies of tensors that are sharded over them."""

import torch.distributed as dist
from headroom.nn import Linear4bit
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

# Adafactor's sums over ranks are added in another order than in one process.
RESUMMED = {"rtol": 2**-17, "atol": 2**-22}


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def can_shard():
    """Returns whether FSDP2 takes parameters of integers, as that of torch 2.11 does not."""
    try:
        fully_shard(Linear4bit(24, 4), mesh=mesh())
    except RuntimeError:
        return False
    return True


def whole(tensors):
    """Full copies of DTensors; collective."""
    return [t.full_tensor() if isinstance(t, DTensor) else t.detach().clone() for t in tensors]
