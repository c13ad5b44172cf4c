"""Layers of few bits in two processes: DDP, FSDP2 and distributed checkpoints.

The functions without `test_` in their name run on both ranks (helpers/ranks.py).
"""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from headroom.nn import Linear4bit, Linear8bit
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from helpers.bits import assert_same_bits
from helpers.mesh import can_shard, mesh, whole

pytestmark = pytest.mark.gloo
IN = 24


class Adapted(nn.Module):
    """A layer with an adapter, as LoRA has it."""

    def __init__(self, base, features):
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, features, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def model_of(seed=1, **options):
    torch.manual_seed(seed)
    return nn.Sequential(
        Adapted(Linear4bit(IN, 37, **options), 37),
        nn.ReLU(),
        Adapted(Linear8bit(37, 9), 9),
        Adapted(Linear4bit(9, 5, bias=False, double=False), 5),
    )


def frozen(model):
    """Returns the parameters that are not trained, whole."""
    return whole([p for p in model.parameters() if not p.requires_grad])


def train(model, rank=0):
    x = torch.randn(4, IN, generator=torch.Generator().manual_seed(rank))
    loss = model(x).float().square().mean()
    loss.backward()
    grads = whole([p.grad for p in model.parameters() if p.requires_grad])
    model.zero_grad()
    return [loss.detach(), *grads]


def sharded(model, **options):
    for layer in (model[0], model[2], model[3]):
        fully_shard(layer, mesh=mesh(), **options)
    return fully_shard(model, mesh=mesh(), **options)


def ddp(rank):
    model = model_of(seed=rank)  # which takes the weights of rank 0
    model = DistributedDataParallel(model)
    wanted = model_of(seed=0)
    assert_same_bits(frozen(model), frozen(wanted))
    got = train(model, rank)
    alone = [train(wanted, k) for k in range(dist.get_world_size())]
    for grad, *each in zip(got[1:], *(grads[1:] for grads in alone)):
        torch.testing.assert_close(grad, sum(each) / len(each))
    assert_same_bits(frozen(model), frozen(wanted))


def fsdp(rank, sixteen_bits, ignored):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if sixteen_bits else None
    options = {"mp_policy": policy} if policy else {}
    model, wanted = model_of(), model_of()
    if ignored:
        codes = {p for p in model.parameters() if not p.is_floating_point()}
        options["ignored_params"] = codes
    elif not can_shard():
        return
    sharded(model, **options)
    assert isinstance(model[0].base.weight, DTensor) != ignored
    if sixteen_bits:
        wanted.to(torch.bfloat16)
        (x,) = (torch.randn(4, IN, generator=torch.Generator().manual_seed(0)),)
        torch.testing.assert_close(model(x), wanted(x.bfloat16()))
        model(x).float().square().mean().backward()
    else:
        for got, right in zip(train(model), train(wanted)):
            torch.testing.assert_close(got, right)
    assert_same_bits(frozen(model), frozen(wanted))


def states_of_shards(rank, path):
    if not can_shard():
        return
    model, wanted = sharded(model_of()), model_of()
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    other = sharded(model_of(seed=2))
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(other, state["model"])
    assert_same_bits(whole(other.parameters()), list(wanted.parameters()))
    # Whole, on rank 0: they are loaded into a model that is not sharded, which bitsandbytes reads.
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if rank == 0:
        alone = model_of(seed=3)
        alone.load_state_dict(state)
        for key, value in wanted.state_dict().items():
            assert torch.equal(alone.state_dict()[key], value), key
    # And from rank 0 to all shards.
    other = sharded(model_of(seed=4))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, state, options=options)
    assert_same_bits(whole(other.parameters()), list(wanted.parameters()))


def whole_states_to_shards(rank):
    """What bitsandbytes wrote is cut where it is loaded."""
    if not can_shard():
        return
    wanted = model_of()
    model = sharded(model_of(seed=2))
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, copy.deepcopy(wanted.state_dict()), options=options)
    assert_same_bits(whole(model.parameters()), list(wanted.parameters()))
    # Sent by rank 0, they have no place for scales on the others, which would keep their own.
    entries = wanted.state_dict() if rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    try:
        set_model_state_dict(sharded(model_of(seed=2)), entries, options=options)
        assert rank == 0, "rank 1 has codes and no scales"
    except RuntimeError as error:
        assert "no scales" in str(error), error
    other = sharded(model_of(seed=2, block_size=128))
    try:
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(other, wanted.state_dict(), options=options)
        raise AssertionError("blocks of another size")
    except RuntimeError as error:
        assert "its blocks are others" in str(error), error


def states_of_one_process(rank, path):
    """Keys with dots, which torch.distributed.checkpoint follows as attributes."""
    model, other = model_of(), model_of(seed=2)
    other.load_state_dict(model.state_dict())
    for layer in (other[0].base, other[2].base, other[3].base):
        layer.weight.data.zero_()
    state = get_model_state_dict(model)
    assert list(state) == list(model.state_dict())
    dcp.save(state, checkpoint_id=path)
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(other, state)
    assert_same_bits(list(other.parameters()), list(model.parameters()))


def test_ddp_sends_the_bytes_once(ranks):
    ranks(ddp)


@pytest.mark.parametrize("sixteen_bits", [False, True])
@pytest.mark.parametrize("ignored", [False, True])
def test_fsdp_computes_the_same(ranks, sixteen_bits, ignored):
    ranks(fsdp, sixteen_bits, ignored)


def test_states_of_shards(ranks, tmp_path):
    ranks(states_of_shards, str(tmp_path))


def test_whole_states_are_cut_to_shards(ranks):
    ranks(whole_states_to_shards)


def test_states_of_models_that_are_not_sharded(ranks, tmp_path):
    ranks(states_of_one_process, str(tmp_path))
