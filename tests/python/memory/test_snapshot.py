"""What a snapshot says is what the tracker says, to the byte; torch's own viewer takes the file."""

import os

import headroom
import pytest
import torch
from headroom.memory import KINDS, load_snapshot, snapshot, track
from torch import nn
from torch.cuda import _memory_viz

from helpers.viewer import accepted_by_torch


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


def _trained(make, steps=3):
    """What ``make(model, optimizer)`` recorded of the same steps each time."""
    torch.manual_seed(3)
    model = nn.Sequential(Block(20), nn.Dropout(0.3), Block(20))
    optimizer = headroom.optim.AdamW(model.parameters())
    with make(model, optimizer) as recording:
        for _ in range(steps):
            model(torch.randn(7, 20)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return recording


def _changes(timeline):
    """Bytes of each kind, at each event that changes them. Memory of earlier tests may be freed
    meanwhile, which changes nothing."""
    series = timeline.by_kind_over_events()
    rows = list(zip(*(series.get(kind, [0] * timeline.events) for kind in KINDS)))
    return rows[:1] + [row for last, row in zip(rows, rows[1:]) if row != last]


def _described(timeline):
    fields = ("bytes", "kind", "module", "op", "phase", "step")
    rows = [tuple(getattr(a, name) for name in fields) for a in timeline.allocations]
    # The lines within this file differ between two calls of _trained.
    return sorted(zip(rows, [len(a.stack) for a in timeline.allocations]), key=repr)


def _tracked(stacks=False):
    for _ in range(2):  # the first steps of a process allocate more
        found = _trained(lambda *both: track(*both, stacks=stacks))
    return found.timeline


@pytest.mark.parametrize("stacks", [True, False])
def test_a_snapshot_is_what_the_tracker_sees(stacks, tmp_path):
    tracked, path = _tracked(stacks), tmp_path / "run.pickle"
    assert _trained(lambda *both: snapshot(path, *both, stacks=stacks)).files == [path]
    found = load_snapshot(path)
    assert found.device == "cpu" and found.devices == ["cpu"] and found.has_kinds
    assert found.remarks == [] and found.out_of_memory == []
    timeline = found.timeline
    assert timeline.peak_bytes == tracked.peak_bytes
    assert timeline.peak_by_kind == tracked.peak_by_kind
    assert _changes(timeline) == _changes(tracked)
    assert timeline.by_module() == tracked.by_module()
    assert timeline.peaks() == tracked.peaks()
    assert _described(timeline) == _described(tracked)
    kinds = {a.kind for a in timeline.allocations}
    assert {"parameters", "optimizer_state", "gradients", "activations"} <= kinds
    accepted_by_torch(found.data)


def test_the_kinds_of_a_snapshot_add_up(tmp_path):
    path = tmp_path / "run.pickle"
    _trained(lambda *both: snapshot(path, *both, stacks=False))
    found = load_snapshot(path)
    by_block = sum(block.requested for s in found.segments for block in s.blocks)
    live = sum(a.bytes for a in found.at_end())
    assert live == by_block == found.timeline.bytes_over_events()[-1]
    assert sum(found.timeline.peak_by_kind.values()) == found.timeline.peak_bytes


def test_numbers_do_not_change(tmp_path):
    def weights(make):
        kept = []
        _trained(lambda *both: kept.extend(both[0].parameters()) or make(*both))
        return kept

    with_it = weights(lambda *both: snapshot(tmp_path / "run.pickle", *both, stacks=False))
    without = weights(track)
    assert all(torch.equal(a, b) for a, b in zip(with_it, without))


def test_hooks_are_gone_afterwards(tmp_path):
    recording = _trained(lambda *both: snapshot(tmp_path / "x", *both, stacks=False))
    assert not nn.modules.module._global_forward_pre_hooks
    assert not recording._model._forward_pre_hooks
    with pytest.raises(RuntimeError, match="make another"):
        recording.__enter__()
    assert not recording._model._forward_pre_hooks
    with pytest.raises(RuntimeError, match="inside the with block"):
        recording.dump(tmp_path / "y")


def test_on_the_cpu_nothing_can_be_read_before_the_end(tmp_path):
    with snapshot(tmp_path / "run.pickle", device="cpu", stacks=False) as recording:
        with pytest.raises(RuntimeError, match="on CUDA alone"):
            recording.dump(tmp_path / "before.pickle")
    assert os.listdir(tmp_path) == ["run.pickle"]


def test_times_and_lines(tmp_path):
    path = tmp_path / "run.pickle"
    with snapshot(path, device="cpu"):
        kept = torch.empty(333)
        torch.empty(100)
    found = load_snapshot(path)
    assert len(found.times) == found.timeline.events == 4
    assert (
        found.times == sorted(found.times)
        and abs(found.times[0] / 1e6 - os.stat(path).st_mtime) < 60
    )
    (live,) = found.at_end()
    assert live.bytes == kept.nbytes and live.op == "aten::empty"
    assert "test_snapshot.py" in live.stack[0] and "test_times" in live.stack[0]
    (shown,) = [e for e in found.data["device_traces"][0] if e["size"] == kept.nbytes]
    assert shown["category"] == "temporaries" and '"op":"aten::empty"' in shown["user_metadata"]
    assert shown["frames"][0]["name"] == "temporaries (aten::empty), other of step 0"
    assert found.reserved_over_events() == [sum(s.size for s in found.segments)] * 4


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"max_entries": 0}, ValueError, "max_entries is 0"),
        ({"device": "meta"}, ValueError, "wanted cpu or cuda"),
        ({"model": 3}, TypeError, "model is int"),
        ({"optimizer": 3}, TypeError, "optimizer is int"),
    ],
)
def test_bad_arguments(options, error, said, tmp_path):
    model = options.pop("model", nn.Linear(2, 2))
    with pytest.raises(error, match=said):
        snapshot(tmp_path / "x", model, **options)
    assert not list(tmp_path.iterdir())


def test_one_at_a_time(tmp_path):
    with snapshot(tmp_path / "a", device="cpu"):
        before = len(nn.modules.module._global_forward_pre_hooks)
        with pytest.raises(RuntimeError, match="profiler is running already"):
            with snapshot(tmp_path / "b", nn.Linear(2, 2)):
                pass
        assert len(nn.modules.module._global_forward_pre_hooks) == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_the_viewer_that_tests_use_notices(tmp_path):
    """A snapshot whose blocks do not add up is none that torch takes."""
    with snapshot(tmp_path / "a", device="cpu"):
        kept = torch.empty(1000)  # noqa: F841
    data = load_snapshot(tmp_path / "a").data
    data["segments"][0]["blocks"].pop()
    with pytest.raises(AssertionError):
        accepted_by_torch(data)
    assert _memory_viz.segsum  # what it calls
