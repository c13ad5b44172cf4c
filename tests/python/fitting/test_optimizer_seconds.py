"""The time of an optimizer's step, from copies of some parameters."""

import functools
import random

import headroom
import pytest
import torch
from headroom.fitting.costs.optimizer_seconds import optimizer_seconds
from headroom.step import clock
from torch import nn

CPU = torch.device("cpu")


def params(*shapes):
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


class Counting(torch.optim.Optimizer):
    """Takes a nanosecond for each byte that it steps."""

    time = 0.0
    steps = elements = 0

    def __init__(self, params, factor=1.0):
        super().__init__(params, {"factor": factor})

    def step(self, closure=None):
        Counting.steps += 1
        for group in self.param_groups:
            for param in group["params"]:
                assert param.grad.shape == param.shape and param.grad.abs().max() > 0
                Counting.elements += param.numel()
                Counting.time += 1e-9 * group["factor"] * param.numel() * param.element_size()


@pytest.fixture
def counting(monkeypatch):
    monkeypatch.setattr(clock, "now", lambda: Counting.time)
    Counting.steps = Counting.elements = 0


@pytest.mark.parametrize(
    ("elements", "copied"),  # with a row of the last one at the least
    [(10, 1 + 11), (100, 1 + 77 + 7 * 3 + 25), (1000, 593), (1 << 20, 593)],
)
def test_time_is_scaled_by_bytes(counting, elements, copied):
    own = params((), (7, 11), (0,), (130, 3), (5, 5, 5))
    size = 4 * sum(param.numel() for param in own)
    found = optimizer_seconds(Counting(own), CPU, elements=elements)
    assert found == pytest.approx(1e-9 * size) and Counting.steps == 5
    assert Counting.elements == 5 * copied


def test_weights_are_timed_in_the_dtype_that_they_will_have(counting):
    own = params((50, 7), (9, 100))
    found = optimizer_seconds(Counting(own), CPU, dtype=torch.bfloat16, elements=400)
    assert found == pytest.approx(1e-9 * 2 * (350 + 900))
    assert all(param.dtype == torch.float32 for param in own)


def test_options_of_groups_count(counting):
    own = params((20, 3), (20, 3))
    groups = [{"params": own[:1], "factor": 5.0}, {"params": own[1:]}]
    optimizer = Counting(groups, factor=2.0)
    assert optimizer_seconds(optimizer, CPU) == pytest.approx(1e-9 * 240 * (5 + 2))


def test_only_what_is_trained_counts(counting):
    own = params((20, 3), (20, 3))
    own[0].requires_grad_(False)
    assert optimizer_seconds(Counting(own), CPU) == pytest.approx(1e-9 * 240)
    assert optimizer_seconds(Counting(own[:1]), CPU) == 0


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        headroom.optim.AdamW,
        headroom.optim.AdamW8bit,
        headroom.optim.Adafactor,
    ],
)
def test_nothing_that_is_given_changes(make):
    own = params((70, 41), (9,))
    for param in own:
        param.grad = torch.ones_like(param)
    given = make(own)
    before = [(param.clone(), param._version, param.grad) for param in own]
    generators = torch.get_rng_state(), random.getstate()
    assert optimizer_seconds(given, CPU) > 0
    for param, (value, version, grad) in zip(own, before):
        assert torch.equal(param, value) and param._version == version and param.grad is grad
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert not given.state
