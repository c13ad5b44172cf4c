"""Plans of optimizers whose states are on the host: the ring on the device, and what is said of the
rest."""

from functools import partial

import headroom
import pytest
import torch
from headroom.host import HostArena
from headroom.optim import AdamW, AdamW8bit
from torch import nn


def net(device="cpu"):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)).to(device)


def loss(out):
    return out.square().mean()


@pytest.mark.parametrize("has_stepped", [False, True])
@pytest.mark.parametrize("budget", [None, "5 MiB"])
@pytest.mark.parametrize("kind", [AdamW, AdamW8bit])
def test_the_device_peak_is_what_is_tracked(kind, budget, has_stepped):
    model, x = net(), torch.randn(64, 512)
    optimizer = kind(model.parameters())
    handle = headroom.optim.offload(optimizer, budget=budget, host=HostArena())

    def step():
        optimizer.zero_grad()
        loss(model(x)).backward()
        optimizer.step()

    if has_stepped:
        step()
    plan = headroom.plan(model, optimizer, x, loss=loss)
    with headroom.memory.track(model, optimizer) as tracked:
        for _ in range(2):
            step()
    assert plan.peak_bytes == pytest.approx(tracked.peak_bytes, rel=0.002)
    memory = handle.memory()
    assert plan.host_peak_bytes == memory.host
    assert handle.host.bytes == memory.host  # the plan has taken nothing


def test_copies_of_a_step_are_counted():
    model = net()
    optimizer = AdamW(model.parameters(), offload="state")
    plan = headroom.plan(model, optimizer, torch.randn(64, 512), loss=loss)
    state = sum(8 * p.numel() for p in model.parameters())
    assert plan.host_peak_bytes == pytest.approx(state, rel=0.001)
    assert plan.link_bytes == pytest.approx(2 * plan.host_peak_bytes, rel=1e-4)
    assert "on the host" in str(plan) and "optimizer state" in str(plan)


def test_on_a_device_that_is_not_there():
    make = partial(AdamW8bit, master="remainder16", offload="state")
    options = {"sample_batch": torch.randn(64, 512), "loss": loss, "device": "cuda"}
    paged = headroom.plan(net("meta"), make, **options)
    resident = headroom.plan(net("meta"), partial(make, offload=None), **options)
    assert paged.peak_bytes < resident.peak_bytes
    assert paged.host_peak_bytes > 0 == resident.host_peak_bytes
