"""Optimizers with a past, and everything that they hold."""

import torch

from helpers.bits import bits

NAMES = ["Adam", "AdamW"]


def trained(optimizer_class, steps=3, dtype=torch.float32, device="cpu", **options):
    """An optimizer with a past, over two parameters."""
    params = [
        torch.nn.Parameter(torch.randn(s, device=device, dtype=dtype)) for s in ((3, 4), (5,))
    ]
    optimizer = optimizer_class(params, **options)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    return optimizer


def parameters(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def states(optimizer):
    return [optimizer.state[p] for p in parameters(optimizer)]


def frozen_bits(optimizer):
    """Everything the optimizer holds, to be compared later."""
    tensors = [*parameters(optimizer), *(t for entry in states(optimizer) for t in entry.values())]
    return [(t.dtype, bits(t).clone()) for t in tensors]


def equal_bits(left, right):
    return len(left) == len(right) and all(
        a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(left, right)
    )
