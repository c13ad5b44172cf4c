"""The op headroom::update_scale_ against torch's rule and against a model of ten lines."""

import math
import random

import headroom
import numpy as np
import pytest
import torch

from helpers.bits import bits

MAX = float(np.finfo(np.float32).max)


def scalar(value, device="cpu", dtype=torch.float32):
    return torch.tensor(value, dtype=dtype, device=device)


class State:
    """What the op updates."""

    def __init__(self, scale=2.0**16, growth=0, patience=1, device="cpu"):
        self.scale = scalar(scale, device)
        self.growth = scalar(growth, device, torch.int32)
        self.patience = scalar(patience, device, torch.int32)

    def update(self, found_inf, **options):
        found = scalar(found_inf, self.scale.device)
        headroom.functional.update_scale_(
            self.scale, self.growth, found, hysteresis_tracker=self.patience, **options
        )

    def values(self):
        return self.scale.item(), self.growth.item(), self.patience.item()


def model(state, found, growth_factor, backoff_factor, interval, low, high, hysteresis):
    """The rule of headroom.h in Python."""
    scale, growth, patience = state
    if found:
        growth, patience = 0, patience - 1
        if patience <= 0:
            scale = float(np.float32(max(scale * backoff_factor, low)))
        return scale, growth, patience
    growth += 1
    if growth == interval:
        growth, patience = 0, hysteresis
        if min(scale * growth_factor, high) <= MAX:
            scale = float(np.float32(min(scale * growth_factor, high)))
    return scale, growth, patience


# ---- Registration --------------------------------------------------------------------------------


def test_opcheck(device):
    one, tracker = scalar(4.0, device), scalar(3, device, torch.int32)
    for found in (0.0, 1.0):
        for patience in (None, scalar(2, device, torch.int32)):
            torch.library.opcheck(
                torch.ops.headroom.update_scale_.default,
                (one.clone(), tracker.clone(), patience, scalar(found, device)),
                {"growth_interval": 4, "hysteresis": 1 if patience is None else 2},
            )


def test_what_is_written_grows_a_version(device):
    state, found = State(device=device), scalar(0.0, device)
    tensors = (state.scale, state.growth, state.patience, found)
    before = [t._version for t in tensors]
    headroom.functional.update_scale_(*tensors[:2], found, hysteresis_tracker=state.patience)
    assert [t._version > v for t, v in zip(tensors, before)] == [True, True, True, False]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_whole(backend, device):
    torch._dynamo.reset()
    state = State(device=device)
    step = torch.compile(lambda: state.update(1.0), backend=backend, fullgraph=True)
    step()
    assert state.values() == (2.0**15, 0, 0)


def test_profiler_knows_the_name():
    with torch.profiler.profile() as profile:
        State().update(0.0)
    assert "headroom::update_scale_" in {event.key for event in profile.key_averages()}


# ---- The rule ------------------------------------------------------------------------------------


