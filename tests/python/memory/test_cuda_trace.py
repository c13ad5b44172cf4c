"""Traces of the CUDA allocator are read without a GPU."""

import pytest
import torch
from headroom.memory import cuda_trace
from headroom.memory.stream import Label, Note, resolve

from helpers.snapshots import cuda_snapshot, entry


def test_events_become_a_timeline():
    notes = [
        Note([Label(1000, 300, "activations")], module="up", phase="forward"),
        Note([Label(1000, 100, "optimizer_state", "up", "exp_avg")]),
    ]
    timeline = resolve([], cuda_trace.events_of(cuda_snapshot()), notes, "cuda:0")
    assert timeline.bytes_over_events() == [0, 300, 500, 200, 300]
    first, second, third = timeline.allocations
    assert (first.kind, first.stack, first.end) == ("activations", ("run/model.py:12 forward",), 3)
    assert (second.kind, second.module, second.phase) == ("temporaries", "up", "forward")
    assert (third.kind, third.op, third.phase) == ("optimizer_state", "exp_avg", "optimizer")
    assert (
        cuda_trace.events_of(cuda_snapshot(), 1) == cuda_trace.events_of(cuda_snapshot(), 7) == []
    )


def test_marks_in_metadata_come_before_what_carries_them():
    """As on torch without annotations: an allocation names the last mark before it."""
    trace = [
        entry("alloc", 1, 8),
        entry("alloc", 2, 8, user_metadata="headroom::mark:1"),
        entry("alloc", 3, 8, user_metadata="headroom::mark:0"),  # a thread that is behind
        entry("alloc", 4, 8, user_metadata="mine"),
        entry("alloc", 5, 8, user_metadata="headroom::mark:2"),
    ]
    events = cuda_trace.events_of({"device_traces": [trace]})
    shown = [(event.action, event.address) for event in events]
    marks = [("mark", 0), ("mark", 1)]
    rest = [("alloc", 2), ("alloc", 3), ("alloc", 4), ("mark", 2), ("alloc", 5)]
    assert shown == [("alloc", 1), *marks, *rest]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_step_on_a_gpu():
    from headroom.memory import track

    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 8))
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(64, 256, device="cuda")

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    torch.cuda.reset_peak_memory_stats()
    others = torch.cuda.memory_stats()["requested_bytes.all.current"]
    with track(model, optimizer, batch=x) as tracked:
        step()
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    owned = tracked.timeline.bytes_over_events()[0]
    assert abs((peak - others) - (tracked.peak_bytes - owned)) <= 1  # the anchor of the marks
    most = tracked.timeline.most_by_kind
    numel = sum(p.numel() for p in model.parameters())
    assert most["parameters"] == most["gradients"] == 4 * numel
    assert most["optimizer_state"] >= 8 * numel
    assert most["activations"] >= 2 * 4 * 64 * 512
    assert {"forward", "backward", "optimizer"} <= set(tracked.timeline.peaks_by_phase())
    assert "0" in {a.module for a in tracked.timeline.allocations if a.kind == "activations"}
