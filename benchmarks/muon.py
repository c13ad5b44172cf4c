"""Muon: the whole `step()` on many small matrices and on a few large ones, as users get it and with
products in float32 on both sides."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ._lists import Lists, on_next
from ._model import Shapes, optimizer_step
from .harness import Bar, Case, Contender, Rotation, SameWork
from .newton_schulz import JORDAN, STEPS

F32, BF16 = torch.float32, torch.bfloat16
LR, DECAY, MOMENTUM = 0.02, 0.1, 0.95
TORCH, BATCHED = "torch", "torch, batched by hand"


def gpt(layers: int, width: int) -> Shapes:
    """Hidden matrices: queries, keys, values and outputs, and two of the MLP."""
    return (((width, width),) * 4 + ((4 * width, width), (width, 4 * width))) * layers


LARGE = ((1024, 1024),) * 4 + ((2048, 1024),) * 2

# What to aim at, with products in bfloat16 as users get them. torch takes a matrix at a time, which
# costs more than the products at width 64. At 128 and 256 it reaches 51 and 86 % of the rate of
# large products, so the same operations take at least 0.51 and 0.86 of its time. With products in
# float32 it reaches above 80 % of it from width 128 on.
BARS = {64: 3.0, 128: 1.5, 256: 1.0}


def flops_of(shapes: Shapes) -> int:
    """The least: of the two symmetric products of an iteration, what is up to the diagonal."""
    sides = [sorted(shape) for shape in shapes]
    return STEPS * sum(m * (m + 1) * n + m * m * (m + 1) + 2 * m * m * n for m, n in sides)


def lists(shapes: Shapes) -> Lists:
    dtypes = dict.fromkeys(("params", "grads", "moments"), F32)
    return Lists(shapes, dtypes, {"params": 2, "grads": 1, "moments": 2}, zeros=("moments",))


def headroom(data: Rotation, name: str = "Muon", dtype: torch.dtype = BF16) -> Contender:
    from headroom import optim

    word = str(dtype).removeprefix("torch.")
    make = partial(getattr(optim, name), lr=LR, weight_decay=DECAY, ns_dtype=word)
    return optimizer_step(data, lambda params: make(params))


def headroom_f32(data: Rotation) -> Contender:
    return headroom(data, dtype=F32)


def by_torch(data: Rotation) -> Contender:
    return optimizer_step(data, lambda params: torch.optim.Muon(params, lr=LR, weight_decay=DECAY))


def update_of(d: SimpleNamespace, i: int) -> Tensor:
    d.moments[i].lerp_(d.grads[i], 1 - MOMENTUM)
    return d.grads[i].lerp(d.moments[i], MOMENTUM)


def move(param: Tensor, update: Tensor) -> None:
    rows, cols = param.shape
    param.mul_(1 - LR * DECAY)
    param.add_(update, alpha=-LR * max(1, rows / cols) ** 0.5)


def torch_lines(data: Rotation, dtype: torch.dtype = F32) -> Contender:
    """The lines of torch.optim.Muon with products in another dtype."""
    a, b, c = JORDAN

    def call(d: SimpleNamespace) -> None:
        for i, param in enumerate(d.params):
            is_tall = param.shape[0] > param.shape[1]
            x = update_of(d, i).to(dtype)
            x = x.T if is_tall else x
            x = x / x.norm().clamp(min=1e-7)
            for _ in range(STEPS):
                gram = x @ x.T
                x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
            move(param, x.T if is_tall else x)

    return on_next(data, call)


def torch_batched(data: Rotation, dtype: torch.dtype = F32) -> Contender:
    """The same with batched products of all matrices of one size, which no release of torch has."""
    a, b, c = JORDAN
    sizes: dict[tuple[int, ...], list[int]] = {}
    for i, param in enumerate(data.sets[0].params):
        sizes.setdefault(tuple(sorted(param.shape)), []).append(i)

    def call(d: SimpleNamespace) -> None:
        for chosen in sizes.values():
            turned = {i: d.params[i].shape[0] > d.params[i].shape[1] for i in chosen}
            updates = [update_of(d, i) for i in chosen]
            x = torch.stack([u.T if turned[i] else u for i, u in zip(chosen, updates)]).to(dtype)
            x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
            for _ in range(STEPS):
                gram = x @ x.mT
                gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
                x = torch.baddbmm(x, gram, x, beta=a)
            for i, update in zip(chosen, x):
                move(d.params[i], update.T if turned[i] else update)

    return on_next(data, call)


def after(d: SimpleNamespace) -> list[Tensor]:
    """The first step, from moments of zero, whose update goes along the gradient."""
    a, b, c = JORDAN
    params = []
    for param, grad in zip(d.params, d.grads):
        x = grad.double() / grad.double().norm()
        for _ in range(STEPS):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        rows, cols = param.shape
        scale = LR * max(1, rows / cols) ** 0.5
        params.append(param.double() * (1 - LR * DECAY) - scale * x)
    return params


SAME_WORK = SameWork(
    [headroom_f32, torch_lines, torch_batched],
    [lists(((30, 50), (50, 30), (30, 50)))],
    expected=after,
    left=lambda d: d.params,
    tolerance=2e-6,
)


def cases(device: torch.device, quick: bool) -> list[Case]:
    def case(name: str, what: str, shapes: Shapes, dtype: torch.dtype, *bars: Bar) -> Case:
        shapes = ((16, 16), (8, 32), (32, 8)) if quick else shapes
        data = lists(shapes)

        def setup(device: torch.device) -> dict[str, Any]:
            rotation = data.rotation(device)
            ours, loop = partial(headroom, rotation, dtype=dtype), partial(torch_lines, rotation)
            return {
                "headroom": ours,
                "headroom Muon8bit": partial(ours, name="Muon8bit"),
                TORCH: partial(by_torch, rotation) if dtype == BF16 else loop,
                BATCHED: partial(torch_batched, rotation, dtype=dtype),
            }

        return Case(name, what, setup, TORCH, flops_of(shapes), "flop", dtype, bars)

    def bar(ratio: float) -> Bar:
        return Bar("ratio", ratio, "cpu")

    found = []
    for dtype, word in ((BF16, "bf16"), (F32, "f32")):
        for width, ratio in BARS.items():
            what = f"126 hidden matrices of a GPT of width {width}, products in {word}"
            aim = bar(ratio if dtype == BF16 else 1.0)
            found.append(case(f"gpt-{width}-{word}", what, gpt(21, width), dtype, aim))
        what = f"6 of 1,024 x 1,024 and 2,048 x 1,024, products in {word}"
        found.append(case(f"large-{word}", what, LARGE, dtype, bar(1.0)))
    return found
