"""Matrix products: forward, and forward with backward, beside torch.matmul."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ._layers import trained
from .harness import Bar, Case, Contender, Rotation, filled, sets_needed

F32, BF16 = torch.float32, torch.bfloat16


class Product(NamedTuple):
    a: Tensor
    b: Tensor
    dy: Tensor


def product(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> Product:
    a, b, dy = (filled(x * y, dtype, device).view(x, y) for x, y in ((m, k), (n, k), (m, n)))
    return Product(a.requires_grad_(), b.requires_grad_(), dy)


def headroom(d: Product) -> Tensor:
    from headroom.functional import gemm

    return gemm(d.a, d.b, transpose_b=True)


def theirs(d: Product) -> Tensor:
    return torch.matmul(d.a, d.b.t())


def forward(data: Rotation, multiply) -> Contender:
    def call():
        with torch.no_grad():
            multiply(data.next())

    return Contender(call)


def cases(device: torch.device, quick: bool) -> list[Case]:
    def case(dtype: torch.dtype, sizes: tuple[int, int, int], backward: bool) -> Case:
        m, n, k = (7, 24, 16) if quick else sizes
        held = (m * k + n * k + 2 * m * n) * dtype.itemsize
        flops = 2 * m * n * k * (3 if backward else 1)

        def setup(device):
            sets = range(sets_needed(held, device))
            data = Rotation([product(m, n, k, dtype, device) for _ in sets])

            def run(multiply):
                if not backward:
                    return forward(data, multiply)
                return trained(data, multiply, lambda d: d[:2], lambda d: d.dy)

            return {"headroom": lambda: run(headroom), "torch": lambda: run(theirs)}

        name = "f32" if dtype == F32 else "bf16"
        what = f"{m:,} x {n:,} x {k:,}, {name}, {'forward and backward' if backward else 'forward'}"
        key = f"{name}-{sizes[1]}{'-backward' if backward else ''}"
        bars = [Bar("ratio", 0.98, "cuda")]
        return Case(key, what, setup, "torch", flops, "flop", dtype, bars)

    return [
        case(dtype, sizes, backward)
        for dtype in (F32, BF16)
        for sizes in ((512, 2048, 2048), (2048, 8192, 2048))
        for backward in (False, True)
    ]
