"""Adam8bit and AdamW8bit over parameters on both sides of the threshold, or over one parameter of
four dimensions."""

import headroom
import pytest
import torch

from helpers.bits import bits

ADAM8BIT, ADAMW8BIT = headroom.optim.Adam8bit, headroom.optim.AdamW8bit
CLASSES = pytest.mark.parametrize("cls", [ADAM8BIT, ADAMW8BIT], ids=["Adam8bit", "AdamW8bit"])
LARGE, SMALL = (70, 60), (5, 3)  # with the default min_8bit_size


def is_8bit(optimizer, param):
    """By the state, once there is one."""
    assert set(optimizer.state[param]) in (
        {"step", "exp_avg", "exp_avg_sq"},
        {"step", "exp_avg", "exp_avg_sq", "exp_avg_absmax", "exp_avg_sq_absmax"},
    )
    codes = len(optimizer.state[param]) == 5
    dtype = torch.uint8 if codes else torch.float32
    assert all(optimizer.state[param][key].dtype == dtype for key in ("exp_avg", "exp_avg_sq"))
    return codes


def states(optimizer):
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [value for param in params for value in optimizer.state[param].values()]


def snapshot(optimizer):
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [bits(tensor).clone() for tensor in (*params, *states(optimizer))]


def unchanged(optimizer, before):
    return all(map(torch.equal, snapshot(optimizer), before))


def mixed(device="cpu", shapes=(LARGE, SMALL), dtype=torch.float32, cls=ADAMW8BIT, **options):
    """Parameters on both sides of the threshold, in one group; always the same values."""
    generator = torch.Generator().manual_seed(5)
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    params = [torch.nn.Parameter(value.to(device, dtype)) for value in values]
    return params, cls(params, **({"lr": 1e-2, "weight_decay": 0.1} | options))


def set_grads(params, seed, dtype=None):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad_dtype = dtype or p.dtype
        p.grad = torch.randn(p.shape, generator=generator).to(p.device, dtype or p.dtype)


def run(params, optimizer, steps=3):
    for seed in range(steps):
        set_grads(params, seed)
        optimizer.step()
    return params, optimizer


SHAPE = (24, 16, 5, 5)  # 9600 elements: 8 bits, and blocks that rows and channels do not divide


def grads(steps=4):
    """Of sizes that differ from place to place, so that a scale of the wrong block shows."""
    generator = torch.Generator().manual_seed(3)
    sizes = 10 ** torch.randn(SHAPE, generator=generator)
    return [torch.randn(SHAPE, generator=generator) * sizes for _ in range(steps)]


def start():
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(4))


def trained(param, values, **options):
    optimizer = ADAMW8BIT([param], lr=1e-2, **options)
    for grad in values:
        param.grad = grad.to(param.device, param.dtype)
        optimizer.step()
    assert is_8bit(optimizer, param)
    return optimizer
