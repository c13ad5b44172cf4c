"""Plans of optimizers that are stepped on the host: against steps on tensors of the CPU that stand
for those of a device."""

from functools import partial

import headroom
import pytest
import torch
from headroom.host import HostArena
from headroom.host.engine import Inline
from headroom.optim import AdamW, AdamW8bit, SGD8bit
from headroom.param_states.paging.hosted import Hosting
from torch import nn


class Counting(Inline):
    """The engine of a device that is not there."""


def net(device="cpu", dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
    return model.to(device, dtype)


def loss(out):
    return out.float().square().mean()


def hosted(optimizer, bucket_bytes=None):
    """Steps an optimizer on the host as if its parameters were on a device."""
    paging = Hosting(HostArena(), None, bucket_bytes)
    paging.adopt(optimizer)
    optimizer._paging = paging
    return paging


@pytest.fixture
def engine(monkeypatch):
    made = Counting()
    monkeypatch.setattr(Hosting, "engine_of", lambda self, device: made)
    return made


OPTIMIZERS = {
    "AdamW": AdamW,
    "AdamW8bit": AdamW8bit,
    "remainders": partial(AdamW8bit, master="remainder16"),
    "SGD8bit": partial(SGD8bit, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("bucket_bytes", [None, 100_000])
@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_plan_says_what_a_step_takes(name, clip, release, bucket_bytes, engine):
    """The device's peak, the arena's, and the bytes of the copies."""
    model = net(dtype=torch.bfloat16 if name == "remainders" else torch.float32)
    x = torch.randn(64, 512).to(model[0].weight.dtype)
    optimizer = OPTIMIZERS[name](
        model.parameters(), **({} if clip is None else {"max_grad_norm": clip})
    )
    paging = hosted(optimizer, bucket_bytes)
    plan = headroom.plan(model, optimizer, x, loss=loss, release=release)
    if release:
        headroom.release_gradients(model, optimizer)

    def step():
        loss(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()

    with headroom.memory.track(model, optimizer) as tracked:
        step()
        before = engine.bytes_up + engine.bytes_down
        step()
    assert plan.link_bytes == engine.bytes_up + engine.bytes_down - before
    assert plan.host_peak_bytes == paging.arena.peak
    assert plan.peak_bytes == pytest.approx(tracked.peak_bytes, rel=0.002)
    assert sum(paging.memory(optimizer)) <= paging.arena.peak
