"""State files: what comes back, what is refused, and what survives faults.

    python tests/python/state/test_state_file.py

writes the files of this format in tests/states anew.
"""

import argparse
import copy
import datetime
import errno
import fcntl
import json
import os
import pickle
import random
import struct
import subprocess
import sys
import tempfile
import threading
import types
import warnings
import weakref
import zlib
from collections import Counter, OrderedDict
from pathlib import Path, PurePosixPath, PureWindowsPath
from zoneinfo import ZoneInfo

import headroom
import numpy as np
import pytest
import torch
from headroom import StateFileError, load_state, save_state
from headroom._core import atomic
from headroom.state import load, save
from headroom.state.file import StateFile, layout
from headroom.state.file.layout import PIECE, PREFIX
from torch import nn
from torch._subclasses import FakeTensorMode

from helpers import state_file_faults as faults
from helpers.bits import assert_same_bits
from helpers.modes import EVERY

STATES = Path(__file__).resolve().parents[2] / "states"
ADAMW = headroom.optim.AdamW
OPTIMIZERS = ["adamw", "adamw-remainder16", "adamw8bit", "adamw8bit-remainder16"]


def build(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 70), nn.BatchNorm1d(70), nn.Linear(70, 3)).to(dtype)


def made(name, dtype=None, seed=0):
    mode = EVERY[name]
    dtype = dtype or (torch.bfloat16 if "master" in mode.options else torch.float32)
    model = build(dtype, seed)
    return model, mode.make(model.parameters())


def step(model, optimizer, count=1):
    for _ in range(count):
        x = torch.randn(8, 5, dtype=next(model.parameters()).dtype)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def tensors(model, optimizer):
    state = optimizer.state_dict()["state"]
    return {
        **model.state_dict(),
        **{f"{i}.{name}": t for i, entry in state.items() for name, t in entry.items()},
    }


def assert_same(left, right):
    left, right = tensors(*left), tensors(*right)
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].stride() == right[name].stride(), name
    assert_same_bits(left.values(), right.values())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "step-1.safetensors"


# ---- round trips ---------------------------------------------------------------------------------


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


VALUES = {
    "scalars": [None, True, 1, -(2**70), 0.1, "text \u00fc \ud800 $", b"\0\xff", bytearray(b"a")],
    "floats": [float("inf"), float("-inf"), 5e-324, -0.0],
    "nested": {"a": (1, [2, (3,)]), "b": {}, "c": [], "d": ()},
    "keys": {0: "a", "0": "b", (1, 2): "c", None: "d", 1.5: "e", float("inf"): "f"},
    "dollar": {"$": "tensor", "name": "nothing"},
    "mappings": [OrderedDict(b=1, a=2), Counter({3: 2, 5: 1})],
    "torch": [torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 3])],
    "numpy": [np.float64(0.1), np.int8(-3), np.bool_(True), np.uint32(7)],
    "sets": [{3, "a", (1, 2), None}, set(), frozenset({b"x"}), {frozenset({1}): 2}],
    "paths": [Path("/a/\u00fc"), PurePosixPath("b"), PureWindowsPath(r"c:\d"), {Path("k"): 1}],
    "times": [
        datetime.datetime(2024, 2, 29, 1, 2, 3, 4),
        datetime.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=datetime.timezone.utc),
        datetime.datetime(1, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=-3.5))),
        datetime.date(1999, 12, 31),
        datetime.time(23, 59, 59, 999999),
        datetime.timedelta(days=-1, seconds=5, microseconds=7),
    ],
    "namespaces": [
        argparse.Namespace(lr=0.1, out=Path("runs"), more=argparse.Namespace()),
        types.SimpleNamespace(**{"$": 1, "items": [{2}]}),
    ],
}


def same(left, right):
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return [*left] == [*right] and all(map(same, left.values(), right.values()))
    if isinstance(left, (set, frozenset)):  # whose order is not their own
        return left == right
    if isinstance(left, datetime.datetime) and left.fold != right.fold:
        return False
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right and str(left) == str(right)


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back_as_they_were(name, path):
    save_state(path, extra=VALUES[name])
    assert same(load_state(path), VALUES[name])