@pytest.mark.parametrize("growth, backoff", [(2.0, 0.5), (1.1, 0.7), (math.pi, 1 / 3)])
def test_torchs_bits_over_10_000_random_steps(growth, backoff):
    """From the largest scales to the denormal ones, where torch's scale reaches 0."""
    choose = random.Random(0)
    state, torchs = State(), State()
    for step in range(10_000):
        rate = (0.02, 0.9, 0.5)[step // 500 % 3]  # mostly growing, mostly falling, both
        found = float(choose.random() < rate)
        state.update(found, growth_factor=growth, backoff_factor=backoff, growth_interval=3)
        torch._amp_update_scale_(torchs.scale, torchs.growth, scalar(found), growth, backoff, 3)
        assert state.values()[:2] == torchs.values()[:2], step


BOUNDS = {
    "defaults": {},
    "minimum": {"low": 128.0},
    "maximum": {"high": 1e6},
    "both, not powers of 2": {"low": 0.1, "high": 3e5},
    "hysteresis": {"hysteresis": 3},
    "all": {"low": 1e-3, "high": 1e4, "hysteresis": 2, "interval": 1},
    "factors": {"growth_factor": 1.3, "backoff_factor": 0.9, "hysteresis": 4},
}


@pytest.mark.parametrize("options", BOUNDS.values(), ids=BOUNDS)
def test_bounds_and_hysteresis_against_the_model(options, device):
    choose = random.Random(1)
    o = dict(
        growth_factor=2.0, backoff_factor=0.5, interval=2, low=0.0, high=math.inf, hysteresis=1
    )
    o |= options
    names = {"interval": "growth_interval", "low": "min_scale", "high": "max_scale"}
    state = State(1024.0, patience=o["hysteresis"], device=device)
    want, seen = state.values(), set()
    for step in range(2000):
        found = choose.random() < (0.9 if step % 100 < 30 else 0.02)
        state.update(float(found), **{names.get(k, k): v for k, v in o.items()})
        want = model(want, found, **o)
        assert state.values() == want, step
        seen.add(want[0])
    for bound in ("low", "high"):
        if bound in options:
            assert float(np.float32(options[bound])) in seen  # it was reached


@pytest.mark.parametrize("flag", [1.0, -1.0, 2.0, math.inf, math.nan, 1e-45])
def test_any_flag_but_zero_is_an_overflow(flag, device):
    state = State(device=device)
    state.update(flag)
    assert state.values()[:2] == (2.0**15, 0)


def test_growth_stops_below_infinity(device):
    state = State(2.0**125, device=device)
    for _ in range(10):
        state.update(0.0, growth_interval=1)
    assert state.scale == 2.0**127 and state.growth == 0


def test_a_minimum_keeps_the_scale_above_zero(device):
    bounded, unbounded = State(device=device), State(device=device)
    for _ in range(200):
        bounded.update(1.0, min_scale=2.0**-126)
        unbounded.update(1.0)
    assert bounded.scale == 2.0**-126 and unbounded.scale == 0


def test_without_a_hysteresis_tracker(device):
    scale, growth = scalar(8.0, device), scalar(5, device, torch.int32)
    headroom.functional.update_scale_(scale, growth, scalar(1.0, device))
    assert scale == 4 and growth == 0


# ---- Bad inputs ----------------------------------------------------------------------------------

CASES = {
    "growth_factor 1": ({"growth_factor": 1.0}, "growth_factor is 1"),
    "growth_factor NaN": ({"growth_factor": math.nan}, "growth_factor"),
    "backoff_factor 1": ({"backoff_factor": 1.0}, "backoff_factor is 1"),
    "backoff_factor 0": ({"backoff_factor": 0.0}, "backoff_factor is 0"),
    "growth_interval 0": ({"growth_interval": 0}, "growth_interval is 0"),
    "growth_interval 2^31": ({"growth_interval": 2**31}, "below 2\\^31"),
    "min_scale < 0": ({"min_scale": -1.0}, "min_scale is -1"),
    "min_scale > max_scale": ({"min_scale": 4.0, "max_scale": 2.0}, "min_scale is 4"),
    "max_scale NaN": ({"max_scale": math.nan}, "max_scale"),
    "hysteresis 0": ({"hysteresis": 0}, "hysteresis is 0"),
    "no tracker": ({"hysteresis": 2, "hysteresis_tracker": None}, "hysteresis_tracker is NULL"),
    "int64 tracker": ({"growth_tracker": torch.tensor(0)}, "growth_tracker must be an int32"),
    "two scales": ({"scale": torch.ones(2)}, "scale must be a float32 tensor of one element"),
    "float64 flag": ({"found_inf": torch.ones((), dtype=torch.float64)}, "found_inf must be"),
}


@pytest.mark.parametrize("spoiled, message", CASES.values(), ids=CASES)
def test_bad_inputs_change_no_byte(spoiled, message):
    options = {
        "scale": scalar(4.0),
        "growth_tracker": scalar(3, dtype=torch.int32),
        "hysteresis_tracker": scalar(1, dtype=torch.int32),
        "found_inf": scalar(1.0),
    }
    options |= spoiled
    tensors = [t for t in options.values() if isinstance(t, torch.Tensor)]
    before = [bits(t).clone() for t in tensors]
    with pytest.raises(RuntimeError, match=message):
        headroom.functional.update_scale_(**options)
    assert all(torch.equal(bits(t), b) for t, b in zip(tensors, before))
