"""The step on the host in two processes: FSDP2's shards, empty ones too, and DDP.

The functions without `test_` in their name run on both ranks (helpers/ranks.py).
"""

import copy

import headroom
import pytest
import torch
from headroom._core.dtensor import local_part
from headroom.host.arena import in_arena
from torch.nn.parallel import DistributedDataParallel

from helpers.bits import assert_same_bits
from helpers.copies import hosted_step
from helpers.sharded8bit import ADAMW8BIT, OPTIONS, Model, backward, sharded

pytestmark = pytest.mark.gloo


def fsdp(rank, options, releases, bucket_bytes):
    nets = [sharded() for _ in range(2)]
    optimizers = [ADAMW8BIT(net.parameters(), **OPTIONS, **options) for net in nets]
    hosted_step(optimizers[1], bucket_bytes=bucket_bytes)
    handle = None
    if releases:
        handle = headroom.release_gradients(nets[1], optimizers[1], bucket_bytes=1000)
    for step in range(5):
        for net, optimizer in zip(nets, optimizers):
            optimizer.zero_grad()
            backward(net, step)
            optimizer.step()
        if step == 2:
            optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        if step == 3:
            for net in nets:
                local_part(net.odd).detach().mul_(0.5)
    left, right = (optimizer.state_dict()["state"] for optimizer in optimizers)
    for index, entry in left.items():
        for key, value in entry.items():
            assert type(right[index][key]) is type(value)
            assert_same_bits([local_part(value)], [local_part(right[index][key])])
    assert_same_bits(*(map(local_part, net.parameters()) for net in nets))
    locals_ = [local_part(x) for entry in optimizers[1].state.values() for x in entry.values()]
    assert all(in_arena(local) for local in locals_ if local.numel())
    if handle is not None:
        handle.remove()


@pytest.mark.parametrize("releases", [False, True])
@pytest.mark.parametrize(
    "options, bucket_bytes",
    [({}, 4096), ({"max_grad_norm": 1e9}, None), ({"code_rounding": "stochastic"}, None)],
)
def test_fsdp2(ranks, options, bucket_bytes, releases):
    ranks(fsdp, options, releases, bucket_bytes)


def ddp(rank):
    nets = [DistributedDataParallel(Model()) for _ in range(2)]
    optimizers = [ADAMW8BIT(net.parameters(), **OPTIONS, max_grad_norm=0.1) for net in nets]
    hosted_step(optimizers[1])
    for step in range(4):
        for net, optimizer in zip(nets, optimizers):
            optimizer.zero_grad()
            backward(net, 2 * step + rank)
            optimizer.step()
    assert_same_bits(*(net.parameters() for net in nets))
    first = nets[1].module.odd.detach().clone()
    torch.distributed.broadcast(first, 0)
    assert torch.equal(first, nets[1].module.odd)


def test_ddp(ranks):
    ranks(ddp)
