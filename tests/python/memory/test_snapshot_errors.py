"""What a snapshot says and leaves when memory runs out, the disk is full, or Ctrl-C comes."""

import errno
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import headroom
import pytest
import torch
from headroom._core import atomic
from headroom.memory import format_bytes, load_snapshot, snapshot
from headroom.memory.snapshots.explain import asked_bytes
from headroom.step.out_of_memory import add_note
from torch import nn

from helpers.viewer import accepted_by_torch

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "explain_oom.py"
TOO_MUCH = 2**50  # elements, which no machine has


class Greedy(nn.Module):
    """A model whose third call asks for too much."""

    def __init__(self):
        super().__init__()
        self.up, self.calls = nn.Linear(16, 96), 0

    def forward(self, x):
        y = torch.tanh(self.up(x))
        self.calls += 1
        if self.calls == 3:
            torch.empty(TOO_MUCH, dtype=torch.uint8)
        return y


def _run(model, optimizer, path, steps=4, **options):
    with snapshot(path, model, optimizer, **options) as recording:
        for _ in range(steps):
            model(torch.randn(32, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return recording


def _notes(error):
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def test_an_error_of_memory_explains_itself(tmp_path):
    model = Greedy()
    optimizer = torch.optim.AdamW(model.parameters())
    path = tmp_path / "oom.pickle"
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as raised:
        _run(model, optimizer, path)
    text = _notes(raised.value)
    assert "1.00 PiB were asked for" in text and "in step 2, forward" in text
    assert "asked for at memory/test_snapshot_errors.py:" in text and "forward" in text
    found = load_snapshot(path)
    accepted_by_torch(found.data)
    (failure,) = found.out_of_memory
    assert failure.bytes == TOO_MUCH and failure.device_free > 0
    kinds = found.timeline.by_kind(failure.event)
    # What the backward pass would need: the output, and the batch as it is an input of the product.
    numel = sum(p.numel() for p in model.parameters())
    assert kinds["activations"] == 4 * 32 * 96 and kinds["batch"] == 4 * 32 * 16
    assert kinds["parameters"] == 4 * numel and kinds["optimizer_state"] == 8 * numel + 8
    assert f"optimizer_state{format_bytes(8 * numel + 8):>19}" in text
    assert f"\nup{format_bytes(12 * numel + 8):>32}" in text
    assert "largest owners" in text and "activations: (model) tanh" in text
    assert "The cheapest ways out, each planned by itself" in text
    assert text.count("headroom.optim.") >= 1 and "\n1. " in text and "\n2. " in text
    assert f"The snapshot is in {path}." in text


def test_why_nothing_can_be_planned_is_said(tmp_path):
    model = Greedy()
    optimizers = [torch.optim.AdamW([p]) for p in model.parameters()]
    with pytest.raises(RuntimeError) as raised:
        _run(model, optimizers[0], tmp_path / "a", advice=False, stacks=False)
    text = _notes(raised.value)
    assert "No changes could be planned: advice was turned off, or the model was called" in text
    model.calls = 0
    with pytest.raises(RuntimeError) as raised:
        with snapshot(tmp_path / "b", model, optimizers, stacks=False):
            for _ in range(3):
                model(torch.randn(32, 16)).sum().backward()
    text = _notes(raised.value)
    assert "No changes could be planned: there are several optimizers.\nheadroom.fit(" in text


def test_errors_of_memory_are_told_from_others():
    cuda = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 23.6 GiB"
    )
    assert asked_bytes(cuda) == 3 * 2**29
    assert asked_bytes(torch.OutOfMemoryError("no words")) == 0
    assert asked_bytes(RuntimeError("Tried to allocate 1.50 GiB")) is None
    assert asked_bytes(ValueError("DefaultCPUAllocator: you tried to allocate 5 bytes")) is None
    with pytest.raises(RuntimeError) as raised:
        torch.empty(TOO_MUCH)
    assert asked_bytes(raised.value) == 4 * TOO_MUCH


def test_a_note_is_added_on_every_python():
    error = RuntimeError("first", 2)
    add_note(error, "then")
    assert _notes(error).endswith("then")

    class Older:  # as before Python 3.11
        args = ("first", 2)

    add_note(Older, "then")
    assert Older.args == ("first\nthen", 2)


def test_another_error_stays_as_it_is(tmp_path):
    path = tmp_path / "run.pickle"
    with pytest.raises(ZeroDivisionError) as raised:
        with snapshot(path, device="cpu", stacks=False) as recording:
            kept = torch.ones(77)
            1 / 0  # noqa: B018
    assert not hasattr(raised.value, "__notes__") and recording.explanation is None
    assert [a.bytes for a in load_snapshot(path).at_end()] == [kept.nbytes]


@pytest.fixture
def ctrl_c_raises():
    """Also in the background of a shell, which has such a process ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_raises")
def test_ctrl_c_while_recording(tmp_path):
    path = tmp_path / "run.pickle"
    model = nn.Linear(4, 4)
    with pytest.raises(KeyboardInterrupt):
        with snapshot(path, model, stacks=False):
            model(torch.ones(2, 4)).sum().backward()
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(10**9):
                pass
    assert load_snapshot(path).timeline.peak_by_kind["parameters"] == 4 * 20
    assert not nn.modules.module._global_forward_pre_hooks
    with snapshot(path, model, stacks=False):  # the profiler is free again
        pass


def test_ctrl_c_while_the_file_is_written(tmp_path, monkeypatch):
    """The old file is there, whole, and nothing else."""
    path = tmp_path / "run.pickle"
    path.write_bytes(b"old")

    def interrupted(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        with snapshot(path, device="cpu", stacks=False) as recording:
            monkeypatch.setattr(os, "pwrite", interrupted)
    monkeypatch.undo()
    assert path.read_bytes() == b"old" and recording.files == []
    assert os.listdir(tmp_path) == ["run.pickle"]


@pytest.fixture
def full_disk(monkeypatch):
    """A disk that takes half of a file."""

    def half(file, data, offset):
        if offset or len(data) < 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written(file, data[: len(data) // 2], offset)

    written = os.pwrite
    monkeypatch.setattr(os, "pwrite", half)


def test_a_full_disk(tmp_path, full_disk):
    path = tmp_path / "run.pickle"
    path.write_bytes(b"old")
    with pytest.raises(OSError, match="No space left") as raised:
        with snapshot(path, device="cpu", stacks=False) as recording:
            pass
    assert raised.value.errno == errno.ENOSPC and "as it was" in str(raised.value)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["run.pickle"]
    assert recording.files == []


def test_a_full_disk_does_not_hide_the_error_that_matters(tmp_path, full_disk):
    model = Greedy()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as raised:
        _run(model, optimizer, tmp_path / "run.pickle", stacks=False)
    text = _notes(raised.value)
    assert "were asked for" in text and "could not write" in text
    assert "The snapshot is in" not in text
    assert not os.listdir(tmp_path)


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="not written"):
        with snapshot(tmp_path / "file" / "run.pickle", device="cpu", stacks=False):
            pass
    assert atomic.partial_of("run.pickle") not in os.listdir(tmp_path)


def test_the_example(tmp_path, monkeypatch):
    """Its lines are few, and what it raises is what it is about."""
    assert len(EXAMPLE.read_text().splitlines()) < 40
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError) as raised:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    text = _notes(raised.value)
    assert "4096 PiB were asked for" in text and "in step 2" in text and "1.2" in text
    assert text.count("\n1. ") == text.count("\n3. ") == 1
    assert load_snapshot("oom.pickle").out_of_memory[0].bytes == 2**62


@pytest.mark.slow
def test_the_example_from_the_command_line(tmp_path):
    line = [sys.executable, str(EXAMPLE)]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "The cheapest ways out" in done.stderr
    html = [sys.executable, "-m", "torch.cuda._memory_viz", "trace_plot", "oom.pickle"]
    subprocess.run([*html, "-o", "oom.html"], cwd=tmp_path, check=True)
    assert "MemoryViz.js" in (tmp_path / "oom.html").read_text()
    assert headroom.__version__
