"""retry_on_oom: a step that fails at any of its allocations, and goes on as a leaner run would."""

import functools
import random

import headroom
import numpy as np
import pytest
import torch
from torch import nn

from helpers.failing_allocator import failing_allocator
from helpers.retrying import Run, fail_everywhere


@pytest.fixture
def allocator():
    with failing_allocator() as allocator:
        yield allocator


class Normed(nn.Module):
    """Repeated blocks with statistics and with dropout."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.GELU())
            for _ in range(2)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


OPTIMIZERS = {
    "headroom": functools.partial(headroom.optim.AdamW, max_grad_norm=0.5),
    "8bit": functools.partial(headroom.optim.AdamW8bit, min_8bit_size=100),
    "adafactor": headroom.optim.Adafactor,
    "foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "fused": functools.partial(torch.optim.AdamW, fused=True),
    "loop": functools.partial(torch.optim.AdamW, foreach=False),
    "momentum": functools.partial(torch.optim.SGD, momentum=0.9, foreach=True),
}


OURS = ("headroom", "8bit", "adafactor")


class Training(Run):
    """A step that draws from every generator."""

    kind = None  # the name of the optimizer

    def step_optimizer(self):
        self.optimizer = OPTIMIZERS[self.kind](self.model.parameters(), lr=0.01)
        self.losses = []

    def plain(self, batch):
        factor = random.random() + np.random.rand()
        loss = self.model(batch).square().mean() * factor
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())

    def others(self):
        return {f"loss {k}": loss for k, loss in enumerate(self.losses)}


class Transformer(Training):
    def made(self, save):
        torch.manual_seed(1)
        config = headroom.nn.TransformerConfig(
            vocab_size=11, hidden_size=8, layers=2, heads=2, features=12, dropout=0.2, tied=True
        )
        self.model = headroom.nn.Transformer(config, save=save)
        self.step_optimizer()


class BatchNorm(Training):
    leaner = "L5"

    def made(self, save):
        torch.manual_seed(1)
        self.model = Normed()
        headroom.patch(self.model, save=save, norms=False, glu=False)
        self.step_optimizer()

    def batches(self):
        generator = torch.Generator().manual_seed(5)
        return [torch.randn(5, 6, generator=generator) for _ in range(3)]


def late(optimizer):
    """Optimizers of torch write while they allocate."""
    return None if optimizer in OURS else "that of (AdamW|SGD) failed half way"


BUILDS = pytest.mark.parametrize("build", [Transformer, BatchNorm])


@BUILDS
@pytest.mark.parametrize("optimizer", ["headroom", "8bit", "adafactor", "foreach", "momentum"])
def test_a_failure_at_some_allocations_of_a_step(allocator, build, optimizer):
    kind = type(build.__name__, (build,), {"kind": optimizer})
    assert fail_everywhere(allocator, kind, which=1, stride=11, late=late(optimizer)) > 2


@pytest.mark.slow
@BUILDS
@pytest.mark.parametrize("which", [1, 2], ids=["first", "second"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_failure_at_every_allocation_of_a_step(allocator, build, optimizer, which):
    kind = type(build.__name__, (build,), {"kind": optimizer})
    assert fail_everywhere(allocator, kind, which, late=late(optimizer)) > 20
