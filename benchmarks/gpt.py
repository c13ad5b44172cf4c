"""A step of the demo's GPT: Headroom's blocks at each level beside torch's, with the same AdamW."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from .harness import Case, Contender, Share

EXAMPLES = str(Path(__file__).resolve().parents[1] / "examples")
TORCH = "torch's blocks"
# A level may take so many times as long: what it computes again is all that it costs.
AT_MOST = {"L0": 1.0, "L1": 1 / 0.97, "L2": 1 / 0.95, "L5": 1 / 0.80}


def training(model: nn.Module, shape: tuple[int, int], vocab: int) -> Contender:
    from headroom.optim import AdamW

    device = next(model.parameters()).device
    tokens, targets = (torch.randint(vocab, shape, device=device) for _ in range(2))
    optimizer = AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        model(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Contender(step)


def cases(device: torch.device, quick: bool) -> list[Case]:
    if EXAMPLES not in sys.path:
        sys.path.insert(0, EXAMPLES)
    from model import GPT, SIZES, HeadroomGPT

    size = SIZES["tiny" if quick else "small" if device.type == "cpu" else "medium"]
    shape = size.batch, size.context

    def setup(device: torch.device) -> dict[str, Callable[[], Contender]]:
        def at(level: str) -> Callable[[], Contender]:
            return lambda: training(HeadroomGPT(size, level).to(device), shape, size.vocab)

        ours = {f"headroom {level}": at(level) for level in AT_MOST}
        return {TORCH: lambda: training(GPT(size).to(device), shape, size.vocab), **ours}

    bars = [
        Share("time", f"headroom {level}", TORCH, at_most, "cpu")
        for level, at_most in AT_MOST.items()
    ]
    what = f"a step of the demo's GPT, {size.layers} x {size.width}, {shape[0] * shape[1]:,} tokens"
    return [Case("f32", what, setup, TORCH, bars=bars, subject="headroom L0")]
