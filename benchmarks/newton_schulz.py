"""Matrices made orthogonal as Muon does it: many small ones in a batch, and a large one."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from .harness import Bar, Case, Contender, Rotation, filled, sets_needed

F32, BF16 = torch.float32, torch.bfloat16
JORDAN = (3.4445, -4.7750, 2.0315)
STEPS = 5


def allocate(count: int, m: int, n: int, dtype: torch.dtype, device: torch.device):
    x = filled(count * m * n, dtype, device).view(count, m, n)
    return SimpleNamespace(x=x, squares=x.float().square().sum((1, 2)))


def headroom(data: Rotation, variant: str = "standard") -> Contender:
    from headroom.functional import newton_schulz_

    def call() -> Tensor:
        d = data.next()
        return newton_schulz_(d.x, d.squares, coefficients=[JORDAN] * STEPS, variant=variant)

    return Contender(call)


def one_by_one(data: Rotation) -> Contender:
    """The loop of torch.optim.Muon, in the dtype of the matrices."""
    a, b, c = JORDAN

    def call() -> None:
        for x in data.next().x:
            x.div_(x.norm().clamp(min=1e-7))
            for _ in range(STEPS):
                gram = x @ x.T
                x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)

    return Contender(call)


def cases(device: torch.device, quick: bool) -> list[Case]:
    def case(name: str, what: str, shape: tuple[int, ...], dtype: torch.dtype, *bars: Bar) -> Case:
        count, m, n = (3, 8, 16) if quick else shape
        flops = STEPS * count * (4 * m * m * n + 2 * m**3)

        def setup(device):
            sets = range(sets_needed(count * m * n * dtype.itemsize, device))
            data = Rotation([allocate(count, m, n, dtype, device) for _ in sets])
            gram = partial(headroom, variant="gram")
            return {
                "headroom": partial(headroom, data),
                "headroom, gram": partial(gram, data),
                "torch": partial(one_by_one, data),
            }

        return Case(name, what, setup, "torch", flops, "flop", dtype, bars)

    few = Bar("ratio", 1.0, "cpu")
    return [
        case("small-f32", "126 of 64 x 256, f32", (126, 64, 256), F32),
        case("small-bf16", "126 of 64 x 256, bf16", (126, 64, 256), BF16),
        case("large-f32", "1,024 x 1,024, f32", (1, 1024, 1024), F32, few),
        case("wide-f32", "768 x 3,072, f32", (1, 768, 3072), F32, few),
    ]
