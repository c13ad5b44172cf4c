"""Optimizer steps under the profiler, inference mode and dispatch modes."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.compiled import (
    assert_same_run,
    pair,
    set_grads,
)
from helpers.samples import run, sample


def test_profiler_shows_the_step_and_the_op():
    (params, optimizer), _ = pair()
    set_grads(params, seed=0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
        optimizer.step()
        run(sample())
    (record,) = [e for e in profile.key_averages() if e.key == "Optimizer.step#AdamW.step"]
    assert record.count == 2
    ours = {e.key: e.count for e in profile.key_averages() if e.key.startswith("headroom::")}
    assert ours == {"headroom::_adamw_table_": 2, "headroom::adamw_": 1}
    inside = [e for e in profile.events() if e.name == "headroom::_adamw_table_"]
    assert all(e.cpu_parent.name == "Optimizer.step#AdamW.step" for e in inside)


def test_inference_mode():
    """As torch: parameters may be stepped in inference mode. States made there are inference
    tensors, which torch then refuses to step outside; here the step goes on."""
    eager, other = pair()
    theirs = pair(torch.optim.AdamW)[0]
    set_grads(eager[0], other[0], theirs[0], seed=0)
    with torch.inference_mode():
        other[1].step()
        theirs[1].step()
    eager[1].step()
    assert_same_run(eager, other)
    assert other[1].state[other[0][0]]["exp_avg"].is_inference()
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        theirs[1].step()
    eager[1].step()
    other[1].step()
    assert_same_run(eager, other)


def test_inference_mode_between_steps():
    eager, other = pair()
    for k in range(3):
        set_grads(eager[0], other[0], seed=k)
        eager[1].step()
        with torch.inference_mode(k == 1):
            other[1].step()
        assert_same_run(eager, other)
    assert [p._version for p in other[0]] == [p._version for p in eager[0]]


class Log(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls.append((str(function), args))
        return function(*args, **(kwargs or {}))


def test_dispatch_modes_see_every_tensor():
    """Memory trackers and flop counters work on such modes: the op they see must hand over the
    states, not their addresses."""
    eager, logged = pair()
    for k in range(4):
        set_grads(eager[0], logged[0], seed=k)
        eager[1].step()
        with Log() as log:
            logged[1].step()
        ((_, args),) = [call for call in log.calls if call[0].startswith("headroom")]
        states = logged[1].state[logged[0][0]]
        assert args[2][0] is states["exp_avg"] and args[5][0] is states["step"]
        assert log.calls[-2][0] == "headroom.adamw_.default" or k == 0
        assert_same_run(eager, logged)
    set_grads(eager[0], logged[0], seed=9)
    eager[1].step()
    logged[1].step()
    assert_same_run(eager, logged)
