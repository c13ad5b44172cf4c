"""Entries of quantized layers made up by chance, in a state_dict and in safetensors files: each
loads and is read within its memory, or is refused with one of the errors that are documented, and
the weight is as it was."""

import copy
import json
import random
import struct
import sys
import tempfile
from pathlib import Path

import headroom
import torch
from headroom.nn import Linear4bit, Linear8bit
from tests.python.fuzz._driver import main
from torch import nn

STATE = "weight.quant_state.bitsandbytes__"
DTYPES = [torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.int64]
VALUES = [None, True, 0, -1, 1, 32, 64, 2**63, 1e300, "", "nf4", "float32", "load", [], [1, 2], {}]
NAMES = ["F32", "BF16", "U8", "I8", "F99", None, 3, []]


def layer(rng: random.Random) -> nn.Linear:
    out, in_ = rng.randint(1, 40), rng.randint(1, 70)
    if rng.random() < 0.3:
        return Linear8bit(in_, out)
    options = dict(format=rng.choice(["nf4", "fp4"]), block_size=rng.choice([32, 64, 4096]))
    return Linear4bit(in_, out, double=rng.random() < 0.6, **options)


def changed(rng: random.Random, entries: dict) -> dict:
    """Returns entries of which some are gone, of other sizes, dtypes, or texts."""
    entries = dict(entries)
    for _ in range(rng.randint(0, 3)):
        key = rng.choice(list(entries) or ["weight"])
        value = entries.get(key)
        turn = rng.randrange(8)
        if turn == 0 or not isinstance(value, torch.Tensor) or value.is_sparse or value.is_meta:
            entries.pop(key, None)
        elif turn == 1:
            entries[key] = value.flatten()[: rng.randint(0, value.numel())]
        elif turn == 2:
            entries[key] = torch.cat([value.flatten()] * 2)
        elif turn == 3:
            entries[key] = value.to(rng.choice(DTYPES))
        elif turn == 4 and value.numel():
            entries[key] = torch.randint_like(value.to(torch.uint8), 256).to(value.dtype)
        elif turn == 5:
            other = rng.choice(["SCB", "scales", "weight.absmax", f"{STATE}nf4", f"{STATE}fp4"])
            entries[other] = value
        elif turn == 6:
            entries[key] = rng.choice([None, "text", [1], value.to("meta"), value.to_sparse()])
        elif key.startswith(STATE):
            try:
                text = json.loads(bytes(value.flatten().tolist()).decode())
                text[rng.choice([*text, "other"])] = rng.choice(VALUES)
                raw = json.dumps(text).encode()
            except (ValueError, TypeError, AttributeError):
                raw = b"["
            entries[key] = torch.tensor(list(raw), dtype=torch.uint8)
    return entries


def in_a_state_dict(rng: random.Random) -> None:
    ours = layer(rng)
    before = copy.deepcopy(ours.state_dict())
    entries = changed(rng, layer(rng).state_dict() if rng.random() < 0.1 else before)
    try:
        ours.load_state_dict(entries, strict=rng.random() < 0.5, assign=rng.random() < 0.2)
    except RuntimeError as error:
        if "cannot be loaded" not in str(error):
            return  # torch refuses a bias, or keys that it does not know, beside what it loads
        now = ours.state_dict()
        assert all(torch.equal(now[key], before[key]) for key in before if key != "bias")
        return
    if not ours.weight.is_meta and not ours.scales.is_meta:
        ours.dequantize(torch.float32)
        ours.requires_grad_(False)


def in_a_file(rng: random.Random) -> None:
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 4))
    if rng.random() < 0.5:
        headroom.quantize(model, rng.choice(["nf4", "int8"]), skip=())
    header, data = {}, b""
    for key, value in model.state_dict().items():
        raw = (
            bytes(value.contiguous().flatten().view(torch.uint8).tolist()) if value.dim() else b"\0"
        )
        name = {torch.float32: "F32", torch.uint8: "U8", torch.int8: "I8"}[value.dtype]
        offsets = [len(data), len(data) + len(raw)]
        header[key] = {"dtype": name, "shape": list(value.shape), "data_offsets": offsets}
        data += raw
    for _ in range(rng.randint(0, 2)):
        entry = header[rng.choice(list(header))]
        field = rng.choice(list(entry))
        entry[field] = rng.choice(NAMES if field == "dtype" else VALUES + [[0, 10**6], [-4, 4]])
    text = bytearray(json.dumps(header).encode())
    if rng.random() < 0.2:
        text[rng.randrange(len(text))] = rng.randrange(256)
    raw = bytearray(struct.pack("<Q", len(text)) + text + data)
    if rng.random() < 0.2:
        raw = raw[: rng.randrange(len(raw))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(raw)
        with torch.device("meta"):
            empty = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 4))
        try:
            headroom.load_quantized(empty, path, skip=())
        except (ValueError, OSError):
            return
        empty(torch.randn(2, 8))


def case(rng: random.Random) -> None:
    torch.manual_seed(rng.randrange(2**31))
    rng.choice([in_a_state_dict, in_a_state_dict, in_a_file])(rng)


if __name__ == "__main__":
    sys.exit(main(case))
