"""State files made up by chance: each loads, or is refused with one of the errors that are
documented and with nothing changed."""

import contextlib
import copy
import functools
import json
import math
import os
import random
import struct
import sys
import tempfile
import zlib
from pathlib import Path

import headroom
import numpy as np
import torch
from headroom import StateFileError
from headroom.state.file.layout import FORMAT, PREFIX
from tests.python.fuzz._driver import main
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

DOCUMENTED = (StateFileError, ValueError, OSError)

HOSTILE = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63 - 1, 2**63, 2**70, -(2**63), 10**4000),
    *(
        0.0,
        -0.0,
        1.5,
        1e300,
        5e-324,
        math.nan,
        math.inf,
        "",
        "0",
        "-1",
        "nan",
        "\ud800",
        "x" * 9999,
    ),
    *([], [0], [[]], [None], ["a", 1], {}, {"": 0}, {"$": None}, {"$": "tensor"}, {"$": []}),
    *({"$": "tensor", "name": name} for name in ("model.0.weight", "none", 1, [], None)),
    *({"$": "numpy", "name": "model.0.weight", "scalar": scalar} for scalar in (0, 1, [])),
    *({"$": kind, "items": items} for kind in ("dict", "tuple", "set") for items in (0, [0], "ab")),
    *({"$": "size", "items": [2**70]}, {"$": "counter", "items": [[0, "a"]]}),
    *({"$": "dtype", "name": name} for name in ("load", "float32", None, [])),
    *({"$": "device", "name": name} for name in ("cuda:99", "x", None, "meta")),
    *({"$": "path", "path": 1}, {"$": "bytes", "base64": "?"}, {"$": "float", "value": "1e999"}),
)


class Run:
    """What is saved, and loaded into."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(5, 70), nn.BatchNorm1d(70), nn.Linear(70, 3))
        self.optimizer = headroom.optim.AdamW8bit(self.model.parameters(), min_8bit_size=100)
        self.other = torch.optim.SGD(self.model[0].parameters(), momentum=0.9, lr=0.1)
        self.scheduler = CosineAnnealingLR(self.other, 10)
        self.scaler = headroom.amp.GradScaler("cpu")
        self.scaler.scale(self.model(torch.randn(4, 5)).square().mean()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.other.step()
        self.scheduler.step()

    def parts(self) -> dict:
        return {
            "model": self.model,
            "optimizer": [self.optimizer, self.other],
            "scheduler": self.scheduler,
            "scaler": self.scaler,
        }

    def seen(self) -> str:
        """All that a load could change."""
        states = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "other": self.other.state_dict(),
            "scheduler": {k: v for k, v in vars(self.scheduler).items() if k != "optimizer"},
            "same": self.scheduler.optimizer is self.other,
            "scaler": self.scaler.state_dict(),
            "rng": [random.getstate(), torch.get_rng_state(), np.random.get_state(legacy=False)],
        }
        return repr(plain(states))


def plain(value):
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), value.shape, value.flatten().view(torch.uint8).tolist())
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return [(repr(key), plain(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


EXTRA = {
    "list": [1, 2.5, "text", None, math.inf, torch.arange(5), np.ones(3), np.float32(1)],
    "more": {1: (2, {3}), "path": Path("a"), "b": b"\0"},
    "args": {"lr": 0.1, "dtype": torch.float16, "device": torch.device("cpu")},
}


class Mutant:
    """A file, taken apart, with some places changed."""

    def __init__(self, data: bytes, choose: random.Random) -> None:
        self.choose = choose
        length = struct.unpack("<Q", data[:8])[0]
        self.header = json.loads(data[8 : 8 + length])
        self.document = json.loads(self.header["__metadata__"].pop("headroom"))
        self.data = data[8 + length :]

    def change(self) -> None:
        """One place of the header or of the document: replaced, removed, doubled or exchanged."""
        container, key = self.place()
        what = self.choose.randrange(6)
        if what == 0:
            del container[key]
        elif what == 1 and isinstance(container, list):
            container.insert(key, copy.deepcopy(container[key]))
        elif what == 1:
            container[self.choose.choice(["", "$", "a", key + "'"])] = copy.deepcopy(container[key])
        elif what == 2:
            other, place = self.place()
            with contextlib.suppress(LookupError):
                container[key] = copy.deepcopy(other[place])
        elif what == 3 and type(container[key]) in (int, float):
            container[key] += self.choose.choice([-1, 1, -8, 8, 2**31])
        else:
            container[key] = copy.deepcopy(self.choose.choice(HOSTILE))

    def place(self) -> tuple:
        """Any place, those near the root as likely as those in long lists."""
        value = self.choose.choice([self.header, self.document, self.document["tree"]])
        if not isinstance(value, (dict, list)) or not value:
            value = self.header
        while True:
            keys = list(value) if isinstance(value, dict) else range(len(value))
            key = self.choose.choice(keys)
            inner = value[key]
            if not isinstance(inner, (dict, list)) or not inner or self.choose.random() < 0.2:
                return value, key
            value = inner

    def bytes(self) -> bytes:
        metadata = self.header.get("__metadata__")
        document = json.dumps(self.document)
        if self.choose.random() < 0.02:
            deep = "[" * self.choose.choice([100, 400, 2000, 10**5])
            document = document.replace('"tree":', f'"tree":{deep},"tree":', 1)
        if isinstance(metadata, dict):
            self.header["__metadata__"] = metadata | {"headroom": document}
        text = json.dumps(self.header, separators=(",", ":")).encode()
        begin = bytearray(struct.pack("<Q", len(text)) + text)
        field = 8 + len(PREFIX)
        begin[field : field + 8] = b"0" * 8
        begin[field : field + 8] = f"{zlib.crc32(begin):08x}".encode()
        return bytes(begin) + self.data


def made_up(data: bytes, choose: random.Random) -> bytes:
    if choose.random() < 0.1:  # without a checksum that fits
        changed = bytearray(data[: choose.choice([len(data), choose.randrange(len(data))])])
        for _ in range(choose.randrange(3)):
            if changed:
                changed[choose.randrange(len(changed))] = choose.randrange(256)
        return bytes(changed)
    mutant = Mutant(data, choose)
    for _ in range(choose.choice([1, 1, 1, 2, 3, 8])):
        with contextlib.suppress(LookupError, TypeError, AttributeError, OverflowError):
            mutant.change()
    return mutant.bytes()


class Target:
    """A good file, and what damaged ones are loaded into."""

    def __init__(self) -> None:
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.folder = tempfile.TemporaryDirectory(dir=memory)
        self.path = Path(self.folder.name) / "state"
        headroom.save_state(self.path, **Run(0).parts(), extra=EXTRA)
        self.data = self.path.read_bytes()
        self.fresh = Run(1)
        self.renew()

    def renew(self) -> None:
        self.run = copy.deepcopy(self.fresh)


@functools.cache
def target() -> Target:
    assert FORMAT == 2, "look whether the new format is made up well"
    return Target()


def case(rng: random.Random) -> str:
    aim = target()
    aim.path.write_bytes(made_up(aim.data, rng))
    before = aim.run.seen()
    try:
        headroom.load_state(aim.path, **aim.run.parts(), progress=False)
    except DOCUMENTED as error:
        assert len(str(error)) < 3000, "an error as long as the file"
        assert aim.run.seen() == before, "refused, but something has changed"
    else:
        aim.renew()
        return "loaded"
    with contextlib.suppress(StateFileError, OSError):
        headroom.latest(aim.path.parent)
    return "refused"


if __name__ == "__main__":
    sys.exit(main(case))
