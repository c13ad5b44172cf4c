"""The first two steps of a training are measured, and later ones are timed."""

import types

import pytest
import torch
from headroom.memory import first_steps, track
from headroom.memory.first_steps import FirstSteps
from torch import nn

ROWS, WIDTH = 9, 33


class Training:
    """Steps of a small model, on a clock that stands still unless a test moves it."""

    def __init__(self, monkeypatch, **options):
        torch.manual_seed(0)
        self.model = nn.Linear(WIDTH, WIDTH)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.now = 100.0
        clock = types.SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(first_steps, "time", clock)
        self.measured = FirstSteps(self.model, self.optimizer, torch.device("cpu"), **options)

    def step(self, rows=ROWS):
        self.model(torch.ones(rows, WIDTH)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def whole(self, seconds=0.0, rows=ROWS):
        self.measured.step_began()
        self.step(rows)
        self.now += seconds
        self.measured.step_ended()


def peak_of(monkeypatch, *rows):
    training = Training(monkeypatch)
    with track(training.model, training.optimizer) as tracked:
        for each in rows:
            training.step(each)
    return tracked.peak_bytes


def test_two_steps_are_measured_and_later_ones_timed(monkeypatch):
    for _ in range(2):  # the first steps of a process allocate more
        wanted = peak_of(monkeypatch, ROWS, ROWS)
    training = Training(monkeypatch)
    measured = training.measured
    for count in range(1, 3):
        assert measured.peak is None
        training.whole(50)
        assert measured.count == count and measured.seconds is None
    assert measured.peak == wanted and not torch._C._autograd._profiler_enabled()
    for seconds, median in ((4, 4), (1, 2.5), (2, 2)):
        training.whole(seconds)
        assert measured.seconds == median
    for seconds in range(64):
        training.whole(100 + seconds)
    assert measured.seconds == 100 + 31.5  # of the latest 64
    assert measured.count == 69 and measured.peak == wanted


def test_a_batch_that_was_there_before_counts(monkeypatch):
    peaks = []
    for batch in (None, torch.ones(1000)):
        training = Training(monkeypatch)
        for _ in range(2):
            training.measured.step_began(batch)
            training.measured.step_began(None)  # within a step
            training.step()
            training.measured.step_ended()
        peaks.append(training.measured.peak)
    assert peaks[1] - peaks[0] == 4000


def test_something_between_two_steps(monkeypatch):
    """The peak is the larger of two recordings."""
    training = Training(monkeypatch)
    measured = training.measured
    measured.pause()
    assert measured.peak is None
    training.whole(rows=5 * ROWS)
    measured.pause()
    first = measured.peak
    assert not torch._C._autograd._profiler_enabled()
    training.step(50 * ROWS)  # nobody looks
    training.whole(rows=ROWS)
    assert 4 * 5 * ROWS * WIDTH < first <= measured.peak < 4 * 50 * ROWS * WIDTH
    assert measured.count == 2
    training.whole(3)
    training.measured.step_began()
    training.now += 1000
    measured.pause()  # an evaluation within a step, which is not timed then
    training.measured.step_ended()
    assert measured.seconds == 3 and measured.count == 3
    measured.step_ended()  # without a beginning
    assert measured.count == 3


def test_a_step_that_raises_is_left_out(monkeypatch):
    training = Training(monkeypatch)
    measured = training.measured
    training.whole()
    measured.step_began()
    measured.abandon()
    assert not torch._C._autograd._profiler_enabled() and measured.peak is None
    assert measured.count == 1
    training.whole()
    assert measured.count == 2 and measured.peak > 0


@pytest.mark.parametrize("how", ["not asked for", "a profiler", "a track"])
def test_nothing_is_measured(how, monkeypatch):
    training = Training(monkeypatch, records=how != "not asked for")
    if how == "a profiler":
        with torch.profiler.profile():
            training.whole(), training.whole()
    elif how == "a track":
        with track(training.model):
            training.whole(), training.whole()
    else:
        training.whole(), training.whole()
    assert training.measured.peak is None and training.measured.count == 2
    training.whole(7)
    assert training.measured.seconds == 7


def test_on_cuda_what_a_budget_bounds_is_measured(monkeypatch):
    """A prediction is of all that the process takes: what the allocator has reserved, and the
    context. What the first step leaves in the allocator is there in the second, as planned."""
    calls = []
    fake = types.SimpleNamespace(
        synchronize=lambda device: None,
        empty_cache=lambda: calls.append("empty_cache"),
        reset_peak_memory_stats=lambda device: calls.append("reset"),
        max_memory_reserved=lambda device: 1000,
        max_memory_allocated=lambda device: 700,
    )
    monkeypatch.setattr(torch, "cuda", fake)
    model = nn.Linear(3, 3)
    measured = FirstSteps(model, None, torch.device("cuda"), context=400)
    for _ in range(2):
        measured.step_began()
        measured.step_ended()
        measured.pause()
    assert measured.peak == 1400 and calls == ["empty_cache", "reset", "reset"]
