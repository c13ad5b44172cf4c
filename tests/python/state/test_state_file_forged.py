"""Files that someone has made up, or that are no state files: what loading them raises."""

import math
import os
import pickle

import headroom
import pytest
import torch
from headroom import StateFileError, load_state, save_state

from helpers.state_runs import made, signed, step


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


def changed(name, **fields):
    return lambda header, document: header[name].update(fields)


BAD_HEADERS = {
    "no time": (lambda h, d: d.update(saved_ns="now"), "'saved_ns' is a str"),
    "not JSON": (lambda h, d: d.update(saved_ns=math.nan), "NaN is not JSON"),
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
