"""AdamW8bit in two processes: FSDP2, DTensors.

The functions without `test_` in their name run on both ranks (helpers/ranks.py). Blocks are
local to a shard. Where rows are whole blocks and shards are rows, blocks are those of one process,
and so are all bits.
"""

import copy
from types import SimpleNamespace

import headroom
import pytest
import torch
from headroom._core.dtensor import local_part
from headroom.host.arena import in_arena
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from helpers.bits import assert_same_bits, bits
from helpers.mesh import mesh, whole
from helpers.ranks import WORLD_SIZE
from helpers.sharded8bit import (
    ADAMW8BIT,
    CODES,
    OPTIONS,
    SMALL,
    Model,
    assert_same_shards,
    backward,
    named,
    sharded,
    train,
)

pytestmark = pytest.mark.gloo


ON_HOST = CPUOffloadPolicy(pin_memory=False)  # which needs a GPU otherwise


def step_all(nets, optimizers, step):
    for net, optimizer in zip(nets, optimizers):
        backward(net, step)
        optimizer.step()
        optimizer.zero_grad()


def on_host(rank, options, releases):
    """FSDP2 keeps parameters, gradients and states on the host, and the step runs there."""
    nets = [sharded(offload_policy=policy) for policy in (OffloadPolicy(), ON_HOST)]
    optimizers = [ADAMW8BIT(net.parameters(), **OPTIONS, **options) for net in nets]
    if releases:
        headroom.release_gradients(nets[1], optimizers[1], bucket_bytes=1000)
    for step in range(4):
        step_all(nets, optimizers, step)
    assert_same_shards(nets[0], optimizers[0], nets[1], optimizers[1])
    for p in nets[1].parameters():
        assert local_part(p).device.type == "cpu"
        assert all(local_part(x).device.type == "cpu" for x in optimizers[1].state[p].values())


@pytest.mark.parametrize(
    "options, releases",
    [
        ({}, False),
        ({"max_grad_norm": 1e9}, False),
        ({}, True),
        ({"nonfinite": "skip_element"}, True),
    ],
)
def test_fsdp2_that_keeps_everything_on_the_host(ranks, options, releases):
    ranks(on_host, options, releases)


def on_host_of_each_rank(optimizer):
    """The bytes of states in the arena, and of those that are not."""
    found = {True: 0, False: 0}
    for entry in optimizer.state.values():
        for local in map(local_part, entry.values()):
            found[in_arena(local)] += local.nbytes
    return found[True], found[False]


def paged(rank, cls, options, make, budget, bucket_bytes, releases):
    """States of shards in the arena, some of them in pieces, beside shards whose states stay."""
    nets = [sharded(make()) for _ in range(2)]
    optimizers = [cls(net.parameters(), **options) for net in nets]
    handle = headroom.optim.offload(optimizers[1], budget=budget, bucket_bytes=bucket_bytes)
    if releases:
        headroom.release_gradients(nets[1], optimizers[1], bucket_bytes=1000)
    for step in range(5):
        step_all(nets, optimizers, step)
        away, here = on_host_of_each_rank(optimizers[1])
        assert away > 0 and (here > 0) == (budget is not None)
        if step == 2:
            optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    assert on_host_of_each_rank(optimizers[1]) == (away, here)
    left, right = (optimizer.state_dict()["state"] for optimizer in optimizers)
    for index, entry in left.items():
        for key, value in entry.items():
            assert type(right[index][key]) is type(value)
            assert_same_bits([local_part(value)], [local_part(right[index][key])])
    handle.remove()
    assert on_host_of_each_rank(optimizers[1])[0] == 0
    assert_same_bits(*(map(local_part, net.parameters()) for net in nets))


@pytest.mark.parametrize("releases", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"nonfinite": "skip_element"}, {"code_rounding": "stochastic"}]
)
@pytest.mark.parametrize("bucket_bytes", [4096, None])
def test_fsdp2_with_states_on_the_host(ranks, options, bucket_bytes, releases):
    ranks(paged, ADAMW8BIT, OPTIONS | options, Model, None, bucket_bytes, releases)


