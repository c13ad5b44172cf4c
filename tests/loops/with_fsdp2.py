"""FSDP2: an optimizer of sharded parameters."""

# /// script
# dependencies = ["torch==2.15.0"]
# ///

import headroom
import torch
from _small import assert_same_losses, batches, network, on_ranks, state_bytes, trained
from torch.distributed.fsdp import fully_shard

on_ranks()


def run(make, **options):
    model = network()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = make(model.parameters(), lr=1e-3, **options)
    return optimizer, trained(model, optimizer, batches())


theirs, reference = run(torch.optim.AdamW)
_, losses = run(headroom.optim.AdamW)
assert_same_losses(losses, reference)
optimizer, losses = run(headroom.optim.AdamW8bit, min_8bit_size=1024)
assert state_bytes(optimizer) < 0.3 * state_bytes(theirs)
assert_same_losses(losses, reference, rtol=0.01)
