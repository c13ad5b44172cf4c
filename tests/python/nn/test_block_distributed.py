"""Blocks in two processes: DDP and FSDP2, which replaces parameters between the passes.

The functions without `test_` in their name run on both ranks (helpers/ranks.py).
"""

import pytest
import torch
from headroom.nn import LEVELS, Transformer, TransformerConfig
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from helpers.bits import assert_same_bits
from helpers.mesh import mesh, whole
from helpers.ranks import Ranks

pytestmark = [pytest.mark.gloo, pytest.mark.slow]
SHAPES = {
    "llama": dict(qk_norm=True),
    "bert": dict(layout="post", norm="layer", gated=False, mlp_bias=True, dropout=0.1),
}


def model_of(name, level):
    torch.manual_seed(1)
    sizes = dict(vocab_size=40, hidden_size=32, layers=2, heads=4, features=48, kv_heads=2)
    return Transformer(TransformerConfig(**sizes, **SHAPES[name], save=level))


def gradients(model, rank):
    ids = torch.randint(40, (2, 6), generator=torch.Generator().manual_seed(rank))
    torch.manual_seed(9 + rank)
    loss = model(ids).float().square().mean()
    loss.backward()
    grads = whole([p.grad for p in model.parameters()])
    model.zero_grad()
    return [loss.detach(), *grads]


def ddp(rank, name):
    wanted = None
    for level in LEVELS:
        model = DistributedDataParallel(model_of(name, level))
        gradients(model, rank)
        got = gradients(model, rank)
        assert_same_bits(got, wanted or got)
        wanted = got
    alone = [gradients(model_of(name, "L0"), k) for k in range(torch.distributed.get_world_size())]
    for grad, *each in zip(wanted[1:], *(grads[1:] for grads in alone)):
        torch.testing.assert_close(grad, sum(each) / len(each))


def fsdp(rank, name, reshard, sixteen_bits):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if sixteen_bits else None
    options = {"mp_policy": policy} if policy else {}
    wanted = None
    for level in LEVELS:
        model = model_of(name, level)
        for block in model.blocks:
            fully_shard(block, mesh=mesh(), reshard_after_forward=reshard, **options)
        fully_shard(model, mesh=mesh(), reshard_after_forward=reshard, **options)
        gradients(model, rank)
        got = gradients(model, rank)
        assert_same_bits(got, wanted or got)
        wanted = got
    if not sixteen_bits:
        world = range(torch.distributed.get_world_size())
        alone = [gradients(model_of(name, "L0"), k) for k in world]
        for grad, *each in zip(wanted[1:], *(grads[1:] for grads in alone)):
            torch.testing.assert_close(grad, sum(each) / len(each))


@pytest.mark.parametrize("name", SHAPES)
def test_ddp(ranks, name):
    ranks(ddp, name)


@pytest.mark.parametrize("sixteen_bits", [False, True])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_fsdp(ranks, name, reshard, sixteen_bits):
    ranks(fsdp, name, reshard, sixteen_bits)


def test_fsdp_in_four_processes():
    four = Ranks(4)
    try:
        four(fsdp, "llama", True, False)
    finally:
        four.close()
