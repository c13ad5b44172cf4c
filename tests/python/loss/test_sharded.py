"""Losses of heads that FSDP2 has sharded, and of replicas under DDP.

The functions without `test_` in their name run on all ranks (helpers/ranks.py).
"""

import headroom
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from helpers.bits import assert_same_bits
from helpers.mesh import mesh, whole

pytestmark = pytest.mark.gloo

ROWS, FEATURES, CLASSES = 37, 24, 53


def given():
    generator = torch.Generator().manual_seed(3)
    hidden, weight, bias = (
        torch.randn(size, generator=generator)
        for size in ((ROWS, FEATURES), (CLASSES, FEATURES), (CLASSES,))
    )
    target = torch.randint(CLASSES, (ROWS,), generator=generator)
    target[::5] = -100
    return hidden, weight, bias, target


def distilled(rank, is_biased):
    """Heads that are sharded are gathered: what each rank's own whole heads give, averaged."""
    hidden, weight, bias, target = given()
    teacher_hidden, teacher = hidden.flip(-1).clone(), weight.flip(0).clone()
    leaves = [hidden * (1 + rank), weight, bias if is_biased else None]
    leaves = [None if x is None else x.clone().requires_grad_() for x in leaves]

    def loss(hidden, weight, bias, teacher):
        return headroom.linear_distillation_loss(
            hidden, weight, teacher_hidden, teacher, target, student_bias=bias, divergence="js"
        )

    expected = loss(*leaves, teacher)
    expected.backward()
    shards = [
        None if x is None else distribute_tensor(x.detach(), mesh(), [Shard(0)]).requires_grad_()
        for x in leaves[1:]
    ]
    own = leaves[0].detach().clone().requires_grad_()
    got = loss(own, *shards, distribute_tensor(teacher, mesh(), [Shard(0)]))
    got.backward()
    assert_same_bits([got.detach(), own.grad], [expected.detach(), leaves[0].grad])
    for shard, leaf in zip(shards, leaves[1:]):
        if shard is not None:
            dist.all_reduce(leaf.grad)
            assert shard.grad.placements == (Shard(0),)
            (whole_grad,) = whole([shard.grad])
            torch.testing.assert_close(whole_grad, leaf.grad / dist.get_world_size())


def batch(rank, ignored):
    hidden, _, _, target = given()
    hidden, target = hidden.roll(rank, 1), target.roll(rank)
    return hidden, target.fill_(-100) if rank == ignored else target


class Head(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(FEATURES, FEATURES)
        self.head = torch.nn.Linear(FEATURES, CLASSES, bias=False)
        self.head.weight.data.copy_(given()[1])

    def forward(self, hidden, target):
        return headroom.linear_cross_entropy(self.body(hidden), self.head.weight, target)


def averages(ignored, ranks):
    """The gradients that every rank should have, from the whole model and each rank's batch."""
    torch.manual_seed(0)
    model = Head()
    for rank in range(ranks):
        hidden, target = batch(rank, ignored)
        loss = F.cross_entropy(model.head(model.body(hidden)), target, reduction="sum")
        (loss / (target != -100).sum().clamp_min(1) / ranks).backward()
    return [p.grad for p in model.parameters()]


def ddp(rank, ignored):
    torch.manual_seed(0)
    model = DistributedDataParallel(Head())
    for _ in range(2):
        model.zero_grad()
        loss = model(*batch(rank, ignored))
        loss.backward()
    assert loss.isfinite() and (loss == 0) == (rank == ignored)
    for p, want in zip(model.parameters(), averages(ignored, dist.get_world_size())):
        torch.testing.assert_close(p.grad, want)


def fsdp(rank, head_alone):
    """The head within the model's group, and with a group of its own that nothing gathers."""
    torch.manual_seed(0)
    model = Head()
    if head_alone:
        fully_shard(model.head, mesh=mesh())
    fully_shard(model, mesh=mesh())
    for _ in range(2):
        model.zero_grad()
        model(*batch(rank, 0)).backward()
    assert model.head.weight.grad.placements == (Shard(0),)
    got = whole([p.grad for p in model.parameters()])
    for grad, want in zip(got, averages(0, dist.get_world_size())):
        torch.testing.assert_close(grad, want)


@pytest.mark.parametrize("is_biased", [False, True])
def test_distillation_of_sharded_heads(ranks, is_biased):
    ranks(distilled, is_biased)


@pytest.mark.parametrize("ignored", [None, 0, 1])
def test_ddp_does_not_hang_where_nothing_counts(ranks, ignored):
    ranks(ddp, ignored)


@pytest.mark.parametrize("head_alone", [False, True])
def test_fsdp(ranks, head_alone):
    ranks(fsdp, head_alone)
