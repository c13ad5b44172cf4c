"""Adafactor of torch, of transformers and ours, with parameters and gradients for all three."""

import headroom
import pytest
import torch

from helpers import training

HF = pytest.importorskip("transformers.optimization").Adafactor
ADAFACTOR = headroom.optim.Adafactor
TORCH = torch.optim.Adafactor
SHAPES = ((7, 5), (64, 96), (8, 6, 3, 3), (1, 9), (9, 1), (1, 1), (11,), (), (2, 12, 20), (700, 3))
MANUAL = {"lr": 1e-3, "relative_step": False}
CASES = {
    "torch": ("torch", {}),
    "torch decay": ("torch", {"lr": 0.05, "weight_decay": 0.1, "maximize": True}),
    "torch options": ("torch", {"beta2_decay": -0.5, "eps": (1e-3, 1e-2), "d": 1.5}),
    "hf": ("hf", {}),
    "hf warm-up": ("hf", {"warmup_init": True, "weight_decay": 0.1}),
    "hf fine-tuning": ("hf", MANUAL | {"scale_parameter": False, "weight_decay": 0.1}),
    "hf momentum": ("hf", MANUAL | {"beta1": 0.9, "clip_threshold": 0.5, "decay_rate": -0.6}),
}
BOTH = pytest.mark.parametrize("semantics", ["torch", "hf"])


def make(semantics, params, ours=True, **options):
    if ours:
        return ADAFACTOR(params, semantics=semantics, **options)
    return {"torch": TORCH, "hf": HF}[semantics](params, **options)


def start(shapes=SHAPES, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(3)
    return [
        torch.nn.Parameter((0.1 * torch.randn(s, generator=generator)).to(device, dtype))
        for s in shapes
    ]


def set_grads(params, step):
    """The same for parameters of every dtype, spread over some powers of ten, some zero."""
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        size = torch.rand(p.shape, generator=generator)
        grad = torch.randn(p.shape, generator=generator) * 10 ** (3 * size - 2) * (size > 0.1)
        p.grad = grad.bfloat16().to(p.device, p.dtype)


def train(params, optimizer, steps):
    training.train(optimizer, steps, lambda step: set_grads(params, step))
    return params, optimizer
