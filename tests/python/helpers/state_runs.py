"""Runs that are saved to state files and loaded again."""

import json
import struct
import zlib
from pathlib import Path

import headroom
import torch
from headroom.state.file import layout
from headroom.state.file.layout import PREFIX
from torch import nn

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
        weight = next(model.parameters())
        x = torch.randn(8, 5, dtype=weight.dtype).to(weight.device)
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


def state_of(name, version=layout.FORMAT):
    """The file of a version in tests/states."""
    return STATES / f"format{version}-{name}.safetensors"
