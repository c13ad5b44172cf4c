"""adapt=True: what is measured to be left is spent, and no step takes more than the budget."""

import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest import mock

import headroom
import torch
from headroom.fitting import Choice, Fitted, FrontierPoint
from headroom.fitting.apply import fitted
from headroom.step.description import Step
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

PHASES = [(step, phase) for step in (0, 1) for phase in ("forward", "backward", "optimizer")]
LEVELS = ("L5", "L3", "L1", "L0")  # from the slowest, which takes the least
SAMPLE = torch.zeros(8, 2)


def peaks():
    return st.fixed_dictionaries({phase: st.integers(200, 1000) for phase in PHASES})


def errors():
    return st.fixed_dictionaries({phase: st.integers(-150, 150) for phase in PHASES})


def choice_of(level):
    return Choice((level,), 1, "torch")


def plan_of(peaks, rounding=7, context=30):
    peak = max(peaks.values())
    first, steady = (max(b for (of, _), b in peaks.items() if of == step) for step in (0, 1))
    return SimpleNamespace(
        first_step=first,
        steady=steady,
        timeline=SimpleNamespace(peaks=lambda: peaks),
        peak_bytes=peak,
        allocated_bytes=peak + rounding,
        total_bytes=peak + rounding + context,
    )


@dataclasses.dataclass
class Device:
    """Runs steps, of which each phase takes what was planned, and something more or less."""

    plans: dict
    errors: dict
    tenths: int = 10
    fitted: Any = None
    totals: list = dataclasses.field(default_factory=list)
    steps: int = 0

    def train(self, step, parts):
        plan = self.plans[self.fitted.choice.levels[0]]
        number, self.steps = min(self.steps, 1), self.steps + 1
        most = max(
            -(-self.tenths * (bytes + self.errors[phase]) // 10)
            for phase, bytes in plan.timeline.peaks().items()
            if phase[0] == number
        )
        most = most * len(parts[0]) // len(SAMPLE)  # a smaller batch takes less
        self.allocated = most + plan.allocated_bytes - plan.peak_bytes
        self.totals.append(self.allocated + plan.total_bytes - plan.allocated_bytes)
        return torch.zeros(())

    def set_levels(self, levels):
        pass


class Measured:
    """Counts the bytes of the first two steps of a device."""

    def __init__(self, model, device, where):
        self.device, self.count, self.peak, self.seconds = device, 0, None, None

    def step_began(self, batch):
        pass

    def step_ended(self):
        self.count += 1
        if self.count <= 2:
            self.peak = max(self.device.allocated, self.peak or 0)

    pause = abandon = lambda self: None


def fitted_to(device, within):
    points = [
        FrontierPoint(plan.total_bytes, 9.0 - k, choice_of(level))
        for k, (level, plan) in enumerate(device.plans.items())
    ]
    first = points[0]
    with mock.patch.object(fitted, "FirstSteps", Measured):
        device.fitted = Fitted(
            model=nn.Linear(1, 1),
            optimizer=device,
            choice=first.choice,
            budget=within,
            plan=device.plans[LEVELS[0]],
            predicted_peak=first.peak,
            predicted_seconds=first.seconds,
            blocks=["block"],
            reachable=sorted(points, key=lambda point: point.peak),
            within=within,
            _planner=lambda choice: device.plans[choice.levels[0]],
            _step=Step(nn.Linear(1, 1), None, None, device=torch.device("cpu")),
            _applied=device,
            _sample_bytes=SAMPLE.nbytes,
        )
    return device.fitted


def train(found, batches):
    with (
        mock.patch.object(fitted, "FirstSteps", Measured),
        mock.patch.object(fitted, "train", found.optimizer.train),
    ):
        for size in batches:
            found.step(SAMPLE[:size])


@settings(derandomize=True, deadline=None, database=None)
@given(
    tables=st.lists(peaks(), min_size=4, max_size=4),
    errors=errors(),
    tenths=st.sampled_from([8, 10]),
    room=st.integers(0, 300),
    early=st.integers(0, 2),
    sizes=st.lists(st.sampled_from([4, 8, 8, 8]), min_size=6, max_size=6),
)
def test_no_step_takes_more_than_the_budget(tables, errors, tenths, room, early, sizes):
    """Whatever is wrong with the plans, as long as it is wrong in the same way for all levels."""
    if tenths != 10:
        errors = dict.fromkeys(errors, 0)
    plans = {level: plan_of(table) for level, table in zip(LEVELS, tables)}
    device = Device(plans, errors, tenths, steps=early)
    # The first levels are within the budget, in their first step too.
    whole = Device(plans, errors, tenths)
    train(fitted_to(whole, 0), [8, 8])
    within = max(whole.totals) + room
    train(fitted_to(device, within), [*sizes, 8, 8, 8, 8])
    assert max(device.totals) <= within


def test_what_is_left_is_spent():
    """Plans that say too much leave room for faster levels."""
    tables = {level: dict.fromkeys(PHASES, 600 + 100 * k) for k, level in enumerate(LEVELS)}
    plans = {level: plan_of(table) for level, table in tables.items()}
    device = Device(plans, dict.fromkeys(PHASES, -250))
    found = fitted_to(device, 700)
    train(found, [8, 8])
    assert found.choice.levels == ("L5",)
    train(found, [8])
    assert found.choice.levels == ("L0",) and found.predicted_seconds == 6.0
    train(found, [8, 8, 8])
    assert max(device.totals) == 900 - 250 + 37 <= 700


def test_another_phase_may_have_the_next_peak():
    """The plan of the backward pass says too much, and that of the optimizer is right."""
    tables = {
        level: {phase: 800 if phase[1] == "backward" else 590 + 200 * (k > 0) for phase in PHASES}
        for k, level in enumerate(LEVELS)
    }
    errors = {phase: -200 if phase[1] == "backward" else 0 for phase in PHASES}
    device = Device({level: plan_of(table) for level, table in tables.items()}, errors)
    found = fitted_to(device, 700)
    train(found, [8] * 6)
    assert found.choice.levels == ("L5",) and max(device.totals) == 600 + 37


def test_smaller_batches_say_nothing():
    plans = {level: plan_of(dict.fromkeys(PHASES, 600)) for level in LEVELS}
    found = fitted_to(Device(plans, dict.fromkeys(PHASES, 0)), 10_000)
    train(found, [4, 4, 8, 8])
    assert found.choice.levels == ("L5",)


def test_the_batch_that_was_planned_is_the_measure():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    batch = torch.zeros(6, 4), torch.zeros(6, dtype=torch.long)
    found = headroom.fit(model, batch, budget="1 GiB", loss=nn.functional.cross_entropy)
    assert found._sample_bytes == 6 * 4 * 4 + 6 * 8