def deep():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(256, 16), torch.nn.Linear(16, 8192))


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"state_dtype": torch.bfloat16}])
def test_fsdp2_with_some_states_on_the_host(ranks, options):
    options = {"lr": 1e-2, **options}
    ranks(paged, headroom.optim.AdamW, options, deep, 200_000, 16_384, False)


def in_flight(rank):
    """Gradients that torch copies to the host while a hook reads them are waited for."""
    net = sharded(offload_policy=ON_HOST)
    optimizer = ADAMW8BIT(net.parameters(), **OPTIONS)
    headroom.release_gradients(net, optimizer, bucket_bytes=0)
    events, prepared_part = [], ADAMW8BIT._prepared_part
    stream = SimpleNamespace(synchronize=lambda: events.append("waits"))

    def steps(self, *arguments):
        events.append("steps")
        return prepared_part(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "is_pinned", lambda self: True)
        patch.setattr(torch.cuda, "current_stream", lambda *_: stream)
        patch.setattr(ADAMW8BIT, "_prepared_part", steps)
        backward(net, 0)
    assert events == ["waits", "steps"] * len(list(net.parameters()))


def test_gradients_of_fsdp2_on_their_way_to_the_host(ranks):
    ranks(in_flight)


def local_blocks(rank, shape, placement):
    """A shard gives the bits of the same step on its elements alone."""
    values, grads = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
    param = torch.nn.Parameter(distribute_tensor(values, mesh(), [placement]))
    alone = torch.nn.Parameter(param.to_local().detach().clone())
    optimizer, reference = (ADAMW8BIT([p], min_8bit_size=0, lr=1e-2) for p in (param, alone))
    for k in range(3):
        param.grad = distribute_tensor(grads * (k + 1), mesh(), [placement])
        alone.grad = param.grad.to_local().contiguous()
        optimizer.step()
        reference.step()
    assert_same_bits([param.to_local()], [alone])
    blocks = -(-alone.numel() // 256)
    for key in ("exp_avg", "exp_avg_sq"):
        state = optimizer.state[param]
        assert_same_bits([state[key].to_local()], [reference.state[alone][key]])
        scales = state[f"{key}_absmax"].to_local().flatten()
        assert_same_bits([scales[:blocks]], [reference.state[alone][f"{key}_absmax"].flatten()])
        assert not scales[blocks:].any()
        assert state[f"{key}_absmax"].full_tensor().dim() == state[f"{key}_absmax"].dim()


LOCAL = {
    "rows": ((7, 300), Shard(0)),
    "columns": ((7, 301), Shard(1)),
    "columns of whole blocks": ((7, 1024), Shard(1)),
    "replicated": ((7, 300), Replicate()),
    "rows of whole blocks, replicated": ((7, 512), Replicate()),
    "one row": ((1, 300), Shard(0)),
    "a vector": ((999,), Shard(0)),
    "three dimensions": ((3, 4, 128), Shard(1)),
    "empty": ((0, 256), Shard(0)),
}


@pytest.mark.parametrize("shape, placement", LOCAL.values(), ids=LOCAL)
def test_blocks_are_local_to_a_shard(ranks, shape, placement):
    ranks(local_blocks, shape, placement)


def strided_shards(rank, dims):
    """Tensor parallelism, then FSDP2 over it: rows are sharded twice, in an order of their own."""
    where = init_device_mesh("cpu", dims, mesh_dim_names=("dp", "tp"))
    model, single = Model(), Model()
    plan = {"even": ColwiseParallel(output_layouts=Replicate())}
    fully_shard(parallelize_module(model, where["tp"], plan), mesh=where["dp"])
    optimizer = ADAMW8BIT(model.parameters(), **OPTIONS)
    reference = ADAMW8BIT(single.parameters(), **OPTIONS)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        single.even.weight.grad = model.even.weight.grad.full_tensor()
        optimizer.step()
        reference.step()
    p, alone = model.even.weight, single.even.weight
    state = optimizer.state[p]
    assert state["exp_avg_absmax"].placements == p.placements and len(p.placements) == 2
    assert state["exp_avg_absmax"].to_local().shape == (3, 1)
    keys = CODES[1:]
    assert_same_bits(whole([p]), [alone])
    assert_same_bits(
        whole(state[key] for key in keys), [reference.state[alone][key] for key in keys]
    )


def strided_blocks(rank, dims):
    """Of rows that are not whole blocks: scales are sharded wherever the parameter is."""
    where = init_device_mesh("cpu", dims, mesh_dim_names=("dp", "tp"))
    model = torch.nn.Sequential(torch.nn.Linear(300, 8))
    plan = {"0": ColwiseParallel(output_layouts=Replicate())}
    fully_shard(parallelize_module(model, where["tp"], plan), mesh=where["dp"])
    optimizer = ADAMW8BIT(model.parameters(), min_8bit_size=1000)
    model(torch.ones(2, 300)).sum().backward()
    optimizer.step()
    for name in ("exp_avg_absmax", "exp_avg_sq_absmax"):
        scales = optimizer.state[model[0].weight][name]
        assert scales.placements == (Shard(0), Shard(0)) and scales.shape == (2, 1, 5)
        assert scales.to_local().shape == (1, 1, 5)  # of 1200 elements


@pytest.mark.parametrize("dims", [(1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("what", [strided_shards, strided_blocks])
def test_tensor_parallel_and_fsdp2(ranks, what, dims):
    ranks(what, dims)


def skip(rank, scaled, bad_rank):
    """A NaN in one shard: no byte moves on any rank, with a scaler or without."""
    model = sharded()
    nonfinite = "propagate" if scaled else "skip_step"
    optimizer = ADAMW8BIT(model.parameters(), **OPTIONS, nonfinite=nonfinite)
    scaler = headroom.amp.GradScaler("cpu", enabled=scaled)
    scaler.scale(torch.zeros(()))
    for step, bad in enumerate([False, True, False]):
        optimizer.zero_grad()
        backward(model, step)
        if bad and rank == bad_rank:
            model.even.weight.grad.to_local()[0, 0] = float("nan")
        held = [p.to_local() for p in model.parameters()]
        held += [t.to_local() if isinstance(t, DTensor) else t for t in values(optimizer)]
        before = [bits(t).clone() for t in held]
        scaler.step(optimizer)
        scaler.update()
        assert all(torch.equal(bits(t), b) for t, b in zip(held, before)) == bad
    assert all(entry["step"] == 2 for entry in optimizer.state.values())


def values(optimizer):
    return [value for entry in optimizer.state.values() for value in entry.values()]


@pytest.mark.parametrize("bad_rank", range(WORLD_SIZE))
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaler"])
def test_all_ranks_skip_when_one_shard_has_a_nan(ranks, scaled, bad_rank):
    ranks(skip, scaled, bad_rank)


def randomness(rank):
    """Shards draw different numbers: equal rows of both ranks get different codes."""
    row = torch.randn(1, 2048, generator=torch.Generator().manual_seed(1))
    param = torch.nn.Parameter(distribute_tensor(row.repeat(2, 1), mesh(), [Shard(0)]))
    param.grad = distribute_tensor(row.repeat(2, 1), mesh(), [Shard(0)])
    optimizer = ADAMW8BIT([param], min_8bit_size=0, code_rounding="stochastic")
    optimizer.step()
    first, second = optimizer.state[param]["exp_avg"].full_tensor()
    assert 0.1 < (first != second).float().mean() < 0.9


def test_shards_draw_different_numbers(ranks):
    ranks(randomness)


def reports(rank):
    model = sharded()
    optimizer = ADAMW8BIT(model.named_parameters(), **OPTIONS)
    before = {row.dtypes: (set(row.names), row.numel) for row in optimizer.memory()}
    train(model, optimizer, range(1))
    rows = {row.dtypes[0]: row for row in optimizer.memory()}
    assert {row.dtypes: (set(row.names), row.numel) for row in rows.values()} == before
    assert set(rows["float32"].names) == {f"'{name}'" for name in SMALL}
    large = [p for name, p in named(model).items() if name not in SMALL]
    assert rows["uint8"].numel == sum(p.to_local().numel() for p in large)
    for key in CODES[1:]:
        held = sum(optimizer.state[p][key].to_local().nbytes for p in large)
        assert rows["uint8"].bytes[key] == held


def test_memory_is_that_of_this_rank(ranks):
    ranks(reports)
