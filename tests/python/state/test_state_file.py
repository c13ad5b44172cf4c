"""State files of whole runs: these go on with the same bits and take little memory."""

import json
import random
import subprocess
import sys
import weakref

import headroom
import numpy as np
import pytest
import torch
from headroom import StateFileError, load_state, save_state
from headroom.state import load
from headroom.state.file import layout
from headroom.state.file.layout import PIECE
from torch import nn

from helpers.bits import assert_same_bits
from helpers.modes import EVERY
from helpers.state_runs import ADAMW, OPTIMIZERS, assert_same, build, made, step


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "with a state"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(name, fresh, path, device):
    model, optimizer = made(name)
    model.to(device)
    step(model, optimizer, 2)
    save_state(path, model=model, optimizer=optimizer)
    step(model, optimizer, 2)
    other, resumed = made(name, seed=5)
    other.to(device)
    if not fresh:
        step(other, resumed)
    load_state(path, model=other, optimizer=resumed)
    step(other, resumed, 2)  # on the numbers that follow those of the saved generator
    assert_same((model, optimizer), (other, resumed))


@pytest.mark.parametrize("piece", [PIECE, 100], ids=["held", "one by one"])
@pytest.mark.parametrize("moved", [False, True])
def test_nothing_that_was_loaded_lies_in_the_file(moved, piece, path, monkeypatch):
    """Also not when states go from the file to another device, one by one, and the model is filled
    one by one."""
    monkeypatch.setattr(layout, "PIECE", piece)
    if moved:
        monkeypatch.setattr(load, "_on_cpu", lambda device: False)
    model, optimizer = made("adamw8bit-remainder16")
    step(model, optimizer)
    save_state(path, model=model, optimizer=optimizer, extra=[torch.ones(5000)])
    other, resumed = made("adamw8bit-remainder16", seed=5)
    extra = load_state(path, model=other, optimizer=resumed)
    path.write_bytes(b"!" * path.stat().st_size)  # into the same file
    assert_same((model, optimizer), (other, resumed))
    assert_same_bits(extra, [torch.ones(5000)])


def test_everything_of_a_run_comes_back(path, device):
    """Dropout, a scaler that skips, schedules, a loader's position, three generators: the losses
    printed after the load are those of the run that went on."""

    class Loader:
        """torchdata's protocol."""

        place = 0

        def __next__(self):
            self.place += 1
            return torch.randn(8, 5, generator=torch.Generator().manual_seed(self.place))

        def state_dict(self):
            return {"place": self.place, "worker": [{"snapshot": b"\0\xff"}]}

        def load_state_dict(self, state):
            assert state["worker"] == [{"snapshot": b"\0\xff"}]
            self.place = state["place"]

    def fresh():
        model = nn.Sequential(nn.Linear(5, 9), nn.Dropout(0.5), nn.Linear(9, 1)).to(device)
        optimizer = ADAMW(model.parameters(), lr=0.1)
        schedulers = [
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5], gamma=0.5),
            torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
        ]
        scaler = headroom.amp.GradScaler(device, init_scale=2.0**20, growth_interval=2)
        return dict(
            model=model, optimizer=optimizer, scheduler=schedulers, scaler=scaler, loader=Loader()
        )

    def losses(model, optimizer, scheduler, scaler, loader, count):
        for _ in range(count):
            x = next(loader).to(device) * random.random() + np.random.rand()
            loss = model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler[0].step()
            scheduler[1].step(loss.item())
            yield loss.item()

    run = fresh()
    list(losses(**run, count=4))
    save_state(path, **run, extra={"epoch": 3})
    wanted = list(losses(**run, count=6))
    random.seed(99), np.random.seed(99), torch.manual_seed(99)
    other = fresh()
    assert load_state(path, **other) == {"epoch": 3}
    assert list(losses(**other, count=6)) == wanted
    other = fresh()
    load_state(path, **other, rng=False)
    assert list(losses(**other, count=6)) != wanted


