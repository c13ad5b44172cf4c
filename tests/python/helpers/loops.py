"""A small model, its batches, and what tests of loops that others wrote compare."""

from functools import partial

import headroom
import pytest
import torch
from torch import nn

from helpers import modes
from helpers.bits import assert_same_bits
from helpers.modes import EVERY, entries

ADAMW = headroom.optim.AdamW
OURS = pytest.mark.parametrize(  # the second with 8-bit moments for one of four parameters
    "make",
    [
        partial(ADAMW, state_dtype=torch.bfloat16),
        partial(headroom.optim.AdamW8bit, min_8bit_size=8),
    ],
    ids=["AdamW", "AdamW8bit"],
)

QUIET = dict(  # options of lightning.Trainer
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    enable_checkpointing=False,
)


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def made(name):
    """A model in two precisions, and its optimizer."""
    model = modes.build(torch.bfloat16)
    return model, EVERY[name].make(model.parameters())


def batches(count, rows=8):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 5, generator=generator) for _ in range(count)]


def assert_same_run(model, optimizer, other, other_optimizer):
    assert_same_bits(model.parameters(), other.parameters())
    for left, right in zip(entries(optimizer), entries(other_optimizer)):
        assert_same_bits(left.values(), right.values())


def assert_close(model, other):
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def plain_run(data, make, schedule=None, *, lr=1e-2):
    """The model, the optimizer and the rate of each step of a loop with nothing of others in it."""
    model = build()
    optimizer = make(model.parameters(), lr=lr)
    scheduler = None if schedule is None else schedule(optimizer)
    rates = []
    for x in data:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        group = optimizer.param_groups[0]
        rates.append((float(group["lr"]), group.get("betas")))
    return model, optimizer, rates
