"""What is held on the host comes back before it is asked for: the call before is asked for next."""

import gc

import pytest
import torch
from headroom.checkpointing import checkpoint
from headroom.host import saved
from headroom.host.saved import saved_on_host, trim
from headroom.host.slabs import Slabs
from torch import nn

from helpers.late_engine import Late


@pytest.fixture
def late(monkeypatch):
    """Counts the copies back that began when somebody waited for them already."""
    engine, fetch = Late(), saved._Storage._fetch
    engine.early, engine.missed = 0, 0

    def counted(storage):
        before = engine.bytes_up
        fetch(storage)
        engine.missed += engine.bytes_up > before

    def ahead(storage):
        before = engine.bytes_up
        if storage._source is None:
            fetch(storage)
        engine.early += engine.bytes_up > before

    monkeypatch.setattr(saved, "MIN_BYTES", 64)
    monkeypatch.setattr(saved, "_slabs", Slabs(saved._taken, lambda device: engine))
    monkeypatch.setattr(saved._Storage, "_fetch", counted)
    monkeypatch.setattr(saved._Storage, "prefetch", ahead)
    yield engine
    gc.collect()
    engine.finish()
    trim()
    assert engine.errors == []


class Block(nn.Module):
    """Keeps one tensor on the host, or two with what another part of the model has computed."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x, other=None):
        with saved_on_host():
            y = self.inner(x).sin()
            return y if other is None else y + (other * 2).cos()


def blocks(count):
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(count))


def encoder_decoder():
    encoder, decoder = blocks(5), blocks(5)
    x = torch.randn(8, 16)
    for block in encoder:
        x = block(x)
    y = torch.randn(8, 16)
    for block in decoder:
        y = block(y, x)
    y.sum().backward()


def two_towers():
    x, y = torch.randn(8, 16), torch.randn(8, 16)
    for left, right in zip(blocks(5), blocks(5)):
        x, y = left(x), right(y)
    (x * y).sum().backward()


def a_checkpoint_inside():
    x = torch.randn(8, 16)
    for i, block in enumerate(blocks(7)):
        x = checkpoint(block, x) if i % 3 == 1 else block(x)
    x.sum().backward()


@pytest.mark.parametrize("run", [encoder_decoder, two_towers, a_checkpoint_inside])
def test_autograd_asks_in_reverse_and_each_copy_has_begun_before(run, late):
    """Autograd runs what is ready in the reverse order of its making: nothing is left to learn."""
    for _ in range(2):
        run()
    assert late.missed == 0 and late.early > 0


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_with_two_graphs_one_block_comes_late(order, late):
    """That which the backward pass of a graph begins with, unless it was the last to be made: until
    the pass begins nobody knows that it will."""
    losses = []
    for _ in range(2):
        x = torch.randn(8, 16)
        for block in blocks(5):
            x = block(x)
        losses.append(x.sum())
    for i in order:
        losses[i].backward()
    assert late.missed == 2 and late.early > 8  # a block keeps what it was given and its product


def test_what_the_last_two_calls_keep_does_not_come_back(late):
    x = torch.randn(8, 16)
    for block in blocks(6):
        x = block(x)
    x.sum().backward()
    assert late.missed == 0
    assert late.bytes_up == 4 / 6 * late.bytes_down
