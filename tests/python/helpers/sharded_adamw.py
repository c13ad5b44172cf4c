"""A small model whose shards are uneven, its training and its states on every rank."""

import headroom
import torch
from torch.distributed.fsdp import fully_shard

from helpers import training
from helpers.bits import assert_same_bits
from helpers.mesh import mesh, whole

ADAMW = headroom.optim.AdamW
OPTIONS = dict(lr=1e-2, weight_decay=0.1)


class Model(torch.nn.Module):
    """Parameters of 3, 5, 5, 1 and 1 rows: split over two ranks, some unevenly, and of the last two
    rank 1 has nothing."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.first = torch.nn.Linear(3, 5)
        self.second = torch.nn.Linear(5, 1)
        self.gain = torch.nn.Parameter(torch.randn(3))

    def forward(self, x):
        return self.second(torch.tanh(self.first(x * self.gain)))


def sharded(model=None, **policy):
    return fully_shard(model or Model(), mesh=mesh(), **policy)


def backward(model, rank, step, dtype=torch.float32):
    """Gradients of a batch that is another one on every rank and in every step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    batch = torch.randn(8, 3, generator=generator).to(dtype)
    model(batch).square().mean().backward()


def train(model, optimizer, rank, steps):
    training.train(optimizer, steps, lambda step: backward(model, rank, step))


def states(optimizer, name):
    return [optimizer.state[p][name] for group in optimizer.param_groups for p in group["params"]]


def assert_same_state(left, right, names=("step", "exp_avg", "exp_avg_sq")):
    for name in names:
        assert_same_bits(whole(states(left, name)), whole(states(right, name)))
