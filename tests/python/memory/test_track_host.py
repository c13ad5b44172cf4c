"""The second timeline of track: what arenas of the host hold meanwhile."""

import threading

import headroom
import pytest
import torch
from headroom.host import HostArena
from headroom.host.arena import listeners
from headroom.memory import Timeline, track
from headroom.memory.events import KINDS
from torch import nn

from helpers.empty_host import empty_host


@pytest.fixture(autouse=True)
def nothing_of_others():
    with empty_host():
        yield


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))


def stepped(model, optimizer, x, steps=2):
    for _ in range(steps):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_states_on_the_host_are_a_timeline_of_their_own():
    model, x, arena = net(), torch.randn(8, 256), HostArena()
    optimizer = headroom.optim.AdamW(model.parameters())
    handle = headroom.optim.offload(optimizer, host=arena)
    with track(model, optimizer) as tracked:
        stepped(model, optimizer, x)
    host = tracked.timeline.host
    assert host.peak_bytes == arena.peak == handle.memory().host
    assert host.peak_by_kind == dict.fromkeys(KINDS, 0) | {"optimizer_state": arena.bytes}
    assert host.owners()[0].op == "AdamW" and host.allocations[0].phase == "optimizer"
    assert all(a.end is None for a in host.allocations) and host.allocations[0].start > 0
    assert "on the host" in str(tracked)
    again = Timeline.from_json(tracked.timeline.to_json())
    assert again.host.peak_bytes == arena.bytes
    plan = headroom.plan(model, optimizer, x, loss=lambda out: out.square().mean())
    assert plan.host_peak_bytes == host.peak_bytes
    # What was there before is there from the beginning; what is given back ends.
    with track(model, optimizer) as tracked:
        stepped(model, optimizer, x, 1)
        handle.remove()
    host = tracked.timeline.host
    assert host.bytes_over_events()[0] == handle_bytes(host) > 0
    assert all(a.end is not None for a in host.allocations) and arena.bytes == 0


def handle_bytes(host):
    return sum(a.bytes for a in host.allocations)


def test_without_anything_on_the_host_there_is_none():
    model = net()
    optimizer = headroom.optim.AdamW(model.parameters())
    with track(model, optimizer) as tracked:
        stepped(model, optimizer, torch.randn(8, 256))
    assert tracked.timeline.host is None and "on the host" not in str(tracked)


def test_slabs_of_other_threads_and_kinds_count_and_listeners_go():
    model, kept = net(), []
    arena, before = HostArena(), len(listeners)

    def take():
        kept.append(arena.take(5000, kind="measurement", owner="link"))

    with track(model) as tracked:
        model(torch.randn(2, 256)).sum().backward()
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
        slab = arena.take(7000, kind="activations", owner="blocks")
        del slab
        model(torch.randn(2, 256)).sum().backward()
    mine = [a for a in tracked.timeline.host.allocations if a.op in ("link", "blocks")]
    assert [(a.bytes, a.kind) for a in mine] == [(5000, "temporaries"), (7000, "activations")]
    assert [a.end is None for a in mine] == [True, False]
    assert len(listeners) == before
