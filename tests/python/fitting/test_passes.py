"""Times of whole passes, and what follows from them for passes that were not timed."""

import pytest
import torch
from headroom.fitting.costs.passes import PassTimes
from headroom.step import clock
from headroom.step.pass_seconds import PassSeconds, seconds_of_pass
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.fitting import step_of


class Ticking(torch.autograd.Function):
    """Takes time on a clock of its own: ``forward`` and ``backward`` ticks."""

    time = 0

    @staticmethod
    def forward(ctx, x, forward, backward):
        Ticking.time += forward
        ctx.ticks = backward
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        Ticking.time += ctx.ticks
        return grad, None, None


class Ticks(nn.Module):
    def __init__(self, forward, backward, again=False):
        super().__init__()
        self.ticks, self.again = (forward, backward), again
        self.weight = nn.Parameter(torch.ones(3))

    def ticked(self, x):
        return Ticking.apply(x * self.weight, *self.ticks) * self.weight

    def forward(self, x):
        return checkpoint(self.ticked, x, use_reentrant=False) if self.again else self.ticked(x)


class Model(nn.Module):
    """A stem and a head of other times around blocks."""

    def __init__(self, trains_stem=True, again=False):
        super().__init__()
        self.stem = Ticks(100, 200).requires_grad_(trains_stem)
        self.blocks = nn.ModuleList(Ticks(1, 2, again) for _ in range(3))
        self.head = Ticks(10, 20)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).sum()


@pytest.fixture
def ticking(monkeypatch):
    monkeypatch.setattr(clock, "now", lambda: Ticking.time)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (dict(), (9, 330)),
        (dict(again=True), (12, 330)),
        (dict(trains_stem=False), (9, 130)),
        (dict(trains_stem=False, again=True), (12, 130)),
    ],
    ids=["plain", "checkpoints", "frozen stem", "both"],
)
def test_the_blocks_are_told_from_the_rest(options, found, ticking):
    model = Model(**options)
    step = step_of(model, torch.ones(2, 3))
    assert seconds_of_pass(step, model, model.blocks) == found
    assert all(param.grad is None for param in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_without_blocks_all_is_rest(ticking):
    model = Model()
    assert seconds_of_pass(step_of(model, torch.ones(2, 3)), model, []) == (0, 339)


WHOLE = PassSeconds(8.0, 4.0)


def test_parts_take_their_share_until_they_are_timed():
    times = PassTimes(WHOLE, False)
    assert times.is_known(1, False)
    assert not times.is_known(2, False) and not times.is_known(1, True)
    assert (times.factor(4), times.outside(4, False), times.outside(1, True)) == (1.0, 4.0, 4.0)


def test_smaller_parts_take_no_less():
    times = PassTimes(WHOLE, False)
    times.add(2, False, PassSeconds(5.0, 2.5))
    assert times.factor(2) == times.factor(4) == 1.25 and times.factor(1) == 1.0
    assert times.outside(2, False) == times.outside(4, False) == 5.0


def test_parts_that_were_not_timed_take_as_much_longer_as_larger_ones():
    times = PassTimes(WHOLE, False)
    times.add(9, False, PassSeconds(2 * 8.0 / 9, 1.0))
    assert [times.factor(n) for n in (1, 2, 5, 9, 16)] == pytest.approx([1, 1, 1, 2, 2])
    times.add(5, False, PassSeconds(2.4 * 8.0 / 5, 1.0))  # slower than smaller ones, by some noise
    assert [times.factor(n) for n in (3, 7, 16)] == pytest.approx([1, 2.4, 2.4])


@pytest.mark.parametrize(("blocks", "factor"), [(3.9, 1.0), (3.0, 0.75), (4.4, 1.1)])
def test_parts_that_seem_hardly_faster_are_not_faster(blocks, factor):
    times = PassTimes(WHOLE, False)
    times.add(2, False, PassSeconds(blocks, 2.0))
    assert times.factor(2) == pytest.approx(factor)


def test_one_pass_says_of_a_size_and_of_a_loss():
    times = PassTimes(WHOLE, False)
    times.add(2, True, PassSeconds(5.0, 1.25))  # half the time, but for the factor of parts
    assert times.factor(2) == 1.25
    assert times.outside(2, True) == 2.5 and times.outside(1, True) == 2.0
    assert all(times.is_known(count, fused) for count in (1, 2) for fused in (False, True))
    assert not times.is_known(4, True)
    times.add(4, False, PassSeconds(3.0, 2.0))
    assert times.outside(4, False) == 8.0 and times.outside(4, True) == 4.0 * 1.5 * 0.5


def test_gradients_that_the_loss_is_made_of_are_of_the_forward_pass(ticking):
    model = Model()

    def penalty(model, x):
        loss = model(x)
        (slope,) = torch.autograd.grad(loss, model.stem.weight, create_graph=True)
        return loss + slope.square().sum()

    step = step_of(model, torch.ones(2, 3), forward=penalty)
    again = 20 + 3 * 2 + 200  # of the slope
    assert seconds_of_pass(step, model, model.blocks) == (9, 330 + again)


def test_no_hook_stays_on_the_batch(ticking):
    model, x = Model(), torch.ones(2, 3, requires_grad=True)
    model.stem = nn.Identity()
    seconds_of_pass(step_of(model, x), model, model.blocks)
    assert not x._backward_hooks


def test_parts_of_a_model_without_blocks_have_a_factor_too():
    times = PassTimes(PassSeconds(0.0, 4.0), False)
    times.add(2, False, PassSeconds(0.0, 3.0))
    assert times.factor(2) == 1.5 and times.outside(2, False) == times.outside(4, False) == 6.0
