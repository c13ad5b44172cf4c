"""What it costs to record a snapshot of memory: training steps with nothing around them, with
headroom.memory.snapshot, and with torch's profiler, which writes a trace of the same events."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from .harness import Case, Contender

STEPS = 5


def _blocks(width: int) -> nn.Module:
    def block() -> nn.Module:
        norm, up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        return nn.Sequential(norm, up, nn.GELU(), nn.Linear(4 * width, width))

    return nn.Sequential(*(block() for _ in range(4)))


class Run:
    """Steps of a model whose optimizer has its state already."""

    def __init__(self, tokens: int, width: int, device: torch.device) -> None:
        self.model = _blocks(width).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.x = torch.randn(tokens, width, device=device)
        self.path = os.path.join(tempfile.mkdtemp(), "run.pickle")
        self.steps(1)

    def steps(self, count: int = STEPS) -> None:
        for _ in range(count):
            self.model(self.x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def plain(run: Run) -> Contender:
    return Contender(run.steps)


def headroom_snapshot(run: Run, stacks: bool) -> Contender:
    import headroom

    def call() -> None:
        with headroom.memory.snapshot(run.path, run.model, run.optimizer, stacks=stacks):
            run.steps()

    return Contender(call)


def torch_profiler(run: Run, stacks: bool) -> Contender:
    def call() -> None:
        with torch.profiler.profile(profile_memory=True, with_stack=stacks) as profile:
            run.steps()
        profile.export_chrome_trace(run.path + ".json")

    return Contender(call)


SIZES = {"steps-f32": (1024, 256), "small-operations": (16, 16)}  # tokens, width


def cases(device: torch.device, quick: bool) -> list[Case]:
    def setup(size: tuple[int, int], device: torch.device) -> dict[str, Callable[[], Contender]]:
        run = Run(*size, device)
        return {
            "headroom": partial(headroom_snapshot, run, True),
            "headroom, stacks=False": partial(headroom_snapshot, run, False),
            "torch.profiler": partial(torch_profiler, run, True),
            "torch.profiler, with_stack=False": partial(torch_profiler, run, False),
            "nothing": partial(plain, run),
        }

    def what(tokens: int, width: int) -> str:
        shape = f"{tokens:,} x {width}"
        return f"{STEPS} steps of 4 blocks of LayerNorm, Linear, GELU, Linear on {shape}"

    return [
        Case(name, f"{what(*size)}, f32, the file included", partial(setup, size), "torch.profiler")
        for name, size in SIZES.items()
        if name == "small-operations" or not quick
    ]
