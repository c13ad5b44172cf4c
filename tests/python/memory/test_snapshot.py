"""What a snapshot says is what the tracker says, to the byte; torch's own viewer takes the file."""

import os
import signal

import headroom
import pytest
import torch
from headroom.memory import KINDS, load_snapshot, snapshot, track
from headroom.memory.snapshots import sources
from torch import nn
from torch.autograd.profiler import record_function
from torch.cuda import _memory_viz
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.viewer import accepted_by_torch


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


def _trained(make, steps=3, between=lambda recording, step: None):
    """What ``make(model, optimizer)`` recorded of the same steps each time."""
    torch.manual_seed(3)
    model = nn.Sequential(Block(20), nn.Dropout(0.3), Block(20))
    optimizer = headroom.optim.AdamW(model.parameters())
    with make(model, optimizer) as recording:
        for step in range(steps):
            loss = model(torch.randn(7, 20)).square().mean()
            between(recording, step)
            loss.backward()
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


@pytest.mark.parametrize(("piece", "stacks"), [(5000, True), (1, False)])
def test_a_snapshot_is_what_the_tracker_sees(piece, stacks, tmp_path, monkeypatch):
    """Also where the profiler is stopped, read and started again at every call of a module."""
    monkeypatch.setattr(sources, "_PIECE", piece)
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


def test_the_kinds_of_every_snapshot_add_up(tmp_path):
    """Those that are written in the middle of the run are its beginning."""
    tracked = _tracked()
    recording = _trained(
        lambda *both: snapshot(tmp_path / "run.pickle", *both, every=2, stacks=False),
        between=lambda recording, step: recording.dump(tmp_path / f"at-{step}.pickle"),
    )
    names = ["at-0", "at-1", "run-step-2", "at-2", "run"]
    assert [path.name for path in recording.files] == [f"{name}.pickle" for name in names]
    for path in recording.files:
        found = load_snapshot(path)
        accepted_by_torch(found.data)
        live = found.at_end()
        by_block = sum(block.requested for s in found.segments for block in s.blocks)
        assert sum(a.bytes for a in live) == by_block == found.timeline.bytes_over_events()[-1]
        assert sum(found.timeline.peak_by_kind.values()) == found.timeline.peak_bytes
    beginning = load_snapshot(recording.files[2]).timeline
    # The batch of the third step is there already, and no one has called it that yet.
    sizes = [sum(kinds) for kinds in _changes(beginning)]
    assert sizes == [sum(kinds) for kinds in _changes(tracked)][: len(sizes)]
    assert beginning.peaks_by_step()[0] == tracked.peaks_by_step()[0]


def test_numbers_do_not_change(tmp_path):
    def weights(make):
        kept = []
        _trained(lambda *both: kept.extend(both[0].parameters()) or make(*both))
        return kept

    with_it = weights(lambda *both: snapshot(tmp_path / "run.pickle", *both, every=1, stacks=False))
    without = weights(track)
    assert all(torch.equal(a, b) for a, b in zip(with_it, without))


def test_hooks_are_gone_afterwards(tmp_path):
    before = record_function.__enter__, record_function.__exit__, signal.getsignal(signal.SIGUSR1)
    recording = _trained(
        lambda *both: snapshot(
            tmp_path / "x", *both, on_signal=signal.SIGUSR1, every=1, stacks=False
        )
    )
    after = record_function.__enter__, record_function.__exit__, signal.getsignal(signal.SIGUSR1)
    assert after == before
    assert not nn.modules.module._global_forward_pre_hooks
    with pytest.raises(RuntimeError, match="make another"):
        recording.__enter__()
    with pytest.raises(RuntimeError, match="inside the with block"):
        recording.dump()


def test_the_history_is_bounded_and_what_is_live_is_not(tmp_path):
    path = tmp_path / "run.pickle"
    with snapshot(path, device="cpu", max_entries=50, stacks=False) as recording:
        kept = [torch.empty(100 + i) for i in range(30)]
        recording.dump()
        for i in range(200):
            torch.empty(1000 + i)
    found = load_snapshot(path)
    sizes = [a.bytes for a in found.timeline.allocations if a.start > 0]
    assert sizes == [4 * (1000 + i) for i in range(175, 200)], "25 of each, allocated and freed"
    assert sorted(a.bytes for a in found.at_end()) == [t.nbytes for t in kept]
    assert found.remarks == ["Only the last 50 events were kept."]
    assert found.timeline.peak_bytes == sum(t.nbytes for t in kept) + 4 * 1199
    accepted_by_torch(found.data)


