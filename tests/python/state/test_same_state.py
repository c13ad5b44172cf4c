"""Ranks that should hold the same: a checksum of every parameter and state.

The functions without `test_` in their name run on both ranks (helpers/ranks.py).
"""

import re

import headroom
import pytest
import torch
from headroom.state.compare import checksum
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

EIGHT = headroom.optim.AdamW8bit
OPTIMIZERS = {
    "AdamW8bit": lambda params: EIGHT(params, min_8bit_size=0, master="remainder16"),
    "Adafactor": headroom.optim.Adafactor,
    "torch": torch.optim.AdamW,
}


def flip(tensor, place=-1, bit=0):
    """One bit of a tensor, in place."""
    data = tensor.detach().view(-1)[place:].view(torch.uint8)
    data[bit // 8] ^= 1 << bit % 8


def refused(optimizer, words):
    with pytest.raises(RuntimeError, match=re.escape(words)):
        headroom.state.check_same_state(optimizer)


def ddp(rank, name):
    torch.manual_seed(0)
    model = torch.nn.Linear(30, 20, dtype=torch.bfloat16)
    wrapped = DistributedDataParallel(model)
    optimizer = OPTIMIZERS[name](model.named_parameters())
    for seed in range(2):
        batch = torch.randn(4, 30, generator=torch.Generator().manual_seed(rank + 10 * seed))
        wrapped(batch.bfloat16()).square().mean().backward()
        optimizer.step()
    headroom.state.check_same_state(optimizer)
    keys = sorted(optimizer.state[model.weight])
    assert len(keys) >= 3
    for key, tensor in [("", model.weight), *((k, optimizer.state[model.weight][k]) for k in keys)]:
        if rank == 1:
            flip(tensor)
        what = f"'{key}' of " if key else ""
        refused(
            optimizer, f"{what}parameter 'weight' is not the same on ranks [0] and on ranks [1]"
        )
        if rank == 1:
            flip(tensor)
    headroom.state.check_same_state(optimizer)
    if rank == 0:
        optimizer.state[model.bias].clear()
    refused(
        optimizer, "of parameter 'bias' is not the same on ranks [0] and on ranks [1]; ranks [0]"
    )


@pytest.mark.gloo
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_flipped_bit_is_named(ranks, name):
    ranks(ddp, name)


def dtensors(rank, dims, placements, differs):
    """Shards differ, as they should; copies of one shard may not."""
    mesh = init_device_mesh("cpu", dims)
    weight = torch.nn.Parameter(distribute_tensor(torch.randn(5, 6), mesh, placements))
    optimizer = headroom.optim.AdamW([weight])
    weight.grad = distribute_tensor(torch.ones(5, 6), mesh, placements)
    optimizer.step()
    headroom.state.check_same_state(optimizer)
    if rank == 1:
        flip(optimizer.state[weight]["exp_avg"].to_local())
    if differs:
        refused(optimizer, "'exp_avg' of parameter 0 of group 0 is not the same on ranks [0]")
    else:
        headroom.state.check_same_state(optimizer)


SHARDED, COPIED = Shard(0), Replicate()


@pytest.mark.gloo
@pytest.mark.parametrize(
    "dims, placements, differs",
    [
        ((2,), [SHARDED], False),
        ((2,), [COPIED], True),
        ((2, 1), [COPIED, SHARDED], True),
        ((1, 2), [COPIED, SHARDED], False),
    ],
    ids=["sharded", "replicated", "copies of shards", "shards of a copy"],
)
def test_copies_of_a_shard_are_compared(ranks, dims, placements, differs):
    ranks(dtensors, dims, placements, differs)


def changes(x):
    """What should not go unseen: bits anywhere, signs of two or of all, order, a shorter tensor."""
    for place in (0, 1, 7, len(x) // 2, len(x) - 1):
        for bit in {0, 7, 8 * x.element_size() - 1}:
            other = x.clone()
            flip(other, place, bit)
            yield other
    for places in ([0, 2], [1, 3], [0, len(x) - 2], slice(None)):
        other = x.clone()
        other[places] = -other[places]
        yield other
    yield x.flip(0)
    yield torch.cat([x[1:2], x[:1], x[2:]])
    yield x[:-1]


@pytest.mark.parametrize("numel", [9, 1000, 2**21 + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_a_checksum_sees_a_change(dtype, numel):
    x = torch.randint(1, 100, (numel,), generator=torch.Generator().manual_seed(1)).to(dtype)
    seen = [int(checksum(tensor)) for tensor in (x, *changes(x))]
    assert len(set(seen)) == len(seen)
    assert int(checksum(torch.cat([x[:1], x])[1:])) == seen[0]  # wherever it lies
    assert int(checksum(x.view(1, -1, 1).expand(1, numel, 1))) == seen[0]


def test_a_checksum_of_no_elements_and_of_zeros():
    sums = [int(checksum(torch.zeros(n))) for n in range(4)]
    assert len(set(sums)) == len(sums)
    assert int(checksum(torch.zeros((), dtype=torch.float64))) != 0
