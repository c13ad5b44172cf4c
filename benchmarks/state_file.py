"""Times saving and loading states, beside torch.save and plain writes to the disk.

The files are in TMPDIR, or else in the current folder.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch
from torch import nn

from .harness import Bar, Case, Contender

WRITTEN_AT_ONCE = 8 << 20


@dataclass
class Run:
    """A model with AdamW's states, and a folder for its files."""

    layers: int
    width: int
    device: torch.device
    folder: tempfile.TemporaryDirectory = field(
        # Not in /tmp, which may lie in memory.
        default_factory=lambda: tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "."))
    )

    def __post_init__(self) -> None:
        import headroom

        layers = [nn.Linear(self.width, self.width) for _ in range(self.layers)]
        self.model = nn.Sequential(*layers).to(self.device)
        self.optimizer = headroom.optim.AdamW(self.model.parameters())
        for param in self.model.parameters():
            param.grad = torch.ones_like(param)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def nbytes(self) -> int:
        return 3 * sum(param.nbytes for param in self.model.parameters())

    def path(self, name: str) -> Path:
        return Path(self.folder.name) / name

    def headroom_save(self) -> None:
        import headroom

        path = self.path("headroom-1")
        headroom.save_state(path, model=self.model, optimizer=self.optimizer, progress=False)

    def torch_save(self) -> None:
        torch.save([self.model.state_dict(), self.optimizer.state_dict()], self.path("torch"))

    def torch_save_safely(self) -> None:
        with self.replaced("torch") as file:
            torch.save([self.model.state_dict(), self.optimizer.state_dict()], file)

    def raw_write(self, data: memoryview) -> None:
        with self.replaced("raw") as file:
            for start in range(0, len(data), WRITTEN_AT_ONCE):
                file.write(data[start : start + WRITTEN_AT_ONCE])

    @contextlib.contextmanager
    def replaced(self, name: str) -> Iterator[BinaryIO]:
        """Opens a file that survives a crash, in the way that users write by hand."""
        with open(self.path("partial"), "wb", buffering=0) as file:
            yield file
            os.fsync(file.fileno())
        os.replace(self.path("partial"), self.path(name))

    def headroom_load(self) -> None:
        import headroom

        path = self.path("headroom-1")
        headroom.load_state(path, model=self.model, optimizer=self.optimizer, progress=False)

    def torch_load(self) -> None:
        states = torch.load(self.path("torch"), map_location="cpu", weights_only=True)
        self.model.load_state_dict(states[0])
        self.optimizer.load_state_dict(states[1])

    def raw_read(self, data: memoryview) -> None:
        with open(self.path("raw"), "rb", buffering=0) as file:
            for start in range(0, len(data), WRITTEN_AT_ONCE):
                file.readinto(data[start : start + WRITTEN_AT_ONCE])


def saving(layers: int, width: int):
    def setup(device):
        run = Run(layers, width, device)
        data = memoryview(bytearray(os.urandom(1 << 20)) * (run.nbytes >> 20 or 1))
        calls = {
            "headroom": run.headroom_save,
            "torch.save": run.torch_save_safely,
            "torch.save, unsafe": run.torch_save,
            "disk": lambda: run.raw_write(data),
        }
        return {name: lambda c=call: Contender(c, work=run.nbytes) for name, call in calls.items()}

    return setup


def loading(layers: int, width: int):
    def setup(device):
        run = Run(layers, width, device)
        data = memoryview(bytearray(run.nbytes))
        run.headroom_save()
        run.torch_save()
        run.raw_write(data)
        calls = {
            "headroom": run.headroom_load,
            "torch.load": run.torch_load,
            "disk": lambda: run.raw_read(data),
        }
        return {name: lambda c=call: Contender(c, work=run.nbytes) for name, call in calls.items()}

    return setup


def cases(device: torch.device, quick: bool) -> list[Case]:
    width, many = (32, 10) if quick else (2048, 500)
    params = f"{8 * width * width:,} parameters"
    bars = [Bar("ratio", 0.8, kind) for kind in ("cpu", "cuda")]
    disk = [Bar("ratio", 0.8, kind, "disk") for kind in ("cpu", "cuda")]
    return [
        Case(
            "save",
            f"AdamW in f32, {params}, synced and renamed, ours with checksums",
            saving(8, width),
            "torch.save",
            bars=[*bars, *disk],
        ),
        Case(
            "load",
            f"the same from the page cache (torch and disk: unchecked), {params}",
            loading(8, width),
            "torch.load",
            bars=bars,
        ),
        Case("save-many", f"{2 * many:,} parameters of 64 or 8", saving(many, 8), "torch.save"),
        Case("load-many", f"{2 * many:,} parameters of 64 or 8", loading(many, 8), "torch.load"),
    ]
