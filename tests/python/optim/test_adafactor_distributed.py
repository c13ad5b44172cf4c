"""Adafactor in two processes: sums over the ranks that hold the parts of a DTensor.

The functions without `test_` in their name run on both ranks (helpers/ranks.py). Sums are
added in another order than in one process, so a sharded run is that of one process to rounding.
"""

import headroom
import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from helpers.mesh import RESUMMED, mesh
from helpers.ranks import WORLD_SIZE

pytestmark = pytest.mark.gloo
ADAFACTOR = headroom.optim.Adafactor
OPTIONS = {
    "torch": {"semantics": "torch", "weight_decay": 0.1},
    "hf": {"semantics": "hf"},
    "momentum": {"semantics": "hf", "lr": 1e-3, "relative_step": False, "beta1": 0.9},
}
EACH = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
# Even and uneven parts, one with nothing on the second rank, tiny matrices, vectors; by rows, by
# columns, by what is neither, and not at all.
PARTS = [
    ((6, 40), 0),
    ((5, 300), 0),
    ((1, 70), 0),
    ((40, 7), 1),
    ((3, 1), 1),
    ((5, 3, 3), 0),
    ((5, 30, 7), 1),
    ((2, 3, 20, 9), 3),
    ((2, 2), 0),
    ((9,), 0),
    ((1,), 0),
    ((30, 20), None),
]


def values(seed):
    generator = torch.Generator().manual_seed(seed)
    return [0.1 * torch.randn(shape, generator=generator) for shape, _ in PARTS]


def shard(tensor, dim):
    return distribute_tensor(tensor, mesh(), [Replicate() if dim is None else Shard(dim)])


def pair(options):
    """The same parameters as DTensors and whole."""
    parts = [torch.nn.Parameter(shard(v, dim)) for v, (_, dim) in zip(values(0), PARTS)]
    wholes = [torch.nn.Parameter(v.clone()) for v in values(0)]
    return (parts, ADAFACTOR(parts, **options)), (wholes, ADAFACTOR(wholes, **options))


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def step(sharded, single, seed):
    for p, q, grad, (_, dim) in zip(sharded[0], single[0], values(seed), PARTS):
        p.grad, q.grad = shard(grad.to(p.dtype), dim), grad.to(p.dtype)
    sharded[1].step()
    single[1].step()


def assert_close(sharded, single):
    for k, (p, q) in enumerate(zip(sharded[0], single[0])):
        torch.testing.assert_close(full(p), q, **RESUMMED, msg=lambda m, k=k: f"{PARTS[k]}: {m}")
        mine, its = sharded[1].state[p], single[1].state[q]
        assert mine.keys() == its.keys()
        for name, value in its.items():
            assert mine[name].shape == value.shape
            torch.testing.assert_close(
                full(mine[name]),
                value,
                **RESUMMED,
                msg=lambda m, k=k, n=name: f"{n}, {PARTS[k]}: {m}",
            )


def shards_are_the_whole(rank, options):
    sharded, single = pair(options)
    for seed in range(1, 5):
        step(sharded, single, seed)
    assert_close(sharded, single)
    for p in sharded[0]:  # what every rank keeps is the same on both
        for value in sharded[1].state[p].values():
            local = value.to_local() if isinstance(value, DTensor) else value
            if not isinstance(value, DTensor) or value.placements[0].is_replicate():
                both = [torch.empty_like(local) for _ in range(WORLD_SIZE)]
                torch.distributed.all_gather(both, local.contiguous())
                assert torch.equal(*both)


@EACH
def test_shards_are_the_whole(ranks, options):
    ranks(shards_are_the_whole, options)


# A sum that differs in its last bit may round the other way, seldom.


def found_inf(rank, options):
    sharded, single = pair(options)
    step(sharded, single, 1)
    before = [full(p).clone() for p in sharded[0]]
    sharded[1].found_inf = single[1].found_inf = torch.ones(())
    step(sharded, single, 2)
    assert all(torch.equal(full(p), q) for p, q in zip(sharded[0], before))
    assert all(sharded[1].state[p]["step"] == 1 for p in sharded[0])


def test_an_overflow_changes_nothing(ranks):
    ranks(found_inf, OPTIONS["hf"])
