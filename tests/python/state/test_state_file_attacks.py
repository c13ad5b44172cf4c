"""State files against what others do to them: threads and processes that write meanwhile, headers
that someone has made up, storage that is gone."""

import copy
import json
import os
import struct
import subprocess
import sys
import threading
import zlib

import numpy as np
import pytest
import torch
from headroom import load_state, save_state
from headroom.state import load
from headroom.state.file import StateFile, layout, writing
from headroom.state.file.layout import PIECE, PREFIX, SMALL
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.bits import assert_same_bits
from helpers.small_runs import trained


def values(model, optimizer):
    return [
        *model.state_dict().values(),
        *(t for entry in optimizer.state_dict()["state"].values() for t in entry.values()),
    ]


# ---- threads and processes that write meanwhile --------------------------------------------------


@pytest.mark.parametrize("count", [5, SMALL // 4 + 1, PIECE // 4 * 2 + 3])
def test_weights_that_change_during_a_save_make_a_file_that_loads(count, path, monkeypatch):
    """Whatever is written last is changed as soon as the system has been asked to write."""
    tensor = torch.zeros(count)
    real = os.pwrite

    def changing(file, data, offset):
        tensor.add_(1)
        return real(file, data, offset)

    monkeypatch.setattr(os, "pwrite", changing)
    save_state(path, extra=[torch.zeros(9), tensor], rng=False)
    monkeypatch.undo()
    assert load_state(path)[1].shape == tensor.shape


def test_a_parameter_that_gets_another_tensor_during_a_save(path, monkeypatch):
    param = nn.Parameter(torch.arange(6.0))
    real = writing.next_sequence

    def changing(folder):
        param.data = torch.zeros(3, 4).t()
        return real(folder)

    monkeypatch.setattr(writing, "next_sequence", changing)
    save_state(path, extra=[param], rng=False)
    assert load_state(path)[0].tolist() == [0, 1, 2, 3, 4, 5]


def damage_end(path):
    with open(path, "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"!!!!")


def cut_off(path):
    os.truncate(path, 3000)


@pytest.mark.parametrize("change", [damage_end, cut_off])
@pytest.mark.parametrize("piece", [PIECE, 100], ids=["held", "one by one"])
@pytest.mark.parametrize("target", ["cpu", "device"])
def test_a_file_that_changes_behind_the_checks_loads_what_was_checked(
    change, piece, target, path, monkeypatch
):
    """What was mapped gave a SIGBUS, or other numbers."""
    monkeypatch.setattr(layout, "PIECE", piece)
    if target == "device":
        monkeypatch.setattr(load, "_on_cpu", lambda device: False)
    saved, other = trained(), trained(1)
    save_state(path, model=saved[0], optimizer=saved[1])
    real = StateFile.read

    def read(self, *args, **options):
        found = real(self, *args, **options)
        change(self.path)
        return found

    monkeypatch.setattr(StateFile, "read", read)
    load_state(path, model=other[0], optimizer=other[1])
    assert_same_bits(values(*other), values(*saved))


class Interrupts(TorchDispatchMode):
    """Raises in the place of one operation."""

    def __init__(self, number, error):
        super().__init__()
        self.number, self.error, self.count = number, error, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if self.count == self.number:
            raise self.error
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")], ids=str)
@pytest.mark.parametrize("piece", [PIECE, 100], ids=["held", "one by one"])
def test_an_interrupted_load_leaves_the_run_as_it_was(error, piece, path, monkeypatch):
    """Whichever operation it is that does not run."""
    monkeypatch.setattr(layout, "PIECE", piece)
    save_state(path, model=(saved := trained())[0], optimizer=saved[1])
    torch.manual_seed(7)
    other = trained(1)
    before, rng = copy.deepcopy(other), torch.get_rng_state()
    with Interrupts(-1, error) as counting:
        load_state(path, model=before[0], optimizer=before[1], progress=False)
    assert_same_bits(values(*before), values(*saved))
    torch.set_rng_state(rng)
    before = copy.deepcopy(other)
    # All is written by the last operations.
    for number in (*range(1, counting.count, 997), *range(counting.count - 120, counting.count, 3)):
        with pytest.raises(type(error)), Interrupts(number, error):
            load_state(path, model=other[0], optimizer=other[1], progress=False)
        assert_same_bits(values(*other), values(*before))
        assert torch.equal(torch.get_rng_state(), rng)


def test_where_no_thread_can_be_started_the_one_that_loads_reads(path, monkeypatch):
    monkeypatch.setattr(layout, "PIECE", 100)
    saved, other = trained(), trained(1)
    save_state(path, model=saved[0], optimizer=saved[1])

    def start(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    load_state(path, model=other[0], optimizer=other[1], progress=False)
    assert_same_bits(values(*other), values(*saved))


class Hooked(nn.Linear):
    """Saves its weight negated, as modules do that keep it in another form."""

    def __init__(self):
        super().__init__(3, 3)
        self.register_load_state_dict_pre_hook(self.back)
        self.register_state_dict_post_hook(self.there)

    @staticmethod
    def there(module, state, prefix, _):
        state[prefix + "weight"] = -state[prefix + "weight"]

    @staticmethod
    def back(module, state, prefix, *_):
        state[prefix + "weight"] = -state[prefix + "weight"]


class Loading(nn.Module):
    """Reads what it saves by itself."""

    def __init__(self, value):
        super().__init__()
        self.scale = value

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "scale"] = torch.tensor([self.scale])

    def _load_from_state_dict(self, state_dict, prefix, *_):
        self.scale = state_dict[prefix + "scale"].item()


@pytest.mark.parametrize("piece", [PIECE, 10], ids=["held", "one by one"])
@pytest.mark.parametrize("compiled", [False, True])
def test_modules_that_load_in_ways_of_their_own(compiled, piece, path, monkeypatch):
    def build(value):
        model = nn.Sequential(
            Hooked(), Loading(value), nn.BatchNorm1d(3), nn.LazyLinear(2), nn.Embedding(4, 2)
        )
        model.shared = model[4]
        model[2].num_batches_tracked += int(value)
        if value == 1.0:
            model[3](torch.zeros(1, 3))
        return torch.compile(model) if compiled else model

    monkeypatch.setattr(layout, "PIECE", piece)
    one, two = build(1.0), build(2.0)
    save_state(path, model=one)
    load_state(path, model=two)
    assert_same_bits(two.state_dict().values(), one.state_dict().values())
    inner = getattr(two, "_orig_mod", two)
    assert inner[1].scale == 1 and inner[2].num_batches_tracked == 1


def test_another_kind_of_generator_is_refused_before_anything_changes(path):
    saved, other = trained(), trained(1)
    save_state(path, model=saved[0], optimizer=saved[1])
    before, rng = copy.deepcopy(other), torch.get_rng_state()
    kept = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(0))
        with pytest.raises(ValueError, match="was a MT19937 .* is a PCG64 here.*rng=False"):
            load_state(path, model=other[0], optimizer=other[1])
        assert_same_bits(values(*other), values(*before))
        assert torch.equal(torch.get_rng_state(), rng)
        load_state(path, model=other[0], rng=False)
        save_state(path)
        drawn = np.random.random()
        load_state(path)
        assert np.random.random() == drawn
    finally:
        np.random.set_bit_generator(kept)


# ---- storage that is gone ------------------------------------------------------------------------


def freed(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


def cut(tensor):
    tensor.untyped_storage().resize_(tensor.nbytes - 1)
    return tensor


@pytest.mark.parametrize("shorten", [freed, cut])
def test_freed_storage_is_refused(shorten, path):
    """In a process of its own it was a SIGSEGV."""
    save_state(path, extra=1)
    model, optimizer = trained()
    shorten(model[0].weight.data)
    with pytest.raises(ValueError, match="storage of 'model.0.weight' has .* bytes"):
        save_state(path, model=model)
    model, optimizer = trained()
    shorten(optimizer.state[model[0].weight]["exp_avg"])
    with pytest.raises(ValueError, match="storage of 'optimizer.state.0.exp_avg' has"):
        save_state(path, optimizer=optimizer)
    for tensor in (torch.ones(9), torch.ones(3, 4).t(), torch.ones(2, 9)[1, 1:]):
        with pytest.raises(ValueError, match="storage of 'extra.a' .*been freed"):
            save_state(path, extra={"a": shorten(tensor)})
    assert load_state(path) == 1
    freed(torch.ones(0))
    save_state(path, extra=freed(torch.ones(0)))


@pytest.mark.parametrize("piece", [PIECE, 100], ids=["held", "one by one"])
def test_a_model_without_storage_is_not_filled(piece, path, monkeypatch):
    monkeypatch.setattr(layout, "PIECE", piece)
    saved, other = trained(), trained(1)
    save_state(path, model=saved[0], optimizer=saved[1])
    before = copy.deepcopy(other)
    freed(other[0][1].weight.data)
    with pytest.raises(ValueError, match="storage of '1.weight of the model' has 0 bytes"):
        load_state(path, model=other[0], optimizer=other[1])
    del other[0][1].weight, before[0][1].weight
    assert_same_bits(values(*other)[:6], values(*before)[:6])


# ---- headers that someone has made up ------------------------------------------------------------


def with_header(text, data=b""):
    """A file with a header of any text, and a checksum that fits."""
    begin = bytearray(struct.pack("<Q", len(text)) + text)
    begin[8 + len(PREFIX) :][:8] = b"0" * 8
    field = 8 + len(PREFIX)
    begin[field : field + 8] = f"{zlib.crc32(begin):08x}".encode()
    return bytes(begin) + data


def with_document(document):
    metadata = {"crc32": "0" * 8, "sequence": "0" * 16, "headroom": document}
    return with_header(json.dumps({"__metadata__": metadata}, separators=(",", ":")).encode())


BOMBS = {
    "lists": "[" + "[]," * (8 << 20) + "[]]",
    "objects": "[" + '{"":0},' * (5 << 20) + "0]",
    "strings": "[" + '"ab",' * (5 << 20) + "0]",
    "depth": "[" * (30 << 20),
    "closed depth": "[" * 5000 + "]" * 5000,
    "hidden in strings": '["]",' * 5000 + '["["' + ',"["]' * 5000 + "]",
    "number": "1" * (30 << 20),
}


@pytest.mark.slow
def test_a_bomb_takes_no_more_memory_than_some_files(tmp_path):
    """In a process of its own, whose memory the system counts; it took gigabytes."""
    for name, bomb in BOMBS.items():
        (tmp_path / f"{name} 1").write_bytes(with_document('{"tree":' + bomb + "}"))
        header = PREFIX + b'00000000"},"a":' + bomb.encode() + b"}"
        (tmp_path / f"{name} 2").write_bytes(with_header(header))
    code = f"""
import os, resource, headroom
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in os.scandir({str(tmp_path)!r}):
    try:
        headroom.load_state(path)
    except headroom.StateFileError as error:
        assert len(str(error)) < 1000
        print(path.name)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *refused, memory = done.stdout.splitlines()
    assert len(refused) == 2 * len(BOMBS) and int(memory) < 400


def test_more_values_than_a_header_may_have_are_refused_by_the_save(path, monkeypatch):
    monkeypatch.setattr(layout, "MOST_VALUES", 1000)
    save_state(path, extra=[0] * 900, rng=False)
    save_state(path, extra="[,:{" * 1000, rng=False)
    assert load_state(path) == "[,:{" * 1000
    with pytest.raises(ValueError, match="has 1,0.. values, and 1,000 .*lists of numbers as tens"):
        save_state(path, extra=[0] * 1000, rng=False)
    assert load_state(path) == "[,:{" * 1000


def test_a_nesting_is_bounded_for_saves_as_for_loads(path):
    value = {}
    for _ in range(97):
        value = {"$": value}  # which takes most brackets
    save_state(path, extra=value)
    assert load_state(path) == value
    for _ in range(10):
        value = {"$": value}
    with pytest.raises(TypeError, match="contains itself, or is nested too deeply"):
        save_state(path, extra=value)
