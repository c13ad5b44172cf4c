"""Fuzzes files of adapters and of weights in few bits, and arguments of what puts them into models.

A file or an argument is refused with a ValueError, a TypeError for arguments or an OSError, in a
sentence that this package has written, and the model is then as it was; or it is taken, and the
model runs.
"""

from __future__ import annotations

import json
import random
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import headroom
import safetensors.torch
import torch
from headroom.state import load_adapter, save_adapter
from tests.python.fuzz._driver import changed_tensor, hostile, main, mutated, snapshot
from torch import Tensor, nn

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
TEXTS = ("(", "[", "*", "(?P<a", "up", ".*", "up|down", "0.up", "a.b", "keys", "all-linear", "\0")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.head(self.norm(x + self.down(self.up(x).relu())))


def filled(*stages: str) -> Model:
    """A model that is quantized and has adapters, as the stages say."""
    torch.manual_seed(3)
    model = Model().eval()
    for stage in stages:
        if stage in ("nf4", "fp4", "int8"):
            headroom.quantize(model, stage, block_size=32)
        else:
            options = OPTIONS[stage]
            headroom.lora(model, 2, name=stage, **options)
            for param in model.parameters():
                if param.requires_grad:
                    nn.init.normal_(param)
    return model


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"targets": ["up", "down"]},
    "dora": {"dora": True, "targets": ["up"]},
    "all": {"targets": ["up", "down"], "alpha": 3, "rslora": True, "modules_to_save": ["norm"]},
}


@cache
def adapters() -> list[tuple[dict, dict[str, Tensor]]]:
    """Settings and tensors of good adapters."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name in OPTIONS:
            save_adapter(filled(name), folder, name)
            place = Path(folder) / name
            config = json.loads((place / CONFIG).read_text())
            found.append((config, safetensors.torch.load_file(place / TENSORS)))
    found[0][0]["alpha_pattern"] = {"^up": 4, "x.*": 1}
    return found


@cache
def weights() -> list[dict[str, Tensor]]:
    """Tensors of good files, wide and in few bits."""
    states = [filled(*stages).state_dict() for stages in ((), ("nf4",), ("fp4",), ("int8",))]
    return [{k: v.clone() for k, v in state.items() if k != "head.weight"} for state in states]


# ---- damaged files -------------------------------------------------------------------------------


def changed_state(rng: random.Random, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with names, values, shapes, dtypes or the texts in them changed."""
    state = dict(state)
    for _ in range(rng.choice([1, 1, 2, 4])):
        if not state:
            break
        key = rng.choice([*state])
        kind = rng.randrange(8)
        if kind == 0:
            del state[key]
        elif kind == 1:
            state[rng.choice([*state, "x", "up.SCB", "norm.weight.absmax", key + "x"])] = state[key]
        elif kind == 2:
            other = key.replace(*rng.choice([("up", "down"), ("lora_", "x."), (".", "..", 1)]))
            state[other] = state.pop(key)
        elif "quant_state" in key and kind < 7:
            state[key] = changed_text(rng, state[key])
        else:
            state[key] = changed_tensor(rng, state[key])
    return state


def changed_text(rng: random.Random, text: Tensor) -> Tensor:
    try:
        value = mutated(rng, json.loads(bytes(text.tolist())))
        data = json.dumps(value).encode()
    except (TypeError, ValueError, AttributeError):  # what JSON does not hold
        data = rng.choice([b"", b"[" * 50_000, b"{}", b'{"shape": [[]]}', b"\xff", b"null"])
    return torch.frombuffer(bytearray(data or b" "), dtype=torch.uint8)


def write_tensors(rng: random.Random, path: Path, state: dict[str, Tensor]) -> None:
    """Writes a file, now and then with a header that does not fit, or with bytes changed."""
    plain = {
        key: value.detach().contiguous().clone()
        for key, value in state.items()
        if isinstance(key, str) and is_plain(value)
    }
    try:
        data = safetensors.torch.save(plain)
    except Exception:  # a tensor or a name that no such file holds
        data = safetensors.torch.save({})
    if rng.random() < 0.3:
        length = struct.unpack("<Q", data[:8])[0]
        header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
        try:
            text = json.dumps(mutated(rng, header, rng.choice([1, 2]))).encode()
            data = struct.pack("<Q", len(text)) + text + rest
        except (TypeError, ValueError):
            pass
    if rng.random() < 0.1:
        changed = bytearray(data[: rng.choice([len(data), rng.randrange(len(data))])])
        for _ in range(rng.randrange(4)):
            if changed:
                changed[rng.randrange(len(changed))] = rng.randrange(256)
        data = bytes(changed)
    path.write_bytes(data)


def is_plain(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and not value.is_meta
        and (not value.numel() or value.untyped_storage().nbytes() > 0)
    )


