"""What is measured of the first steps of a training, where something comes between."""

from types import SimpleNamespace

import pytest
import torch
from headroom.integrations.first_steps import ToldSteps
from headroom.memory import first_steps
from torch import nn


class Loop:
    """A training whose steps take a second each, by a clock of its own."""

    def __init__(self, monkeypatch):
        self.now, self.told = 0.0, []
        monkeypatch.setattr(first_steps, "time", SimpleNamespace(perf_counter=lambda: self.now))
        self.model = nn.Linear(8, 8)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        cpu = torch.device("cpu")
        fitted = SimpleNamespace(predicted_peak=1, predicted_seconds=1.0)
        tell = self.told.append
        self.steps = ToldSteps(self.model, self.optimizer, cpu, fitted, 0, 1.0, tell)

    def train(self, size=4, between=lambda: None):
        self.steps.step_began()
        loss = self.model(torch.randn(size, 8)).sum()
        between()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.now += 1.0
        self.steps.step_ended()


@pytest.fixture
def loop(monkeypatch):
    """With the peak of a training in which nothing comes between."""
    plain = Loop(monkeypatch)
    for _ in range(3):
        plain.train()
    made = Loop(monkeypatch)
    made.peak = plain.steps.peak
    yield made
    made.steps.abandon()


@pytest.mark.parametrize("raises_in", [0, 1, 2])
def test_a_step_that_raises_is_left_out(loop, raises_in):
    for k in range(3):
        if k == raises_in:
            loop.steps.step_began()
            loop.model(torch.randn(4096, 8))
            loop.steps.abandon()
            loop.now += 100.0
        loop.train()
    assert loop.steps.seconds == 1.0 and len(loop.told) == 1
    assert loop.steps.peak == loop.peak


@pytest.mark.parametrize("paused_in", [0, 1, 2])
def test_a_step_in_which_something_else_runs_is_left_out(loop, paused_in):
    """Such as an evaluation between two batches whose gradients are accumulated."""

    def evaluate():
        loop.steps.pause()
        loop.now += 100.0
        loop.model(torch.randn(4096, 8))

    for k in range(4):
        loop.train(between=evaluate if k == paused_in else lambda: None)
    assert loop.steps.seconds == 1.0 and len(loop.told) == 1
    assert loop.steps.peak == loop.peak


def test_steps_that_did_not_begin_do_not_count(loop):
    for _ in range(3):
        loop.steps.step_ended()
    assert loop.steps.peak is None and loop.steps.seconds is None
    for _ in range(3):
        loop.train()
    assert loop.steps.peak > 0 and loop.steps.seconds == 1.0