@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
def test_channels_last_states_keep_their_order(name, path):
    """The codes of 8-bit moments mean something in their order only."""

    def fresh():
        model = nn.Conv2d(16, 8, 3).to(memory_format=torch.channels_last)
        return model, EVERY[name].make(model.parameters())

    model, optimizer = fresh()
    grads = [torch.randn_like(model.weight) for _ in range(3)]

    def go(model, optimizer, grads):
        for grad in grads:
            model.weight.grad = grad
            optimizer.step()

    go(model, optimizer, grads[:2])
    save_state(path, model=model, optimizer=optimizer)
    other = fresh()
    load_state(path, model=other[0], optimizer=other[1])
    go(model, optimizer, grads[2:])
    go(*other, grads[2:])
    assert_same((model, optimizer), other)


def test_extra_states_and_versions_of_modules(path):
    class Counting(nn.Module):
        _version = 7
        seen = None

        def get_extra_state(self):
            return {"count": torch.tensor([3])}

        def set_extra_state(self, state):
            self.kept = state["count"]

        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
            self.seen = local_metadata.get("version")
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    save_state(path, model=Counting())
    model = Counting()
    load_state(path, model=model)
    assert model.seen == 7 and model.kept.tolist() == [3]


def test_lists_of_objects_and_parts_left_out(path):
    pairs = [made("adamw", seed=i) for i in range(2)]
    for pair in pairs:
        step(*pair)
    models, optimizers = zip(*pairs)
    save_state(path, model=list(models), optimizer=list(optimizers), rng=False)
    others = [made("adamw", seed=9) for _ in range(2)]
    load_state(path, optimizer=[o for _, o in others])
    load_state(path, model=[m for m, _ in others])
    for pair, other in zip(pairs, others):
        assert_same(pair, other)
    with pytest.raises(StateFileError, match="has no 'model'; it has model.0, model.1"):
        load_state(path, model=others[0][0])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_safetensors_reads_the_file(name, path):
    safetensors = pytest.importorskip("safetensors")
    from safetensors.torch import load_file

    model, optimizer = made(name)
    step(model, optimizer)
    save_state(path, model=model, optimizer=optimizer)
    read = load_file(path)
    wanted = {f"model.{key}": value for key, value in model.state_dict().items()}
    for index, entry in optimizer.state_dict()["state"].items():
        wanted |= {f"optimizer.state.{index}.{key}": value for key, value in entry.items()}
    assert wanted.keys() == {key for key in read if not key.startswith("rng.")}
    assert_same_bits([read[key] for key in wanted], wanted.values())
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt"
    document = json.loads(metadata["headroom"])
    group = document["tree"]["optimizer"]["param_groups"][0]
    assert document["format"] == layout.FORMAT and group["lr"] == 1e-2
    assert ("maps_crc32" in document) == (group.get("block_size") == 256) == ("8bit" in name)


def test_at_most_one_tensor_is_copied(path, monkeypatch):
    """Of those that are saved."""
    real, live, most = torch.empty, set(), 0

    def counted(*args, **kwargs):
        nonlocal most
        tensor = real(*args, **kwargs)
        live.add(number := len(live) + id(tensor))
        weakref.finalize(tensor, live.discard, number)
        most = max(most, len(live))
        return tensor

    ordered = [torch.randn(9, 9) for _ in range(5)]
    model = build()
    monkeypatch.setattr(torch, "empty", counted)
    save_state(path, model=model, extra=ordered, rng=False)
    assert most == 0
    save_state(path, extra=[tensor.t() for tensor in ordered], rng=False)
    assert most == 1


@pytest.mark.slow
def test_the_memory_of_a_save_and_of_a_load(tmp_path):
    """In processes of their own, since what they took is counted by the system: one tensor of 64 MB
    and what is copied ahead; and for a load, what the model had before."""
    code = f"""
import resource, sys, torch, headroom
model = torch.nn.ParameterList(torch.zeros(16 << 20).normal_() for _ in range(8))
headroom.save_state({str(tmp_path / "0")!r}, model=torch.nn.Linear(2, 2), rng=False)
headroom.load_state({str(tmp_path / "0")!r}, model=torch.nn.Linear(2, 2))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if sys.argv[1] == "save":
    headroom.save_state({str(tmp_path / "1")!r}, model=model)
else:
    headroom.load_state({str(tmp_path / "1")!r}, model=model)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    for what, limit in (("save", 32 + 16), ("load", 9 * 64 + 32)):
        done = subprocess.run([sys.executable, "-c", code, what], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert float(done.stdout) < limit, what
