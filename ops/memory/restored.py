"""Puts back what a forward pass changes: buffers and the states of random numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from .._core.surroundings import Buffers

__all__ = ["restored"]


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Runs a block after which the buffers of the model, the gradients and the random numbers are
    as they were, also if it raises."""
    buffers = Buffers([model])
    grads = [(p, p.grad) for p in model.parameters()]
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices), device_type="cuda"):
        try:
            yield
        finally:
            buffers.restore()
            for p, grad in grads:
                p.grad = grad
