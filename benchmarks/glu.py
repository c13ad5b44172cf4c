"""Gated linear units: forward and backward through autograd, beside torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._layers import trained
from .harness import Bar, Case, Rotation, filled, sets_needed
from .instructions.row import LOGISTIC, SQUARE, Row

F32, BF16 = torch.float32, torch.bfloat16


class Rows(NamedTuple):
    gate: Tensor
    up: Tensor
    dh: Tensor


def rows(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Rows:
    count, cols = shape
    gate, up, dh = (filled(count * cols, dtype, device).view(shape) for _ in range(3))
    return Rows(gate.requires_grad_(), up.requires_grad_(), dh)


def headroom_unit(activation: str) -> Callable[[Rows], Tensor]:
    from headroom.functional import glu

    return lambda d: glu(d.gate, d.up, activation)


TORCH = {
    "silu": lambda d: F.silu(d.gate) * d.up,
    "gelu": lambda d: F.gelu(d.gate) * d.up,
    "gelu_tanh": lambda d: F.gelu(d.gate, approximate="tanh") * d.up,
}


def cases(device: torch.device, quick: bool) -> list[Case]:
    def case(activation: str, dtype: torch.dtype, shape: tuple[int, int]) -> Case:
        used = (7, 96) if quick else shape
        numel = used[0] * used[1]

        def setup(device):
            held = 3 * numel * dtype.itemsize
            data = Rotation([rows(used, dtype, device) for _ in range(sets_needed(held, device))])
            return {
                "headroom": lambda: trained(
                    data, headroom_unit(activation), lambda d: (d.gate, d.up), lambda d: d.dh
                ),
                "torch": lambda: trained(
                    data, TORCH[activation], lambda d: (d.gate, d.up), lambda d: d.dh
                ),
            }

        # Forward reads gate and up and writes h; backward reads gate, up and dh and writes two.
        work = 8 * numel * dtype.itemsize
        bars = [Bar("ratio", 2.0, "cpu")]
        name = "f32" if dtype == F32 else "bf16"
        what = f"glu {activation} forward and backward on {used[0]:,} x {used[1]:,}, {name}"
        return Case(f"{activation}-{name}-{shape[1]}", what, setup, "torch", work, bars=bars)

    big, long = (4096, 2048), (512, 8192)
    return [
        *(case("silu", dtype, shape) for dtype in (F32, BF16) for shape in (big, long)),
        *(case(other, BF16, big) for other in ("gelu", "gelu_tanh")),
    ]


GLU, GLU_BACK = {"90": 33.2, "86": 33.4, "75": 36.2}, {"90": 49.9, "86": 48.6, "75": 51.3}
BACK_F32 = {"90": 60.8, "86": 61, "75": 63.9}
BUDGETS = [
    Row("glu_kernel", "silu, f32", 12, 8, 4, SQUARE, 10, {"90": 40.7, "86": 40.7, "75": 43.1}),
    Row("glu_kernel", "silu, bf16", 6, 4, 2, SQUARE, 10, GLU | {"75": 42.4}, 36),
    Row("glu_kernel", "silu, f16", 6, 4, 2, SQUARE, 10, GLU, 36, f16=True),
    Row("glu_kernel", "silu, f32, backward", 20, 12, 8, LOGISTIC, 12, BACK_F32),
    Row("glu_kernel", "silu, bf16, backward", 10, 6, 4, LOGISTIC, 12, GLU_BACK | {"75": 63.8}, 60),
    Row("glu_kernel", "silu, f16, backward", 10, 6, 4, LOGISTIC, 12, GLU_BACK, 60, f16=True),
]
