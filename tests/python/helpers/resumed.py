"""A small model in training, and the comparison of two runs."""

import headroom
import torch
from torch import nn

from helpers import training
from helpers.bits import assert_same_bits
from helpers.modes import entries

ADAMW, ADAM = headroom.optim.AdamW, headroom.optim.Adam


def build(seed=0, dtype=torch.float32, convolution=False):
    torch.manual_seed(seed)
    if convolution:
        return nn.Sequential(nn.Conv2d(3, 4, 2), nn.Tanh(), nn.Conv2d(4, 2, 2)).to(dtype)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).to(dtype)


def train(model, optimizer, steps):
    convolution = isinstance(model[0], nn.Conv2d)
    dtype = next(model.parameters()).dtype

    def backward(step):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn((2, 3, 5, 5) if convolution else (8, 5), generator=generator)
        model(x.to(dtype)).square().mean().backward()

    training.train(optimizer, steps, backward)


def assert_same_run(model, optimizer, other, other_optimizer):
    assert_same_bits(model.parameters(), other.parameters())
    for left, right in zip(entries(optimizer), entries(other_optimizer)):
        assert left.keys() == right.keys()
        assert_same_bits(left.values(), right.values())
