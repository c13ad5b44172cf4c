"""DistributedDataParallel: an optimizer of its parameters."""

# /// script
# dependencies = ["torch==2.15.0"]
# ///

import headroom
import torch
from _small import assert_same_losses, batches, network, on_ranks, trained
from torch.nn.parallel import DistributedDataParallel

on_ranks()


def run(optimizer):
    model = DistributedDataParallel(network())
    own = [x[torch.distributed.get_rank() :: 2] for x in batches()]
    return trained(model, optimizer(model.parameters(), lr=1e-3), own)


assert_same_losses(run(headroom.optim.AdamW), run(torch.optim.AdamW))
