"""Every wait of what moves between host and device, taken away: the device must notice.

A scenario is trained once to find the places that wait, and once more for each of them, with that
wait, or that condition of a copy, left out. What is noticed is a report of accesses in no order,
another result, or an error.
"""

import os
import sys

import headroom
import pytest
import torch
from headroom.host.cuda import Streams
from torch import nn

from helpers.dropping import transformer
from helpers.slow_host import slow_host

pytestmark = pytest.mark.cuda
STEPS = 3

# Waits without which nothing goes wrong in these scenarios, and why.
NEEDLESS = {
    # The host has waited for the gradients, which come after all that reads the weights, and it
    # writes the states itself.
    "steps_on_the_host": {"copy up of pipeline.py:_commit", "sync of ring.py:wait"},
    # The same, and the host has waited for the scalars, which come after the gradients.
    "waiting_gradients": {
        "copy up of pipeline.py:_commit",
        "sync of ring.py:wait",
        "sync of pipeline.py:_stepped",
    },
    # finish() reads the sums by copies that come after those that wrote them.
    "gradients": {"sync of ring.py:wait"},
}


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(48, 48), nn.Tanh()) for _ in range(6)))


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 48, generator=generator) for _ in range(STEPS)]


def trained(net, optimizer, device, inputs=None):
    """Returns the parameters after a few steps, and the states, which are read first."""
    for x in inputs or (x.to(device) for x in batches()):
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return read(optimizer, net)


def read(optimizer, net):
    """Copies what the optimizer keeps, as whoever saves it does, and the weights."""
    states = optimizer.state_dict()["state"]
    found = [v for _, state in sorted(states.items()) for v in state.values()]
    found = [v for v in found if isinstance(v, torch.Tensor)]
    return [t.detach().cpu().clone() for t in [*found, *net.parameters()]]


def states(device):
    net = model().to(device)
    return trained(net, headroom.optim.AdamW(net.parameters(), lr=1e-2, offload="state"), device)


def steps_on_the_host(device):
    net = model().to(device)
    return trained(net, headroom.optim.AdamW8bit(net.parameters(), lr=1e-2, offload="step"), device)


def waiting_gradients(device):
    """Steps on the host that clip, with gradients that wait there."""
    net = model().to(device)
    optimizer = headroom.optim.AdamW8bit(
        net.parameters(), lr=1e-2, max_grad_norm=0.1, offload="step"
    )
    if device == "cuda":
        headroom.release_gradients(net, optimizer, bucket_bytes=4096)
    return trained(net, optimizer, device)


def saved_tensors(device):
    net = transformer("L0@host").to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-1)
    for _ in range(STEPS):
        ids = torch.arange(8 * 32, device=device).view(8, 32) % 50
        net(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return read(optimizer, net)


def weights(device):
    net = model().to(device)
    optimizer = headroom.optim.AdamW(net.parameters(), lr=1e-2, offload="step")
    headroom.patch(net, weights="host")
    found = trained(net, optimizer, device)
    with torch.no_grad():
        evaluated = net(torch.ones(8, 48, device=device))
        for p in net.parameters():  # which the host may write as soon as the model has returned
            p.fill_(0.25)
    return [*found, evaluated.cpu()]


def gradients(device):
    net = model().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-1)
    accumulator = headroom.GradAccumulator(net, host=True)
    for x in batches():
        for part in x.to(device).chunk(4):
            with accumulator.micro_batch():
                net(part).square().mean().backward()
        accumulator.finish()
        optimizer.step()
        optimizer.zero_grad()
    return read(optimizer, net)


class Reusing:
    """A loader that uses the memory of a batch again as soon as it may."""

    def __len__(self):
        return STEPS

    def __iter__(self):
        memory = [torch.empty_like(x, pin_memory=True) for x in batches()[:2]]
        for number, x in enumerate(batches()):
            yield memory[number % 2].copy_(x)


def prefetched(device):
    net = model().to(device)
    inputs = headroom.data.DevicePrefetcher(Reusing(), device)
    return trained(net, torch.optim.SGD(net.parameters(), lr=1e-1), device, inputs)


SCENARIOS = [
    states,
    steps_on_the_host,
    waiting_gradients,
    saved_tensors,
    weights,
    gradients,
    prefetched,
]


class Waits:
    """Stands before the waits of the copy engine, and leaves one of them out."""

    def __init__(self, monkeypatch):
        self.places, self.left_out = set(), None
        # A host that is always ahead of the device's thread of a backward pass would wait in place
        # of the device, whose own wait would then not be missed.
        slow_host(monkeypatch)
        for kind in ("wait", "sync"):
            monkeypatch.setattr(Streams, kind, self._waiting(kind, getattr(Streams, kind)))
        copy = Streams._copy

        def copied(engine, queue, target, source, after):
            after = list(after)
            if after and self._place(f"copy {queue}") == self.left_out:
                after = []
            return copy(engine, queue, target, source, after)

        monkeypatch.setattr(Streams, "_copy", copied)

    def _waiting(self, kind, real):
        def waits(engine, ticket):
            if self._place(kind) != self.left_out:
                real(engine, ticket)

        return waits

    def _place(self, kind):
        """Returns what waits: the first line outside the engine, and notes it."""
        frame = sys._getframe(2)
        while os.path.basename(frame.f_code.co_filename) in ("cuda.py", "engine.py"):
            frame = frame.f_back
        code = frame.f_code
        place = f"{kind} of {os.path.basename(code.co_filename)}:{code.co_name}"
        self.places.add(place)
        return place


def noticed(train, expected, unordered):
    try:
        result = train("cuda")
        torch.cuda.synchronize()
    except Exception:
        unordered()
        return True
    same = all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    return bool(unordered()) or not same


@pytest.mark.parametrize("train", SCENARIOS)
def test_a_wait_that_is_left_out_is_noticed(train, monkeypatch, unordered):
    on_cpu, expected = train("cpu"), train("cuda")
    torch.testing.assert_close(expected, on_cpu)
    waits = Waits(monkeypatch)
    assert not noticed(train, expected, unordered)
    places = sorted(waits.places - NEEDLESS.get(train.__name__, set()))
    unnoticed = []
    assert places
    for waits.left_out in places:
        if not noticed(train, expected, unordered):
            unnoticed.append(waits.left_out)
    assert unnoticed == []
