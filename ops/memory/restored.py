"""Puts back what a forward pass changes: buffers and the states of random numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

__all__ = ["restored"]


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Runs a block after which the buffers of the model, the gradients and the random numbers are
    as they were, also if it raises."""
    places = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    grads = [(p, p.grad) for p in model.parameters()]
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices), device_type="cuda"):
        try:
            yield
        finally:
            with torch.no_grad():
                for module, name, buffer, value in places:
                    module._buffers[name] = buffer
                    if buffer is not None and not _same(buffer, value):
                        buffer.copy_(value)
            for p, grad in grads:
                p.grad = grad


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(a, b))
