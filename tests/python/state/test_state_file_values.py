"""Values in state files: those that come back, of every type, dtype and shape, and those that are
refused."""

import argparse
import datetime
import os
from collections import Counter, OrderedDict
from pathlib import Path, PureWindowsPath

import numpy as np
import pytest
import torch
from headroom import StateFileError, load_state, save_state
from headroom.state.file import StateFile, layout
from headroom.state.file.layout import PIECE
from torch import nn
from torch._subclasses import FakeTensorMode

from helpers.bits import assert_same_bits
from helpers.state_runs import build

VALUES = {
    "scalars": [None, True, 1, -(2**70), 2**8192 - 1, 0.1, "text \u00fc \ud800 $", b"\0\xff"],
    "floats": [float("inf"), float("-inf"), 5e-324, -0.0],
    "nested": {"a": (1, [2, (3,)]), "b": {}, "c": [], "d": ()},
    "keys": {0: "a", "0": "b", (1, 2): "c", None: "d", 1.5: "e", float("inf"): "f"},
    "dollar": {"$": "tensor", "name": "nothing"},
    "mappings": [OrderedDict(b=1, a=2), Counter({3: 2, 5: 1})],
    "torch": [torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 3])],
    "numpy": [np.float64(0.1), np.int8(-3), np.bool_(True), np.uint32(7)],
    "sets": [{3, "a", (1, 2), None}, set(), frozenset({b"x"}), {frozenset({1}): 2}],
    "paths": [Path("/a/\u00fc"), Path("b"), {Path("k"): 1}],
}


def same(left, right):
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return [*left] == [*right] and all(map(same, left.values(), right.values()))
    if isinstance(left, (set, frozenset)):  # whose order is not their own
        return left == right
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


class Subclassed(argparse.Namespace):
    pass


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value, message",
    [
        (lambda: 0, "'extra.k.1' is a builtins.function"),
        ({"a": range(3)}, "'extra.k.1.a' is a builtins.range"),
        ({"a": 2**8192}, "'extra.k.1.a' is a number of 8,193 bits"),
        (Subclassed(a=1), "'extra.k.1' is a .*Subclassed.*such as vars"),
        ({torch.zeros(2)}, "an element of the set 'extra.k.1' is a tensor"),
        (datetime.datetime(2024, 2, 29), "'extra.k.1' is a datetime.datetime.*isoformat"),
        (argparse.Namespace(lr=0.1), "'extra.k.1' is a argparse.Namespace.*such as vars"),
        (PureWindowsPath("a"), "'extra.k.1' is a pathlib.*PureWindowsPath.* str"),
        (bytearray(b"a"), "'extra.k.1' is a builtins.bytearray"),
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
