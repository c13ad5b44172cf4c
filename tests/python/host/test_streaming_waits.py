"""Each wait of weights that stream is needed: without it, an engine of a device that lags gives
other bits, or sees memory that is used too early."""

import gc
import weakref

import headroom
import pytest
import torch
from headroom.host import streaming
from headroom.host.engine import Inline
from headroom.host.streaming import call, gradients, slots
from headroom.patching.streaming import STREAM
from torch import nn
from torch.nn import functional as F

from helpers.lagging_engine import Lagging
from helpers.rewritten import rewritten

WAITS = {  # the class, the method, what it says, and what it says without the wait
    "weights have arrived before they are used": (
        *(streaming.Stream, "slot"),
        *("slot.wait()", "pass"),
    ),
    "memory is free before weights come to it": (
        *(slots.Slot, "__init__"),
        *("after=(ready,)", "after=()"),
    ),
    "weights have been read before a call returns": (
        *(call.Call, "lent"),
        *("slot.sync()", "pass"),
    ),
    "weights have been read for who looks into a graph": (
        *(call.Token, "tensor"),
        *("stream.settle()", "pass"),
    ),
    "weights have been read when a backward pass ends": (
        *(streaming.Stream, "settle"),
        *("slot.sync()", "pass"),
    ),
    "gradients have been computed before they go down": (
        *(gradients.Way, "down"),
        *("after=(computed,)", "after=()"),
    ),
    "gradients have gone down before they are freed": (
        *(gradients.Arrival, "leave"),
        *("self._engine.wait(self._ticket)", "pass"),
    ),
    "gradients have arrived before they are used": (
        *(gradients.Way, "arrive"),
        *("self._arrival.sync()", "pass"),
    ),
    "gradients of a pass that raised are not held any longer": (
        *(streaming.Stream, "slot"),
        *("self.settle_gradients()", "pass"),
    ),
    "copies have ended before weights move": (
        *(streaming.StreamedBlock, "_adopt"),
        *("self.stream.settle()", "pass"),
    ),
    "weights that nobody used have arrived before a slot is freed": (
        *(slots.Slot, "__del__"),
        *("self.sync()", "pass"),
    ),
    "copies of a pass that raised have ended before weights go back": (
        *(streaming.Stream, "free"),
        *("self.settle()", "pass"),
    ),
}


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 20), nn.Linear(20, 8)

    def forward(self, x):
        return x + self.second(F.gelu(self.first(x)))


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Part() for _ in range(4))
        self.order = range(4)

    def forward(self, x):
        for k in self.order:
            x = self.blocks[k](x)
        return x


def tower(weights="host"):
    model = Tower()
    headroom.patch(model, weights=weights, norms=False)
    return model


def x():
    return torch.randn((5, 8), generator=torch.Generator().manual_seed(2))


def write(model):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)


def trains(engine):
    """Steps, of which the second adds to gradients."""
    results = []
    for weights in (None, "host"):
        model = tower(weights)
        for step in range(3):
            for _ in range(1 + step % 2):
                model(x()).square().sum().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(p.grad, alpha=-0.01)
            model.zero_grad()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *results))


def is_written_after_a_call(engine):
    model = tower()
    with torch.no_grad():
        model(x())
    write(model)


def is_written_after_a_part_of_a_backward_pass(engine):
    """The weights of the blocks in front are prefetched, and not used."""
    model = tower()
    model.blocks[:2].requires_grad_(False)
    model(x()).sum().backward()
    write(model)


def is_looked_into(engine):
    model = tower()
    out = model(x())
    node = out.grad_fn  # the sum of the last block
    while not hasattr(node, "_saved_mat2"):
        node = next(below for below, _ in node.next_functions[::-1] if below is not None)
    stream_of(model)._loaded.clear()
    assert node._saved_mat2.shape == (20, 8)
    write(model)


def is_left_half_way(engine):
    """A backward pass raises while gradients are on their way."""
    model = tower()
    raises(model, 1)
    with torch.no_grad():
        model(x())
    assert not stream_of(model)._arrivals


def raises(model, block):
    def fail(*_):
        raise KeyboardInterrupt

    handle = model.blocks[block].second.register_full_backward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model(x()).sum().backward()
    handle.remove()


def goes_back_half_way(engine):
    model = tower()
    raises(model, 0)  # nothing is prefetched then, whose end would be waited for
    headroom.unpatch(model)
    gc.collect()


def moves(engine):
    """Weights that are cast while a block that was not called is prefetched."""
    model = tower()
    model.order = range(2)
    with torch.no_grad():
        model(x())
    model.double()


def goes_back(engine):
    model = tower()
    model.order = range(2)
    model(x())
    headroom.unpatch(model)
    gc.collect()


def is_freed(engine):
    model = tower()
    model.order = range(2)
    model(x())
    block = weakref.ref(model.blocks[2])
    del model
    gc.collect()
    assert block() is None


def stream_of(model):
    return vars(model.blocks[0])[STREAM].stream


SCENARIOS = (
    trains,
    is_written_after_a_call,
    is_written_after_a_part_of_a_backward_pass,
    is_looked_into,
    is_left_half_way,
    goes_back_half_way,
    moves,
    goes_back,
    is_freed,
)
POLICIES = (None, 1, 2)  # as late as it may be, and seeds


def run(scenario, policy):
    engine = Lagging(policy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming.Stream, "engine_of", staticmethod(lambda device: engine))
        scenario(engine)
        gc.collect()
        engine.finish()
    assert engine.errors == []


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_with_all_waits(scenario, policy):
    run(scenario, policy)


@pytest.mark.slow
@pytest.mark.parametrize("wait", WAITS)
def test_without_one(wait):
    with pytest.MonkeyPatch.context() as patch:
        rewritten(patch, *WAITS[wait])
        for scenario in SCENARIOS:
            for policy in POLICIES[:2]:
                try:
                    run(scenario, policy)
                except (AssertionError, RuntimeError):
                    return
    pytest.fail("no scenario notices")


def test_gradients_are_freed_by_the_thread_that_computes():
    """Not when the host has waited for them: what is reserved would depend on the moment."""
    stream, grad = streaming.Stream(headroom.HostArena(), 1), torch.ones(3)
    seen, engine = weakref.ref(grad), Inline()
    stream.add(arrival := gradients.Arrival(engine, None, [grad]))
    del grad
    arrival.sync()
    assert seen() is not None
    stream.add(last := gradients.Arrival(engine, None, []))
    assert seen() is None and stream._arrivals == [last]
    stream.settle_gradients()
    assert last.is_there and not stream._arrivals
