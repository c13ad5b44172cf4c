"""The seconds of passes, by a clock that stands still unless a layer moves it."""

import pytest
import torch
from headroom.step import clock
from headroom.step.clock import Stopwatch
from headroom.step.pass_seconds import PassSeconds, seconds_of_pass
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.fitting import step_of


class Clock:
    """A clock that stands still, unless it is told."""

    def __init__(self):
        self.time = 100.0

    def __call__(self):
        return self.time


class Lasts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, clock, forward, backward):
        ctx.clock, ctx.seconds = clock, backward
        clock.time += forward
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.clock.time += ctx.seconds
        return grad, None, None, None


class Slow(nn.Module):
    """A layer that takes as long as it is told."""

    def __init__(self, clock, forward, backward):
        super().__init__()
        self.weight, self.about = nn.Parameter(torch.ones(2)), (clock, forward, backward)

    def forward(self, x):
        return Lasts.apply(x * self.weight, *self.about) * self.weight


class Around(nn.Module):
    def __init__(self, clock, again):
        super().__init__()
        self.first, self.last = Slow(clock, 1, 10), Slow(clock, 4, 40)
        self.blocks = nn.ModuleList([Slow(clock, 2, 20), Slow(clock, 3, 30)])
        self.again = again

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.last(x).sum()


@pytest.fixture
def still(monkeypatch):
    made = Clock()
    monkeypatch.setattr(clock, "now", made)
    return made


@pytest.mark.parametrize("again", [False, True])
def test_the_seconds_of_passes(still, again):
    model = Around(still, again)
    x = torch.ones(3, 2)
    found = seconds_of_pass(step_of(model, x), model, model.blocks)
    assert found == PassSeconds(5 + 50 + 5 * again, 5 + 50) and found.whole == 110 + 5 * again
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert seconds_of_pass(step_of(model, x), model, []) == PassSeconds(0, 110 + 5 * again)
    # What needs no gradient ends the backward pass of the blocks.
    model.first.requires_grad_(False)
    assert seconds_of_pass(step_of(model, x), model, model.blocks).blocks == 55 + 5 * again
    for block in model.blocks:
        block.requires_grad_(False)
    assert seconds_of_pass(step_of(model, x), model, model.blocks).blocks == 5


def test_no_hook_stays_on_a_batch_that_blocks_take(still):
    model = nn.Sequential(Slow(still, 1, 10), Slow(still, 2, 20))
    x = torch.ones(3, 2, requires_grad=True)
    step = step_of(model, x, forward=lambda model, x: model(x).sum())
    assert seconds_of_pass(step, model, model) == PassSeconds(33, 0)
    assert not x._backward_hooks


def test_the_least_seconds_of_two_passes():
    assert PassSeconds(1, 4).least(PassSeconds(2, 3)) == PassSeconds(1, 3)


def test_a_stopwatch(still):
    watch = Stopwatch(torch.device("cpu"))
    assert watch.seconds() == []
    for seconds in (1, 2, 4):
        still.time += seconds
        watch.lap()
    assert watch.seconds() == [2, 4]
