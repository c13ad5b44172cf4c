"""A checkpointed chain of blocks, forward and backward: torch's checkpoint, ours, and ours with the
comparison of values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from .harness import Case, Contender

F32 = torch.float32


def train(model: nn.ModuleList, x: torch.Tensor, call: Callable) -> Contender:
    def step():
        y = x
        for block in model:
            y = call(block, y)
        y.sum().backward()

    return Contender(step)


def torch_checkpoint(model: nn.ModuleList, x: torch.Tensor) -> Contender:
    from torch.utils.checkpoint import checkpoint

    return train(model, x, partial(checkpoint, use_reentrant=False))


def headroom_checkpoint(model: nn.ModuleList, x: torch.Tensor, verify: bool) -> Contender:
    import headroom

    return train(model, x, partial(headroom.checkpoint, verify=verify))


def not_checkpointed(model: nn.ModuleList, x: torch.Tensor) -> Contender:
    return train(model, x, lambda block, y: block(y))


def cases(device: torch.device, quick: bool) -> list[Case]:
    tokens, width = (64, 16) if quick else (1024, 512)

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def setup(device):
        model = nn.ModuleList(block() for _ in range(4)).to(device)
        x = torch.randn(tokens, width, device=device, requires_grad=True)
        return {
            "headroom": partial(headroom_checkpoint, model, x, verify=False),
            "headroom, verify=True": partial(headroom_checkpoint, model, x, verify=True),
            "torch": partial(torch_checkpoint, model, x),
            "not checkpointed": partial(not_checkpointed, model, x),
        }

    # Of each block: the forward pass, its first product again, and the backward pass.
    flops = 4 * (16 + 8 + 32) * tokens * width * width
    what = f"4 blocks of Linear, GELU, Linear on {tokens:,} x {width}, f32"
    return [Case("blocks-f32", what, setup, "torch", flops, unit="flop")]
