"""A model whose shards have 8-bit moments, and what its ranks compare."""

import headroom
import torch
from headroom._core.dtensor import local_part
from torch.distributed.fsdp import fully_shard

from helpers import training
from helpers.bits import assert_same_bits
from helpers.mesh import mesh

ADAMW8BIT = headroom.optim.AdamW8bit
OPTIONS = dict(lr=1e-2, weight_decay=0.1, min_8bit_size=1000)
CODES = "step", "exp_avg", "exp_avg_sq", "exp_avg_absmax", "exp_avg_sq_absmax"


class Model(torch.nn.Module):
    """8-bit moments by the whole size alone: a shard of `even` or `uneven` has less than 1000. Rows
    of `even`, `uneven` and `one` are whole blocks; rank 1 has 2 rows of `uneven` and none of `one`,
    and fewer elements of `odd`. The others are small."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.even = torch.nn.Linear(256, 6, bias=False)
        self.uneven = torch.nn.Parameter(torch.randn(5, 256))
        self.one = torch.nn.Parameter(torch.randn(1, 1024))
        self.odd = torch.nn.Parameter(torch.randn(7, 300))
        self.small = torch.nn.Linear(6, 1)

    def forward(self, x):
        hidden = self.even(x * self.uneven.sum(0) + self.one[0, :256])
        return self.small(torch.tanh(hidden)) + self.odd.square().mean() + self.one.mean()


SMALL = "small.weight", "small.bias"


def sharded(model=None, **policy):
    return fully_shard(model or Model(), mesh=mesh(), **policy)


def backward(model, seed, dtype=torch.float32):
    """The same batch on every rank."""
    batch = torch.randn(8, 256, generator=torch.Generator().manual_seed(seed)).to(dtype)
    model(batch).square().mean().backward()


def train(model, optimizer, steps):
    training.train(optimizer, steps, lambda step: backward(model, step))


def named(model):
    """In one order, which sharding changes otherwise."""
    return dict(sorted(model.named_parameters()))


def assert_same_shards(model, optimizer, other, other_optimizer):
    """Local parts, byte for byte."""
    for name, p in named(model).items():
        q = named(other)[name]
        assert_same_bits([p.to_local()], [q.to_local()])
        left, right = optimizer.state[p], other_optimizer.state[q]
        assert left.keys() == right.keys()
        for key, value in left.items():
            assert type(value) is type(right[key]) and value.shape == right[key].shape
            assert_same_bits([local_part(value)], [local_part(right[key])])
