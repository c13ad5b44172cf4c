"""Which modules are heard while they run, and by which name."""

import warnings

import pytest
import torch
from headroom._core.running_modules import watching_modules
from torch import nn


class Calls:
    def __init__(self):
        self.seen = []

    def begin(self, name):
        self.seen.append(name)

    def end(self):
        self.seen.append(None)


def model():
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh()))


@pytest.mark.parametrize("named", [True, False], ids=["names", "classes"])
def test_modules_are_heard_in_their_order(named):
    net, calls = model(), Calls()
    other = nn.Tanh()
    x = torch.ones(1, 2)
    with watching_modules(net if named else None, calls.begin, calls.end):
        net(other(x))
    net(x)  # no longer
    if named:
        assert calls.seen == ["", "0", None, "1", "1.0", None, None, None]
    else:
        inner = ["Linear", None, "Sequential", "Tanh", None, None]
        assert calls.seen == ["Tanh", None, "Sequential", *inner, None]


def test_a_module_that_raises_ends_too():
    net, calls = model(), Calls()
    with watching_modules(net, calls.begin, calls.end), pytest.raises(RuntimeError):
        net(torch.ones(1, 3))
    assert calls.seen == ["", "0", None, None]


def test_hooks_are_wrapped_and_compiled_modules_named():
    net, calls, wrapped = model(), Calls(), []

    def hidden(hook):
        wrapped.append(hook)
        return hook

    compiled = torch.compile(net[1], backend="eager")
    with watching_modules(net, calls.begin, calls.end, hidden), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that global hooks run for the compiled module too
        compiled(torch.ones(1, 2))
    assert len(wrapped) == 2 and calls.seen == ["1", None]
