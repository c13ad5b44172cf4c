"""Gradients, steps and overflows for tests of headroom.amp.GradScaler beside torch's."""

import math

import headroom
import torch

Scaler = headroom.amp.GradScaler
OURS = headroom.optim.AdamW
TORCHS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "fused adamw": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
}
OVERFLOWS = [0, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]
VALUES = [math.inf, -math.inf, math.nan]


def parameters(shapes=((4, 3), (5,), ()), device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes
    ]


def set_grads(params, scale, seed, bad=None):
    """Gradients times `scale`, which must be a power of two, and one `bad` in the second."""
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.device) * scale
    if bad is not None:
        params[1].grad[2] = bad


def start(scaler, device="cpu"):
    """Makes the scale tensor, as the first loss does."""
    scaler.scale(torch.zeros((), device=device))
    return scaler


def run(scaler, optimizer, params, overflows=OVERFLOWS, unscale=False):
    """A step per entry of `overflows`. Returns the scales before each."""
    start(scaler, params[0].device.type)
    scales = []
    for step, overflow in enumerate(overflows):
        scales.append(scaler.get_scale())
        set_grads(params, scales[-1], step, VALUES[step % 3] if overflow else None)
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return scales