def test_times_lines_and_frames(tmp_path):
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
    (first, *_) = found.frames(live)
    assert f"{first['filename']}:{first['line']} {first['name']}" == live.stack[0]
    (shown,) = [e for e in found.data["device_traces"][0] if e["size"] == kept.nbytes]
    assert shown["category"] == "temporaries" and '"op":"aten::empty"' in shown["user_metadata"]
    assert shown["frames"][0]["name"] == "temporaries (aten::empty), other of step 0"
    assert found.reserved_over_events() == [sum(s.size for s in found.segments)] * 4


def test_a_dump_within_an_operation_is_refused(tmp_path):
    """There the profiler, which must be stopped to be read, would write to memory that is gone."""
    said = []

    def dump(recording):
        with pytest.raises(RuntimeError, match="within an operation") as error:
            recording.dump()
        said.append(error)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(x):
            dump(recording)
            return x * 2

        @staticmethod
        def setup_context(context, inputs, output):
            dump(recording)

        @staticmethod
        def backward(context, grad):
            dump(recording)
            return grad * 2

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            dump(recording)
            return function(*args, **kwargs or {})

    @torch.library.custom_op("headroom_test::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        dump(recording)
        return x * 2

    x = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([x])
    optimizer.register_step_pre_hook(lambda *_: dump(recording))
    with snapshot(tmp_path / "run.pickle", device="cpu", stacks=False) as recording:
        y = Function.apply(x)
        with record_function("mine"):
            dump(recording)
        y.sum().backward()
        optimizer.step()
        with Mode():
            x.detach()
        doubled(x.detach())
        recording.dump()
    assert len(said) == 7


def test_a_range_that_began_before_does_not_matter(tmp_path):
    with record_function("mine"), snapshot(tmp_path / "run.pickle", device="cpu") as recording:
        recording.dump()
    assert len(recording.files) == 2


def test_a_signal_writes_at_the_next_call(tmp_path):
    path = tmp_path / "run.pickle"
    old = signal.getsignal(signal.SIGUSR1)

    def between(recording, step):
        if step == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert recording.files == []

    recording = _trained(
        lambda *both: snapshot(path, *both, on_signal=signal.SIGUSR1, stacks=False), between=between
    )
    assert [p.name for p in recording.files] == ["run-signal-1.pickle", "run.pickle"]
    assert signal.getsignal(signal.SIGUSR1) == old
    first, last = map(load_snapshot, recording.files)
    assert max(first.timeline.peaks_by_step()) == 1 and max(last.timeline.peaks_by_step()) == 2


def test_what_a_model_in_a_wrapper_does(tmp_path):
    """As DDP, whose forward pass is one range: files wait for the call of the wrapper."""

    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            with record_function("Wrapper.forward"):
                return self.inner(x)

    inner = nn.Linear(5, 5)
    model, optimizer = Wrapper(inner), torch.optim.AdamW(inner.parameters())
    with snapshot(tmp_path / "run.pickle", inner, optimizer, every=1, stacks=False) as recording:
        for _ in range(3):
            model(torch.randn(2, 5)).sum().backward()
            optimizer.step()
    names = ["run-step-1.pickle", "run-step-2.pickle", "run-step-3.pickle", "run.pickle"]
    assert [path.name for path in recording.files] == names
    phases = load_snapshot(recording.files[1]).timeline.peaks_by_phase()
    assert {"forward", "backward", "optimizer"} <= phases.keys()


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"every": 0, "optimizer": "sgd"}, ValueError, "every is 0"),
        ({"every": True, "optimizer": "sgd"}, ValueError, "every is True"),
        ({"every": 2}, ValueError, "give optimizer="),
        ({"on_signal": signal.SIGINT}, ValueError, "wanted a signal that is free"),
        ({"on_signal": 999}, ValueError, "on_signal is 999"),
        ({"max_entries": 0}, ValueError, "max_entries is 0"),
        ({"device": "meta"}, ValueError, "wanted cpu or cuda"),
        ({"model": 3}, TypeError, "model is int"),
        ({"optimizer": 3}, TypeError, "optimizer is int"),
    ],
)
def test_bad_arguments(options, error, said, tmp_path):
    model = options.pop("model", nn.Linear(2, 2))
    if options.get("optimizer") == "sgd":
        options["optimizer"] = torch.optim.SGD(model.parameters())
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