def test_nan_and_arrays_come_back(path):
    array = np.arange(6, dtype=np.uint16).reshape(2, 3)
    save_state(path, extra={"nan": float("nan"), "array": array.T, "none": np.zeros((0, 2))})
    extra = load_state(path)
    assert extra["nan"] != extra["nan"]
    assert extra["array"].dtype == np.uint16 and (extra["array"] == array.T).all()
    assert extra["none"].shape == (0, 2)


@pytest.mark.parametrize("dtype", layout.NAMES)
def test_tensors_of_every_dtype_and_shape(dtype, path, device):
    def make(*shape):
        numbers = torch.randint(0, 2, shape) if dtype == torch.bool else torch.randint(0, 99, shape)
        return numbers.to(dtype).to(device)

    whole = make(4, 6)
    values = {
        "scalar": make(),
        "empty": make(3, 0, 2),
        "odd": make(3),
        "slice": whole[1:3, ::2],
        "transposed": whole.t(),
        "expanded": make(1, 3).expand(4, 3),
        "channels_last": make(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "parameter": nn.Parameter(make(5), requires_grad=False),
    }
    save_state(path, extra=values)
    for name, value in load_state(path).items():
        assert type(value) is torch.Tensor and value.device.type == "cpu", name
        assert_same_bits([value.clone()], [values[name].detach().cpu().clone()])
        if name in ("transposed", "channels_last"):
            assert value.stride() == values[name].stride()


def test_tensors_larger_than_a_piece(path, device):
    values = [
        torch.randn((PIECE * k) // 8 + d, device=device) for k in (1, 2, 5) for d in (-1, 0, 1)
    ]
    save_state(path, extra=values, progress=True)
    assert_same_bits(load_state(path), [value.cpu() for value in values])


def test_tied_tensors_are_stored_once_and_stay_one(path):
    shared = torch.randn(1000)
    model = build()
    model[2].weight = nn.Parameter(torch.randn(3, 70))
    model.tied = model[2]
    save_state(path, model=model, extra=[shared, {"again": shared}, shared[:10]])
    with StateFile(path) as file:
        assert "model.tied.weight" not in file.entries
        assert sum(e.size for n, e in file.entries.items() if "extra" in n) == 4 * 1010
    extra = load_state(path)
    assert extra[0] is extra[1]["again"]
    other = build(seed=5)
    other.tied = other[2]
    load_state(path, model=other)
    assert_same_bits(other.parameters(), model.parameters())


def test_names_that_meet_are_told_apart(path):
    extra = {"a.b": torch.zeros(2), "a": {"b": torch.ones(2)}}
    save_state(path, extra=extra)
    extra = load_state(path)
    assert extra["a.b"][0] == 0 and extra["a"]["b"][0] == 1


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
    """Of those that are saved, and of a model that is loaded."""
    real, live, most = torch.empty, set(), 0

    def counted(*args, **kwargs):
        nonlocal most
        tensor = real(*args, **kwargs)
        live.add(number := len(live) + id(tensor))
        weakref.finalize(tensor, live.discard, number)
        most = max(most, len(live))
        return tensor

    ordered = [torch.randn(9, 9) for _ in range(5)]
    model, other = build(), build(seed=5)
    monkeypatch.setattr(torch, "empty", counted)
    save_state(path, model=model, extra=ordered, rng=False)
    assert most == 0
    save_state(path, extra=[tensor.t() for tensor in ordered], rng=False)
    assert most == 1
    save_state(path, model=model, rng=False)
    monkeypatch.setattr(layout, "PIECE", 100)  # models are larger than what is held
    most = 0
    load_state(path, model=other)
    assert most == 1
    assert_same_bits(other.state_dict().values(), model.state_dict().values())


@pytest.mark.slow
def test_the_memory_of_a_save_and_of_a_load(tmp_path):
    """In processes of their own, since what they took is counted by the system: one tensor of 64 MB
    and what is copied ahead."""
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
    for what, limit in (("save", 32 + 16), ("load", 64 + 32)):
        done = subprocess.run([sys.executable, "-c", code, what], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert float(done.stdout) < limit, what


class Subclassed(argparse.Namespace):
    pass


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value, message",
    [
        (lambda: 0, "'extra.k.1' is a builtins.function"),
        ({"a": range(3)}, "'extra.k.1.a' is a builtins.range"),
        ({"a": 2**9000}, "'extra.k.1.a' is a number of 9,001 bits"),
        (Subclassed(a=1), "'extra.k.1' is a .*Subclassed.*such as vars"),
        ({torch.zeros(2)}, "an element of the set 'extra.k.1' is a tensor"),
        (datetime.datetime.now(ZoneInfo("UTC")), "'extra.k.1' has the time zone.*isoformat"),
        (torch.zeros([1] * 65), "'extra.k.1' has 65 dimensions"),
        (FakeTensorMode().from_tensor(torch.zeros(2)), "'extra.k.1' is a FakeTensor"),
        (torch.nested.nested_tensor([torch.ones(2)]), "'extra.k.1' is a nested tensor"),
        (np.array(["a"]), "'extra.k.1' is a NumPy array that torch cannot hold"),
        (torch.zeros(2, device="meta"), "'extra.k.1' is on the meta device"),
        (torch.eye(2).to_sparse(), "'extra.k.1' is sparse"),
        (torch.zeros(2, dtype=torch.complex64), "'extra.k.1' is complex; save torch.view_as_real"),
        ({torch.zeros(2): 1}, "a key of 'extra.k.1.*is a tensor"),
    ],
)
def test_what_a_file_does_not_hold_is_named(value, message, path):
    save_state(path, extra="old")
    with pytest.raises(TypeError, match=message):
        save_state(path, extra={"k": [0, value]})
    assert load_state(path) == "old" and os.listdir(path.parent) == [path.name]


def test_other_refusals(path):
    loop = []
    loop.append(loop)
    with pytest.raises(TypeError, match="contains itself"):
        save_state(path, extra=loop)
    with pytest.raises(TypeError, match="model is a OrderedDict without state_dict"):
        save_state(path, model=build().state_dict())
    with pytest.raises(ValueError, match="at least 1"):
        save_state(path, keep=0)
    with pytest.raises(ValueError, match="number in the name"):
        save_state(path.with_name("last.safetensors"), keep=2)
    assert not os.listdir(path.parent)
    with pytest.raises(FileNotFoundError):
        load_state(path)
    with pytest.raises((StateFileError, IsADirectoryError)):
        load_state(path.parent)


def test_dtensors_are_refused(path, tmp_path):
    import torch.distributed as dist
    from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        tensor = distribute_tensor(torch.ones(4), DeviceMesh("cpu", [0]), [Replicate()])
        with pytest.raises(TypeError, match="'extra.0' is a DTensor.*torch.distributed.checkpoint"):
            save_state(path, extra=[tensor])
        save_state(path, model=nn.Linear(4, 1))
        model = nn.Linear(4, 1)
        model.weight = nn.Parameter(
            distribute_tensor(torch.ones(1, 4), DeviceMesh("cpu", [0]), [Replicate()])
        )
        with pytest.raises(ValueError, match="'weight' of the model is a DTensor"):
            load_state(path, model=model)
    finally:
        dist.destroy_process_group()


class Attack:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_length_like_the_beginning_of_a_pickle(path):
    for count in range(0, 264, 8):  # of characters, for every length modulo 256
        save_state(path, extra="x" * count, rng=False)
        assert load_state(path) == "x" * count
        if path.read_bytes()[0] == 0x80:
            return
    raise AssertionError("none had the length that was looked for")


@pytest.mark.parametrize("write", [torch.save, lambda v, p: p.write_bytes(pickle.dumps(v))])
def test_a_pickle_is_not_opened(write, path, tmp_path):
    write(Attack(tmp_path / "attacked"), path)
    with pytest.raises(StateFileError, match="pickles run code"):
        load_state(path)
    assert not (tmp_path / "attacked").exists()
    assert headroom.latest(tmp_path) is None


def signed(path, change):
    """The file with its header changed, and a checksum that fits."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    document = json.loads(header["__metadata__"]["headroom"])
    change(header, document)
    header["__metadata__"] |= {"headroom": json.dumps(document), "crc32": "0" * 8}
    text = json.dumps(header, separators=(",", ":")).encode()
    begin = bytearray(struct.pack("<Q", len(text)) + text)
    begin[8 + len(PREFIX) :][:8] = b""
    field = 8 + len(PREFIX)
    begin[field : field + 8] = f"{zlib.crc32(begin):08x}".encode()
    path.write_bytes(bytes(begin) + data[8 + length :])


def changed(name, **fields):
    return lambda header, document: header[name].update(fields)


BAD_HEADERS = {
    "no time": (lambda h, d: d.update(saved_ns="now"), "'saved_ns' is a str"),
    "later": (lambda h, d: d.update(format=3), "format 3.*upgrade"),
    "overlap": (changed("extra.1", data_offsets=[0, 16]), "'extra.1'"),
    "hole": (changed("extra.1", data_offsets=[20, 36]), "does not follow"),
    "past the end": (changed("extra.1", shape=[400], data_offsets=[16, 1616]), "'extra.1'"),
    "huge": (changed("extra.0", shape=[2**40, 2**40]), "'extra.0' has 16 bytes"),
    "negative": (changed("extra.0", shape=[-2, -2]), "'extra.0'"),
    "float": (changed("extra.0", shape=[4.0]), "'extra.0'"),
    "dtype": (changed("extra.0", dtype="O"), "malformed: 'O'"),
    "not listed": (lambda h, d: d["tensors"].pop("extra.0"), "malformed"),
    "no sums": (lambda h, d: d["tensors"]["extra.0"].update(crc32=[]), "'extra.0' has 0 checks"),
    "stride": (lambda h, d: d["tensors"]["extra.0"].update(stride=[2**40]), "'extra.0' has str"),
    "no tree": (lambda h, d: d.pop("tree"), "malformed"),
    "no piece": (lambda h, d: d.update(piece=0), "pieces of 0"),
    "kind": (lambda h, d: d["tree"].update(extra={"$": "eval", "code": "1"}), "no kind 'eval'"),
    "dtype name": (lambda h, d: d["tree"].update(extra={"$": "dtype", "name": "load"}), "'load'"),
    "refers": (
        lambda h, d: d["tree"].update(extra={"$": "tensor", "name": "../x"}),
        "refers to '../x'",
    ),
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_a_header_made_up_is_refused(name, path):
    change, message = BAD_HEADERS[name]
    save_state(path, extra=[torch.randn(4), torch.randn(4)], rng=False)
    signed(path, lambda header, document: None)
    load_state(path)
    signed(path, change)
    with pytest.raises(StateFileError, match=message):
        load_state(path)


def test_other_maps_are_refused(path):
    model, optimizer = made("adamw8bit")
    step(model, optimizer)
    save_state(path, model=model, optimizer=optimizer)
    signed(path, lambda header, document: document.update(maps_crc32="00000000"))
    load_state(path, model=model)
    with pytest.raises(StateFileError, match="stand for other values"):
        load_state(path, optimizer=optimizer)


# ---- damage --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    """The bytes of a small state, with the place of each tensor in them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "small"
        model, optimizer = made("adamw8bit-remainder16")
        step(model, optimizer)
        save_state(path, model=model, optimizer=optimizer, rng=False)
        with StateFile(path) as file:
            return path.read_bytes(), file.entries


def test_every_flipped_bit_is_found_and_the_tensor_named(small, memory_path):
    data, entries = small
    path = memory_path / "state"
    choose = random.Random(0)
    header = min(entry.start for entry in entries.values())
    ends = [0, header, len(data)]
    found = Counter()
    for i in range(1000):
        place = choose.randrange(ends[i % 2], ends[i % 2 + 1])  # as many in the header
        flipped = bytearray(data)
        flipped[place] ^= 1 << choose.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(StateFileError) as error, StateFile(path) as file:
            file.read(progress=False)
        names = [n for n, e in entries.items() if e.start <= place < e.start + e.size]
        message = str(error.value)
        if names:
            assert f"'{names[0]}' is damaged" in message
        else:
            assert "header" in message or "beginning" in message or "pickle" in message
        assert str(path) in message
        found[bool(names)] += 1
    assert found == {True: 500, False: 500}


def test_every_truncation_is_found(memory_path):
    faults.save(memory_path, 1.0)
    path = memory_path / faults.FILE
    data = path.read_bytes()
    for length in reversed(range(len(data))):
        os.truncate(path, length)
        with pytest.raises(StateFileError):
            StateFile(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(StateFileError, match="longer than it was"):
        StateFile(path)


def test_a_bad_file_changes_nothing(small, path):
    data, entries = small
    name = "model.2.weight"
    flipped = bytearray(data)
    flipped[entries[name].start] ^= 1
    path.write_bytes(flipped)
    model, optimizer = made("adamw8bit-remainder16", seed=5)
    step(model, optimizer)
    before = copy.deepcopy((model, optimizer)), torch.get_rng_state()
    with pytest.raises(StateFileError, match=f"'{name}' is damaged.*Nothing was loaded.*latest"):
        load_state(path, model=model, optimizer=optimizer)
    assert_same((model, optimizer), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])


def test_a_state_that_does_not_fit_changes_nothing(path):
    model, optimizer = made("adamw")
    step(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    save_state(path, model=model, optimizer=optimizer, scheduler=scheduler)

    def check(error, message, model, optimizer, **more):
        step(model, optimizer)
        before = copy.deepcopy((model, optimizer))
        with pytest.raises(error, match=message):
            load_state(path, model=model, optimizer=optimizer, **more)
        assert_same((model, optimizer), before)

    class Refusing:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            if state:
                raise ValueError("not this one")

    check(ValueError, "not this one", *made("adamw", seed=5), scheduler=Refusing())
    check(StateFileError, "has no 'scaler'", *made("adamw", seed=5), scaler=Refusing())
    wider = nn.Sequential(nn.Linear(5, 70), nn.BatchNorm1d(70), nn.Linear(70, 4))
    check(ValueError, r"2.* has shape \(3.*, the model's \(4", wider, ADAMW(wider.parameters()))
    longer = nn.Sequential(*build(), nn.Linear(3, 1))
    check(ValueError, "lacks '3.bias'", longer, ADAMW(longer.parameters()))
    shorter = build()[:2]
    check(ValueError, "has what the model lacks: '2.bias'", shorter, ADAMW(shorter.parameters()))
    load_state(path, model=longer, strict=False)


# ---- faults --------------------------------------------------------------------------------------


def test_a_kill_at_any_call_leaves_a_whole_file(memory_path):
    line = [sys.executable, faults.__file__, str(memory_path)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    kills, limits = map(int, done.stdout.split())
    assert kills >= 50 and limits >= 9


ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ESTALE)


@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
def test_an_error_of_any_call_leaves_the_old_file_and_says_what_to_do(number, memory_path):
    faults.save(memory_path, 1.0)
    names = faults.count_calls(memory_path)
    assert {"open", "flock", "pwrite", "fsync", "replace", "close"} <= set(names)
    renamed = names.index("replace")
    for at, name in enumerate(names):
        for forever in (False, True):
            try:
                with faults.Shim(at, number, forever):
                    faults.save(memory_path, 2.0)
                assert name == "close" and at > renamed
            except OSError as error:
                assert error.errno == number and faults.FILE in str(error)
                wanted = "save again" if at > renamed else atomic.ADVICE.get(number, "elsewhere")
                assert wanted in str(error) and os.strerror(number) in str(error)
                left = [file.stat().st_size for file in memory_path.glob(".*")]
                assert forever or not any(left)
            assert faults.loaded(memory_path) == (2.0 if at > renamed else 1.0)
            faults.save(memory_path, 1.0)


def test_short_writes_are_completed(memory_path):
    names = faults.count_calls(memory_path)
    for at, name in enumerate(names):
        if name == "pwrite":
            with faults.Shim(at, "short"):
                faults.save(memory_path, 2.0)
            assert faults.loaded(memory_path) == 2.0


def test_a_file_system_without_locks(memory_path):
    at = faults.count_calls(memory_path).index("flock")
    with faults.Shim(at, errno.ENOLCK):
        faults.save(memory_path, 2.0)
    assert faults.loaded(memory_path) == 2.0


def test_a_folder_that_is_none_or_not_writable(tmp_path):
    with pytest.raises(NotADirectoryError, match="not exist; save in a folder"):
        (tmp_path / "file").touch()
        faults.save(tmp_path / "file" / "folder", 1.0)
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    faults.save(tmp_path, 1.0)
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError, match="is as it was; save in a folder that you may"):
            faults.save(tmp_path, 2.0)
        assert faults.loaded(tmp_path) == 1.0
    finally:
        tmp_path.chmod(0o700)


def test_two_writers(tmp_path):
    faults.save(tmp_path, 1.0)
    partial = tmp_path / atomic.partial_of(faults.FILE)
    with open(partial, "wb") as file:
        file.write(b"what a killed process left" * 1000)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StateFileError, match="being written by another.*rank 0"):
            faults.save(tmp_path, 2.0)
        assert faults.loaded(tmp_path) == 1.0 and partial.stat().st_size
    faults.save(tmp_path, 3.0)
    assert faults.loaded(tmp_path) == 3.0 and not partial.exists()


def test_many_writers_at_once(memory_path):
    faults.save(memory_path, 0.0)
    done, refused = [], []

    def write(value):
        for _ in range(30):
            try:
                faults.save(memory_path, value)
                done.append(value)
            except StateFileError:
                refused.append(value)

    threads = [threading.Thread(target=write, args=(float(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        faults.loaded(memory_path)
    assert done and len(done) + len(refused) == 120
    assert os.listdir(memory_path) == [faults.FILE]


def test_a_link_goes_on_pointing_to_the_file(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / faults.FILE).symlink_to(tmp_path / "real" / "state")
    faults.save(tmp_path, 1.0)
    assert (tmp_path / faults.FILE).is_symlink() and faults.loaded(tmp_path) == 1.0
    assert os.listdir(tmp_path / "real") == ["state"]


def test_a_save_at_the_end_of_the_process(path, monkeypatch):
    """Then no threads can be had."""
    extra = torch.randn(PIECE // 4)
    monkeypatch.setattr("concurrent.futures.thread._shutdown", True)
    save_state(path, extra=extra)
    monkeypatch.undo()
    assert_same_bits([load_state(path)], [extra])


def test_either_library_sums_alike(path, monkeypatch):
    isal_zlib = pytest.importorskip("isal.isal_zlib")
    extra = torch.randn(PIECE // 3)
    for writer, reader in ((zlib, isal_zlib), (isal_zlib, zlib)):
        monkeypatch.setattr(layout, "crc32", writer.crc32)
        save_state(path, extra=extra)
        monkeypatch.setattr(layout, "crc32", reader.crc32)
        assert_same_bits([load_state(path)], [extra])


# ---- many files ----------------------------------------------------------------------------------


def test_keep_and_latest(tmp_path):
    assert headroom.latest(tmp_path) is None
    others = ["step-x.safetensors", "step-7.txt", "notes-1.safetensors"]
    for name in others:
        (tmp_path / name).write_text("not a state")
    save_state(tmp_path / "best-1.safetensors", extra="best", rng=False)
    (tmp_path / atomic.partial_of("step-0.safetensors")).write_text("left by a kill")
    for i in range(8, 12):
        path = tmp_path / f"step-{i}.safetensors"
        save_state(path, extra=i, keep=3, rng=False)
        assert headroom.latest(tmp_path) == path
    kept = {f"step-{i}.safetensors" for i in (9, 10, 11)}
    assert set(os.listdir(tmp_path)) == kept | {*others, "best-1.safetensors"}

    data = bytearray(path.read_bytes())
    path.write_bytes(data[:-1])
    with pytest.warns(UserWarning, match="passed over.*step-11.*malformed|cut off|damaged"):
        assert headroom.latest(tmp_path) == tmp_path / "step-10.safetensors"
    # A run that starts again keeps what it has written, whatever the numbers.
    save_state(tmp_path / "step-1.safetensors", extra=1, keep=1, rng=False)
    left = {name for name in os.listdir(tmp_path) if name.startswith("step-1")}
    assert left == {"step-1.safetensors", "step-11.safetensors"}  # the damaged one is left alone


def test_latest_looks_at_everything(tmp_path):
    for i in (1, 2):
        save_state(tmp_path / f"{i}", extra=torch.randn(100), rng=False)
    data = bytearray((tmp_path / "2").read_bytes())
    data[-1] ^= 1
    (tmp_path / "2").write_bytes(data)
    with pytest.warns(UserWarning, match="'extra' is damaged"):
        assert headroom.latest(tmp_path) == tmp_path / "1"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert headroom.latest(tmp_path, verify=False) == tmp_path / "2"


def test_the_order_is_that_of_saving_whatever_the_clock_and_the_names_say(tmp_path, monkeypatch):
    """The clock is set back, and then stands still; a lower step is saved later; files are touched
    and renamed."""
    times = iter([9000, 8000, 7000, 10, 10, 10])
    monkeypatch.setattr(save.time, "time_ns", lambda: next(times))
    for number in (8, 9, 10, 3, 4):
        path = tmp_path / f"step-{number}.safetensors"
        save_state(path, extra=number, rng=False, keep=3)
        assert headroom.latest(tmp_path) == path
    assert set(os.listdir(tmp_path)) == {f"step-{n}.safetensors" for n in (10, 3, 4)}
    os.utime(tmp_path / "step-10.safetensors")
    path = path.rename(tmp_path / "step-0.safetensors")
    assert headroom.latest(tmp_path) == path
    save_state(tmp_path / "another.safetensors", extra=1, rng=False)
    assert headroom.latest(tmp_path) == tmp_path / "another.safetensors"


def test_files_without_a_number_count_as_older_and_go_by_their_times(tmp_path):
    """Those of format 1."""
    for i, name in enumerate(OPTIMIZERS):
        data = state_of(name, 1).read_bytes()
        (tmp_path / f"{9 - i}").write_bytes(data)
    times = {}
    for path in tmp_path.iterdir():
        with StateFile(path) as file:
            assert file.sequence == 0
            times[file.document["saved_ns"]] = path
    assert len(times) == 4 and headroom.latest(tmp_path) == times[max(times)]
    save_state(tmp_path / "0", extra=0)
    assert headroom.latest(tmp_path) == tmp_path / "0"


def test_the_highest_number_there_is(tmp_path):
    save_state(tmp_path / "1", extra=1)
    data = (tmp_path / "1").read_bytes()
    data = data.replace(b'"sequence":"0000000000000001"', b'"sequence":"9999999999999999"')
    (tmp_path / "1").write_bytes(data)
    signed(tmp_path / "1", lambda header, document: None)
    save_state(tmp_path / "2", extra=2)
    assert headroom.latest(tmp_path) == tmp_path / "2"


def test_latest_of_a_folder_that_is_missing(tmp_path):
    assert headroom.latest(tmp_path / "none") is None
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        headroom.latest(tmp_path / "file")


def test_latest_does_not_say_that_there_is_none_where_files_cannot_be_read(tmp_path, monkeypatch):
    """A run would begin anew beside its states."""
    save_state(tmp_path / "1.safetensors", extra=1)
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "dangling").symlink_to("nothing")
    (tmp_path / "loop").symlink_to("loop")  # cannot be read, not even by root
    with pytest.warns(UserWarning, match="passed over.*symbolic links.*loop"):
        assert headroom.latest(tmp_path) == tmp_path / "1.safetensors"
    (tmp_path / "1.safetensors").unlink()
    with pytest.raises(OSError, match="1 file in .*symbolic links") as error:
        headroom.latest(tmp_path)
    assert error.value.errno == errno.ELOOP
    (tmp_path / "loop").unlink()
    assert headroom.latest(tmp_path) is None

    save_state(tmp_path / "1.safetensors", extra=torch.ones(9))
    for at, number in (("open", errno.EACCES), ("preadv", errno.EIO)):
        real = getattr(os, at)

        def failing(file, *args, at=at, real=real, number=number):
            if at == "preadv" or ".safetensors" in str(file):
                raise OSError(number, os.strerror(number), str(file))
            return real(file, *args)

        with monkeypatch.context() as patch:
            patch.setattr(os, at, failing)
            with pytest.raises(OSError, match=os.strerror(number)):
                headroom.latest(tmp_path)
    assert headroom.latest(tmp_path) == tmp_path / "1.safetensors"


def test_latest_does_not_say_that_there_is_none_where_all_are_damaged(tmp_path):
    for i in range(2):
        save_state(tmp_path / f"{i}.safetensors", extra=torch.ones(9))
        os.truncate(tmp_path / f"{i}.safetensors", 900)
    with pytest.raises(StateFileError, match="2 files in .*none that is a whole state.*cut off"):
        headroom.latest(tmp_path)


def test_the_folder_is_made(tmp_path, monkeypatch):
    """And its name is on the disk before the file's."""
    synced = []
    real = atomic._sync_folder
    monkeypatch.setattr(atomic, "_sync_folder", lambda f: (synced.append(f), real(f)))
    path = tmp_path / "a" / "b" / "1.safetensors"
    save_state(path, extra=1)
    assert load_state(path) == 1
    assert synced == [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")]


def test_what_is_written_is_synced_before_it_is_renamed_and_its_folder_after(path, monkeypatch):
    calls, real = [], {name: getattr(os, name) for name in ("pwrite", "fsync", "replace")}

    def recorded(name):
        def call(file, *args):
            target = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else file
            calls.append((name, os.path.basename(target)))
            return real[name](file, *args)

        return call

    for name in real:
        monkeypatch.setattr(os, name, recorded(name))
    save_state(path, extra=[torch.ones(5), torch.ones(PIECE // 2)])
    partial = atomic.partial_of(path.name)
    end = [("fsync", partial), ("replace", partial), ("fsync", path.parent.name)]
    assert calls[-3:] == end and set(calls[:-3]) == {("pwrite", partial)}
    assert load_state(path)[0].tolist() == [1] * 5


# ---- files of earlier versions -------------------------------------------------------------------


def stored(name):
    """A run whose numbers follow from nothing but their places."""
    model, optimizer = made(name)
    step(model, optimizer)
    for number, tensor in enumerate(tensors(model, optimizer).values()):
        places = torch.arange(tensor.numel()).reshape(tensor.shape)
        tensor.copy_((places * (number + 3)) % 97)
    return model, optimizer


def state_of(name, version=layout.FORMAT):
    return STATES / f"format{version}-{name}.safetensors"


@pytest.mark.parametrize("version", range(1, layout.FORMAT + 1))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_files_of_every_version_load(name, version):
    model, optimizer = made(name, seed=5)
    assert load_state(state_of(name, version), model=model, optimizer=optimizer) == {"step": 1}
    assert_same(stored(name), (model, optimizer))
    step(model, optimizer)


def main():
    for name in OPTIMIZERS:
        model, optimizer = stored(name)
        state_of(name).parent.mkdir(exist_ok=True)
        save_state(state_of(name), model=model, optimizer=optimizer, extra={"step": 1}, rng=False)


if __name__ == "__main__":
    main()
