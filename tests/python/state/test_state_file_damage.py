"""State files that are damaged, cut off or forged, or do not fit."""

import copy
import os
import random
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from headroom import StateFileError, load_state, save_state
from headroom.state.file import StateFile
from torch import nn

from helpers import state_file_faults as faults
from helpers.state_runs import ADAMW, assert_same, build, made, step

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
