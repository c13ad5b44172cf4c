"""Plans of optimizers whose states are on the host: the ring on the device, and what is said of the
rest."""

from functools import partial

import headroom
import pytest
import torch
from headroom.host import HostArena
from headroom.host.engines import engine_of
from headroom.optim import AdamW, AdamW8bit
from headroom.param_states.paging import planned_paging
from headroom.planning.recorder import Recorder
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


@pytest.mark.parametrize("bucket_bytes", [None, 70_000, 1 << 24])
@pytest.mark.parametrize("kind", [AdamW, AdamW8bit])
def test_copies_are_those_of_a_step(kind, bucket_bytes):
    """Of whole states, of parts, and of the counts of steps, which go up with each part."""
    model, x = net(), torch.randn(8, 512)
    optimizer = kind(model.parameters())
    headroom.optim.offload(optimizer, host=HostArena(), bucket_bytes=bucket_bytes)
    plan = headroom.plan(model, optimizer, x, loss=loss)
    loss(model(x)).backward()
    engine = engine_of(torch.device("cpu"))
    before = engine.bytes_up + engine.bytes_down
    optimizer.step()
    assert plan.link_bytes == engine.bytes_up + engine.bytes_down - before


def test_a_plan_cuts_no_states_into_pieces(monkeypatch):
    """Fakes of all the pieces would take ten times as long as all the rest."""
    seen, own = [], Recorder.__torch_dispatch__
    monkeypatch.setattr(
        Recorder,
        "__torch_dispatch__",
        lambda *args, **kwargs: seen.append(1) or own(*args, **kwargs),
    )
    counts = []
    for size in (1 << 24, 16_000):
        model = net("meta")
        optimizer = AdamW8bit(model.parameters())
        headroom.optim.offload(optimizer, bucket_bytes=size)
        seen.clear()
        headroom.plan(model, optimizer, torch.randn(64, 512), loss=loss, device="cuda")
        counts.append(len(seen))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("budget", [0, 4_000_000])
def test_bytes_that_are_known_before_anything_is_moved(budget):
    optimizer = AdamW(net().parameters())
    said = planned_paging(optimizer, budget)
    assert not optimizer.state and optimizer._paging is None
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.zeros_like(p)
    handle = headroom.optim.offload(optimizer, budget=budget, host=HostArena())
    optimizer.step()
    memory = handle.memory()
    assert (said.host, said.ring) == (memory.host, memory.ring) and said.host > 0
    assert said.resident == pytest.approx(memory.resident, rel=0.01)
    with pytest.raises(ValueError, match="budget is"):
        planned_paging(optimizer, 10)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_argument_is_the_option_of_the_optimizer(device):
    """Of an optimizer that exists, too, which stays as it is."""
    model, x = nn.Sequential(*(nn.Linear(300, 300) for _ in range(3))), torch.randn(4, 300)
    exists = AdamW8bit(model.parameters())
    made = [AdamW8bit, exists, partial(AdamW8bit, offload="state")]
    plans = [
        headroom.plan(
            model,
            one,
            x,
            device=device,
            loss=lambda y: y.mean(),
            offload=None if k == 2 else "state",
        )
        for k, one in enumerate(made)
    ]
    found = {(plan.peak_bytes, plan.host_peak_bytes, plan.link_bytes) for plan in plans}
    assert len(found) == 1 and plans[0].host_peak_bytes > 0 and exists._paging is None


@pytest.mark.parametrize(
    "optimizer, offload, error, words",
    [
        (torch.optim.AdamW, "state", TypeError, "wants an optimizer of headroom.optim"),
        (None, "state", TypeError, "wants an optimizer of headroom.optim"),
        (headroom.optim.Adafactor, "state", ValueError, "Adafactor's state is not offloaded"),
        (partial(AdamW8bit, offload="state"), "state", ValueError, "offloaded already"),
        (AdamW8bit, "all", ValueError, 'offload must be "state", "step" or None'),
    ],
)
def test_what_the_argument_refuses(optimizer, offload, error, words):
    with pytest.raises(error, match=words):
        headroom.plan(nn.Linear(4, 4), optimizer, torch.ones(1, 4), offload=offload)
