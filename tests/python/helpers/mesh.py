"""Device meshes of all ranks, and whole copies of tensors that are sharded over them."""

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

# Adafactor's sums over ranks are added in another order than in one process.
RESUMMED = {"rtol": 2**-17, "atol": 2**-22}


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def whole(tensors):
    """Full copies of DTensors; collective."""
    return [t.full_tensor() if isinstance(t, DTensor) else t.detach().clone() for t in tensors]
