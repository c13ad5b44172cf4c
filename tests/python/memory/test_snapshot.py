"""Snapshots of the CUDA allocator are read without a GPU, and without running what is in them."""

import pickle

import pytest
import torch
from headroom.memory import snapshot
from headroom.memory.stream import Label, Note, resolve

USER = {"name": "forward", "filename": "/home/me/run/model.py", "line": 12}
TORCH = {"name": "linear", "filename": "/v/lib/site-packages/torch/nn/functional.py", "line": 9}
OPTIMIZER = {"name": "wrapper", "filename": "/v/site-packages/torch/optim/optimizer.py", "line": 5}


def _entry(action, address, size, *frames, **more):
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": 0,
        "time_us": 1,
        "frames": list(frames),
    } | more


def _snapshot():
    trace = [
        _entry("segment_alloc", 1000, 2 << 20),
        _entry("alloc", 1000, 300, TORCH, USER),  # with what follows: live 300
        _entry("annotate", 77, 1, user_metadata="headroom::mark:0"),
        _entry("alloc", 1512, 200, USER),  # 500
        _entry("free_requested", 1000, 300),
        _entry("free_completed", 1000, 300),  # 200
        _entry("alloc", 1000, 100, OPTIMIZER, USER),  # 300, at an address that was used
        _entry("annotate", 77, 1, user_metadata="headroom::mark:1"),
        _entry("free_completed", 5000, 64),  # made before the trace
        _entry("snapshot", 0, 0),
    ]
    blocks = [
        {"address": 1000, "size": 512, "requested_size": 100, "state": "active_allocated"},
        {"address": 1512, "size": 512, "requested_size": 200, "state": "active_allocated"},
        {"address": 2024, "size": 1024, "requested_size": 700, "state": "active_pending_free"},
        {"address": 3048, "size": 512, "requested_size": 0, "state": "inactive"},
    ]
    segment = {"device": 0, "address": 1000, "total_size": 2 << 20, "blocks": blocks}
    return {"segments": [segment], "device_traces": [trace, []]}


def test_events_become_a_timeline():
    notes = [
        Note([Label(1000, 300, "activations")], module="up", phase="forward"),
        Note([Label(1000, 100, "optimizer_state", "up", "exp_avg")]),
    ]
    timeline = resolve([], snapshot.events_of(_snapshot()), notes, "cuda:0")
    assert timeline.bytes_over_events() == [0, 300, 500, 200, 300]
    first, second, third = timeline.allocations
    assert (first.kind, first.stack, first.end) == ("activations", ("run/model.py:12 forward",), 3)
    assert (second.kind, second.module, second.phase) == ("temporaries", "up", "forward")
    assert (third.kind, third.op, third.phase) == ("optimizer_state", "exp_avg", "optimizer")
    assert snapshot.events_of(_snapshot(), 1) == snapshot.events_of(_snapshot(), 7) == []


def test_marks_in_metadata_come_before_what_carries_them():
    """As on torch without annotations: an allocation names the last mark before it."""
    trace = [
        _entry("alloc", 1, 8),
        _entry("alloc", 2, 8, user_metadata="headroom::mark:1"),
        _entry("alloc", 3, 8, user_metadata="headroom::mark:0"),  # a thread that is behind
        _entry("alloc", 4, 8, user_metadata="mine"),
        _entry("alloc", 5, 8, user_metadata="headroom::mark:2"),
    ]
    events = snapshot.events_of({"device_traces": [trace]})
    shown = [(event.action, event.address) for event in events]
    marks = [("mark", 0), ("mark", 1)]
    rest = [("alloc", 2), ("alloc", 3), ("alloc", 4), ("mark", 2), ("alloc", 5)]
    assert shown == [("alloc", 1), *marks, *rest]


def test_what_was_live_before_the_trace():
    found = snapshot.live_before(_snapshot())
    assert sorted((label.address, label.bytes) for label in found) == [(2024, 700), (5000, 64)]
    old = _snapshot()
    for block in old["segments"][0]["blocks"]:
        del block["address"]  # older files: from the sizes
    assert snapshot.live_before(old) == found


class _Payload:
    def __reduce__(self):
        return (print, ("ran",))


def test_files_are_read_without_running_them(tmp_path, capsys):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(_snapshot(), protocol=4))
    assert snapshot.load_snapshot(path) == _snapshot()
    path.write_bytes(pickle.dumps({"device_traces": [], "x": _Payload()}))
    with pytest.raises(ValueError, match="holds no objects, and this file has builtins.print"):
        snapshot.load_snapshot(path)
    assert "ran" not in capsys.readouterr().out
    for bad in (b"", b"not a pickle", pickle.dumps([1]), pickle.dumps({"segments": []})):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match="is no snapshot"):
            snapshot.load_snapshot(path)
    with pytest.raises(FileNotFoundError):
        snapshot.load_snapshot(tmp_path / "none")


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
