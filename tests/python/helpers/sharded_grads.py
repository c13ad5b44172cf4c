"""A model, its batches and gradients on every rank, for clipping, scaling and accumulation."""

import headroom
import torch
from torch.nn.functional import mse_loss

ADAMW = headroom.optim.AdamW
CLOSE = dict(rtol=2**-21, atol=2**-24)


def make_model():
    """Layers of 5, 5, 1 and 1 rows: uneven shards, and nothing of the last on rank 1."""
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))


def batch(seed, size=8):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 3, generator=generator), torch.randn(size, 1, generator=generator)


def backward(model, seed, factor=1.0):
    x, y = batch(seed)
    (factor * mse_loss(model(x), y)).backward()


def grads(model):
    return [p.grad for p in model.parameters()]