def write_config(rng: random.Random, path: Path, config: dict) -> None:
    if rng.random() < 0.7:
        config = mutated(rng, config, rng.choice([1, 1, 2, 3]))
    if isinstance(config, dict) and rng.random() < 0.4:
        read = ("alpha_pattern", "lora_alpha", "lora_dropout", "modules_to_save", "use_dora")
        value = rng.choice([hostile(rng), rng.choice(TEXTS), {rng.choice(TEXTS): hostile(rng)}])
        config = config | {rng.choice([*read, "use_rslora", "peft_type"]): value}
    try:
        text = json.dumps(config)
    except (TypeError, ValueError):
        text = rng.choice(["", "{", "[" * 50_000, "null", '{"peft_type": "LORA"}'])
    path.write_text(text)


# ---- cases ---------------------------------------------------------------------------------------


def state_of(model: nn.Module) -> Any:
    """What must be as before where a call was refused."""
    modules = {name: (type(one), sorted(vars(one))) for name, one in model.named_modules()}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return modules, [(name, id(x), x.requires_grad, snapshot(x)) for name, x in tensors]


def tried(model: nn.Module, call: Callable[[], Any], refusals: tuple[type[Exception], ...]) -> str:
    """Runs a call that may be refused, and nothing be changed then."""
    before = state_of(model)
    try:
        call()
    except refusals as error:
        assert str(error) and len(str(error)) < 3000, "an error without a sentence"
        where = traceback.extract_tb(error.__traceback__)[-1]
        is_ours = "headroom" in where.filename and (where.line or "").startswith("raise ")
        of_system = isinstance(error, OSError) or "null byte" in str(error)
        assert is_ours or of_system, "not a sentence of this package"
        assert state_of(model) == before, "refused, but something has changed"
        return "refused"
    floats = [p for p in model.parameters() if p.is_floating_point()]
    own = [b for b in model.buffers() if b.dim()]  # all but a counter
    if {x.dtype for x in (*floats, *own)} == {torch.float32}:  # files may hold others
        with torch.no_grad():
            model.eval()(torch.arange(6))
    str(model)
    return "taken"


def adapter(rng: random.Random) -> str:
    model = filled(*rng.choice([(), ("nf4",), ("int8",), ("plain",), ("nf4", "all")]))
    config, tensors = rng.choice(adapters())
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_config(rng, place / CONFIG, config)
        changed = changed_state(rng, tensors) if rng.random() < 0.6 else tensors
        write_tensors(rng, place / TENSORS, changed)
        return tried(model, lambda: load_adapter(model, place, "new"), (ValueError, OSError))


def quantized(rng: random.Random) -> str:
    if rng.random() < 0.7:
        with torch.device("meta"):
            model = Model()
    else:
        model = filled(*rng.choice([(), ("nf4",), ("int8",)]))
    to = rng.choice(["nf4", "fp4", "int8"])
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "model.safetensors"
        write_tensors(rng, place, changed_state(rng, rng.choice(weights())))
        return tried(
            model, lambda: headroom.load_quantized(model, place, to), (ValueError, OSError)
        )


def merging(rng: random.Random) -> str:
    model = filled(rng.choice(["nf4", "int8"]), rng.choice([*OPTIONS]))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "model.safetensors"
        write_tensors(rng, place, changed_state(rng, weights()[0]))
        options = {"base": place, "requantize": rng.random() < 0.3}
        return tried(model, lambda: headroom.merge(model, **options), (ValueError, OSError))


def arguments(rng: random.Random) -> str:
    model = filled(*rng.choice([(), ("nf4",), ("plain",), ("plain", "dora")]))
    adapters = headroom.adapters
    calls: dict[str, tuple[Callable, tuple[str, ...]]] = {
        "lora": (
            headroom.lora,
            ("rank", "alpha", "targets", "dropout", "rslora", "dora", "modules_to_save", "dtype"),
        ),
        "quantize": (headroom.quantize, ("to", "block_size", "skip")),
        "merge": (headroom.merge, ("dtype", "base")),
        "dequantize": (headroom.dequantize, ("dtype",)),
        "delete": (adapters.delete_adapter, ("name",)),
        "load": (headroom.load_quantized, ("files", "to", "block_size", "skip")),
    }
    function, names = calls[rng.choice([*calls])]
    options = {"files": "nowhere"} if function is headroom.load_quantized else {}
    for name in rng.sample(names, rng.choice([1, min(2, len(names))])):
        value = rng.choice([hostile(rng), rng.choice(TEXTS), [rng.choice(TEXTS)], [hostile(rng)]])
        options[name] = value
    refusals = ValueError, TypeError, OSError
    return tried(model, lambda: function(model, **options), refusals)


def case(rng: random.Random) -> str:
    torch.manual_seed(rng.getrandbits(32))
    chosen = rng.choice([adapter, adapter, quantized, quantized, merging, arguments])
    return f"{chosen.__name__} {chosen(rng)}"


if __name__ == "__main__":
    sys.exit(main(case))
